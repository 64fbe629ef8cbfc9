"""LoRAs are fused as upstream fuses them, in whatever spelling their keys are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tpuport
from tests.core.heard import Heard
from tests.pipelines.example import all_examples, made
from tests.tolerances import TOLERANCES
from tpuport.core.pipelines import loras
from tpuport.core.pipelines.loras import Lora, fuse
from tpuport.core.reports import Reporter
from tpuport.core.seam.ported import modules_of
from tpuport.core.spec.lora_choice import LoraChoice
from tpuport.errors import TpuportError, UsageError
from tpuport.targets import matched_loras

Tensors = dict[str, torch.Tensor]

#: Of each example, what LoRAs are made for: the ends of paths.
LAYERS = {
    "WanPipeline": ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"),
    "CogVideoXPipeline": ("to_q", "to_v", "ff.net.2"),
    "AllegroPipeline": ("to_q", "to_out.0"),
    "HunyuanVideo15Pipeline": ("attn.to_q", "attn.to_k", "attn.to_v", "add_q_proj"),
}


def pipeline_of(name: str) -> Any:
    return made(all_examples()[name])[0]


def lora_for(pipeline: Any, rank: int = 2) -> Tensors:
    """Random factors for layers of the transformer; those of a block share an A."""
    ends = LAYERS[type(pipeline).__name__]
    torch.manual_seed(5)
    found: Tensors = {}
    first: Tensors = {}
    for path, layer in pipeline.transformer.named_modules():
        if not path.endswith(ends):
            continue
        rows, columns = layer.weight.shape
        # The parts of a fused layer have one A in each attention.
        shared = f"{path.rpartition('.')[0]} {columns}"
        factor = first.setdefault(shared, torch.randn(rank, columns) * 0.3)
        found[f"{path}.lora_A.weight"] = factor
        found[f"{path}.lora_B.weight"] = torch.randn(rows, rank) * 0.3
    assert found
    return found


def written(tensors: Tensors, file: Path, prefix: str = "") -> Path:
    whole = {f"{prefix}{key}": tensor.clone() for key, tensor in tensors.items()}
    save_file(whole, file)
    return file


def weights(pipeline: Any) -> Tensors:
    return {key: t.clone() for key, t in pipeline.transformer.state_dict().items()}


def shape_of(module: torch.nn.Module) -> dict[str, Any]:
    """The class and the attributes of each part."""
    return {path: (type(m), set(vars(m))) for path, m in module.named_modules()}


def fused(name: str, text: str, heard: Reporter | None = None) -> Tensors:
    """The weights with a LoRA that tpuport fuses."""
    pipeline = pipeline_of(name)
    modules = modules_of(pipeline)
    found = [Lora.find(LoraChoice.parse(text), Reporter())]
    before = shape_of(pipeline.transformer)
    fuse(matched_loras(type(pipeline), modules, found, heard or Reporter()), modules)
    assert (
        shape_of(pipeline.transformer) == before
    )  # so its programs are the ones of the plain module
    return weights(pipeline)


def by_upstream(name: str, file: Path, scale: float) -> Tensors:
    pipeline = pipeline_of(name)
    if hasattr(pipeline, "load_lora_weights"):
        pipeline.load_lora_weights(str(file))
        pipeline.fuse_lora(lora_scale=scale)
        pipeline.unload_lora_weights()
    else:
        pipeline.transformer.load_lora_adapter(str(file))
        pipeline.transformer.fuse_lora(lora_scale=scale)
        pipeline.transformer.unload_lora()
    return weights(pipeline)


def apart(one: Tensors, other: Tensors) -> float:
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).abs().max()) for key in one)


@pytest.mark.parametrize("name", sorted(LAYERS.keys() - {"AllegroPipeline"}))
def test_a_lora_is_fused_as_upstream_fuses_it(name: str, tmp_path: Path) -> None:
    pipeline = pipeline_of(name)
    plain = weights(pipeline)
    file = written(lora_for(pipeline), tmp_path / "a.safetensors", "transformer.")
    expected = by_upstream(name, file, 0.7)
    assert apart(expected, plain) > 0.05
    assert apart(fused(name, f"{file}:0.7"), expected) < TOLERANCES["fused weight"]
    assert (
        apart(fused(name, f"{tmp_path}:transformer:0.7"), expected)
        < TOLERANCES["fused weight"]
    )


def test_the_settings_in_a_files_header_count(tmp_path: Path) -> None:
    """``save_lora_weights`` keeps alpha there."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipeline = pipeline_of("WanPipeline")
    config = LoraConfig(
        r=2, target_modules=["to_q"], lora_alpha=6, init_lora_weights=False
    )
    pipeline.transformer.add_adapter(config)
    type(pipeline).save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(pipeline.transformer),
        transformer_lora_adapter_metadata=config.to_dict(),
    )
    expected = by_upstream("WanPipeline", tmp_path, 1.0)
    assert (
        apart(fused("WanPipeline", str(tmp_path)), expected)
        < TOLERANCES["fused weight"]
    )


def test_a_class_that_takes_no_adapters_takes_a_lora(tmp_path: Path) -> None:
    """Upstream gives neither Allegro's pipeline nor its transformer a loader."""
    pipeline = pipeline_of("AllegroPipeline")
    expected, tensors = weights(pipeline), lora_for(pipeline)
    for key, up in tensors.items():
        path, is_up, _ = key.partition(".lora_B")
        if is_up:
            product = up @ tensors[f"{path}.lora_A.weight"]
            expected[f"{path}.weight"] += 0.7 * product
    file = written(tensors, tmp_path / "a.safetensors", "transformer.")
    found = fused("AllegroPipeline", f"{file}:0.7")
    assert apart(found, expected) < TOLERANCES["fused weight"]


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    found: Tensors = {}
    for key, tensor in tensors.items():
        for old, new in pairs:
            key = key.replace(old, new)
        found[key] = tensor
    return found


def with_alpha(tensors: Tensors, alpha: float, down: str, up: str) -> Tensors:
    """The same LoRA with an alpha, whose first factors are as much larger."""
    found: Tensors = {}
    for key, tensor in tensors.items():
        path = key.partition(".lora_")[0]
        if key.endswith("lora_A.weight"):
            found[f"{path}.{down}.weight"] = tensor * (len(tensor) / alpha)
            found[f"{path}.alpha"] = torch.tensor(alpha)
        else:
            found[f"{path}.{up}.weight"] = tensor
    return found


def flat(tensors: Tensors) -> Tensors:
    """Underscores for the dots of paths, as kohya's trainers have them."""
    found: Tensors = {}
    for key, tensor in tensors.items():
        path, dot, rest = key.partition(".lora_" if ".lora_" in key else ".alpha")
        found["lora_unet_" + path.replace(".", "_") + dot + rest] = tensor
    return found


def together(tensors: Tensors) -> Tensors:
    """Queries, keys and values of the image as one layer."""
    found: Tensors = {}
    for key, tensor in tensors.items():
        path, middle, rest = key.partition(".attn.to_q.lora_B")
        if middle:
            parts = [tensors[f"{path}.attn.to_{n}.lora_B{rest}"] for n in "qkv"]
            found[f"{path}.img_attn.qkv.lora_B{rest}"] = torch.cat(parts)
        elif ".attn.to_q.lora_A" in key:
            found[key.replace(".attn.to_q", ".img_attn.qkv")] = tensor
        elif ".attn.to_" not in key:
            found[key] = tensor
    return found


WAN = (
    *(("attn1.", "self_attn."), ("attn2.", "cross_attn."), ("to_out.0", "o")),
    *(("to_q", "q"), ("to_k", "k"), ("to_v", "v")),
    *(("net.0.proj", "0"), ("net.2", "2")),
)
TENCENT = (
    *(("transformer_blocks", "double_blocks"), ("attn.to_", "img_attn_")),
    *(
        ("attn.add_q_proj", "txt_attn_q"),
        ("context_embedder.token_refiner.", "txt_in."),
    ),
)


def blocks_alone(tensors: Tensors) -> Tensors:
    return {
        key: t for key, t in tensors.items() if key.startswith("transformer_blocks")
    }


def kohya(tensors: Tensors, *names: tuple[str, str]) -> Tensors:
    return flat(with_alpha(renamed(tensors, *names), 4.0, "lora_down", "lora_up"))


def comfy(tensors: Tensors, *names: tuple[str, str]) -> Tensors:
    return with_alpha(renamed(tensors, *names), 4.0, "lora_A", "lora_B")


SPELLINGS: dict[str, tuple[str, str, Callable[[Tensors], Tensors]]] = {
    "Wan kohya": ("WanPipeline", "", lambda t: kohya(t, *WAN)),
    "Wan ComfyUI": ("WanPipeline", "diffusion_model.", lambda t: comfy(t, *WAN)),
    "1.5 kohya": ("HunyuanVideo15Pipeline", "", lambda t: kohya(t, *TENCENT)),
    "1.5 ComfyUI": (
        *("HunyuanVideo15Pipeline", "diffusion_model."),
        lambda t: comfy(together(t), *TENCENT),
    ),
    "1.5 diffusers": ("HunyuanVideo15Pipeline", "diffusion_model.", lambda t: t),
    "CogVideoX kohya": ("CogVideoXPipeline", "", kohya),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_other_spellings_give_the_same_weights(spelling: str, tmp_path: Path) -> None:
    name, prefix, spell = SPELLINGS[spelling]
    tensors = lora_for(pipeline_of(name))
    if name.startswith("Hunyuan"):
        tensors = blocks_alone(tensors)
    file = written(tensors, tmp_path / "diffusers.safetensors", "transformer.")
    other = written(spell(tensors), tmp_path / "other.safetensors", prefix)
    expected = by_upstream(name, file, 1.0)
    assert apart(fused(name, str(other)), expected) < TOLERANCES["fused weight"]


def test_what_does_not_fit_is_refused_by_its_keys(tmp_path: Path) -> None:
    pipeline = pipeline_of("WanPipeline")
    tensors = {f"transformer.{key}": t for key, t in lora_for(pipeline).items()}
    wrong = {f"transformer.nowhere.{n}.lora_A.weight": torch.ones(2, 4) for n in "abcd"}
    first = next(iter(tensors))
    for more, said in (
        (
            wrong,
            r"of \d+ keys, 4 fit no weight of WanPipeline: transformer\.nowhere\.a",
        ),
        (wrong, r"and 1 more"),
        ({first: torch.ones(2, 5)}, r"lora_A\.weight is 2x5, and 2x\d+ is needed"),
        ({first: tensors[first] * float("nan")}, "holds NaN"),
        ({first.replace("lora_A.weight", "dora_scale"): torch.ones(2)}, "dora_scale"),
    ):
        file = written({**tensors, **more}, tmp_path / "wrong.safetensors")
        with pytest.raises(TpuportError, match=said):
            fused("WanPipeline", str(file))
    file = written(tensors, tmp_path / "good.safetensors")
    with pytest.raises(UsageError, match="'transformer_2' is neither a scale nor"):
        fused("WanPipeline", f"{file}:transformer_2")


def test_keys_that_upstream_leaves_out_are_told(tmp_path: Path) -> None:
    """Changes of norms, which distilled LoRAs of Wan have."""
    tensors = renamed(lora_for(pipeline_of("WanPipeline")), *WAN)
    tensors["blocks.0.self_attn.norm_q.diff"] = torch.ones(4)
    file = written(tensors, tmp_path / "a.safetensors", "diffusion_model.")
    heard = Heard()
    found = fused("WanPipeline", str(file), heard)
    assert (
        apart(found, by_upstream("WanPipeline", file, 1.0)) < TOLERANCES["fused weight"]
    )
    (line,) = heard.lines
    assert line.endswith("1 key: diffusion_model.blocks.0.self_attn.norm_q.diff")


def test_files_that_are_no_lora_are_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(b"\1\2")
    (tmp_path / "old.bin").write_bytes(b"\1\2")
    (tmp_path / "two").mkdir()
    for name in "ab":
        written({"a": torch.ones(1)}, tmp_path / "two" / f"{name}.safetensors")
    for name, said in (
        ("cut.safetensors", "truncated or not a safetensors"),
        ("old.bin", "pickle files can run code"),
        ("two", "holds 2 safetensors files; name one, such as .*two/a.safetensors"),
        ("none.safetensors", "does not exist"),
        ("two:half:much:0.5", "is no LoRA with a scale"),
    ):
        with pytest.raises(TpuportError, match=said):
            fused("WanPipeline", str(tmp_path / name))


def test_of_a_hub_id_one_file_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ["README.md", "a.safetensors"]
    written({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    asked: list[Any] = []

    def fetched(repo: str, patterns: list[str], *more: Any) -> Path:
        asked.append((repo, patterns))
        return tmp_path

    monkeypatch.setattr(loras, "fetch", fetched)
    monkeypatch.setattr(loras, "file_names", lambda repo, flag: there)
    for name in ("me/lora", "me/lora/a.safetensors:transformer_2:0.5"):
        found = Lora.find(LoraChoice.parse(name), Reporter())
        assert found.file == tmp_path / "a.safetensors"
        assert asked.pop() == ("me/lora", ["a.safetensors"])
    assert found.as_dict()["source"] == "me/lora/a.safetensors"
    there.append("b.safetensors")
    with pytest.raises(UsageError, match="holds 2 safetensors files"):
        Lora.find(LoraChoice.parse("me/lora"), Reporter())


def test_lora_of_port_is_in_the_pipelines_weights(tmp_path: Path) -> None:
    pipeline = pipeline_of("WanPipeline")
    file = written(lora_for(pipeline), tmp_path / "a.safetensors", "transformer.")
    tpuport.port(pipeline, lora=[file, f"{file}:-0.5"], progress=False)
    with pytest.raises(UsageError, match=r"is ported; call tpuport.unport"):
        tpuport.port(pipeline, lora=file)
    expected = by_upstream("WanPipeline", file, 0.5)
    assert (
        apart(weights(tpuport.unport(pipeline)), expected) < TOLERANCES["fused weight"]
    )
    with pytest.raises(UsageError, match="lora: is for a pipeline"):
        tpuport.port(pipeline.transformer, lora=str(file))
