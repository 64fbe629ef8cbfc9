"""LoRAs are fused alike in whatever spelling their keys are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.heard import Heard
from tests.core.pipelines.lora_files import (
    LAYERS,
    Tensors,
    apart,
    by_upstream,
    fused,
    lora_for,
    pipeline_of,
    weights,
    written,
)
from tests.tolerances import TOLERANCES
from tpuport.errors import TpuportError

NEAR = TOLERANCES["fused weight"]


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


def together(tensors: Tensors, whole: str, *parts: str) -> Tensors:
    """Some layers of each block as one layer; their first factors are one already."""
    found = dict(tensors)
    for key in tensors:
        path, middle, rest = key.partition(f".{parts[0]}.lora_")
        names = [f"{path}.{part}.lora_{rest}" for part in parts]
        if middle and found.keys() >= set(names):
            own = [found.pop(name) for name in names]
            joined = own[0] if rest.startswith("A") else torch.cat(own)
            found[f"{path}.{whole}.lora_{rest}"] = joined
    return found


def hunyuan(tensors: Tensors) -> Tensors:
    """Layers as ComfyUI has them: queries, keys and values as one."""
    attention = ("attn.to_q", "attn.to_k", "attn.to_v")
    tensors = together(tensors, "linear1", *attention, "proj_mlp")
    return together(tensors, "img_attn.qkv", *attention)


WAN = (
    *(("attn1.", "self_attn."), ("attn2.", "cross_attn."), ("to_out.0", "o")),
    *(("to_q", "q"), ("to_k", "k"), ("to_v", "v")),
    *(("net.0.proj", "0"), ("net.2", "2")),
)
TENCENT = (
    ("single_transformer_blocks", "single_blocks"),
    *(("transformer_blocks", "double_blocks"), ("attn.to_", "img_attn_")),
    *(("ff.net.2", "img_mlp.fc2"), ("ff_context.net.2", "txt_mlp.fc2")),
    *(
        ("attn.add_q_proj", "txt_attn_q"),
        ("context_embedder.token_refiner.", "txt_in."),
    ),
)


def blocks_alone(tensors: Tensors) -> Tensors:
    blocks = ("transformer_blocks", "single_transformer_blocks")
    return {key: t for key, t in tensors.items() if key.startswith(blocks)}


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
        lambda t: comfy(hunyuan(t), *TENCENT),
    ),
    "1.5 diffusers": ("HunyuanVideo15Pipeline", "diffusion_model.", lambda t: t),
    "1.5 peft": (
        *("HunyuanVideo15Pipeline", "base_model.model."),
        lambda t: renamed(t, *TENCENT),
    ),
    "13B kohya": ("HunyuanVideoPipeline", "", lambda t: kohya(hunyuan(t), *TENCENT)),
    "13B ComfyUI": (
        *("HunyuanVideoPipeline", "diffusion_model."),
        lambda t: comfy(hunyuan(t), *TENCENT),
    ),
    "Wan peft": ("WanPipeline", "base_model.model.", lambda t: renamed(t, *WAN)),
    "Wan as it is trained": (
        *("WanPipeline", ""),
        lambda t: renamed(t, *WAN, (".weight", ".default.weight")),
    ),
    "CogVideoX peft": ("CogVideoXPipeline", "base_model.model.", lambda t: t),
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
    assert apart(fused(name, str(other)), expected) < NEAR


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("CogVideoXPipeline", "transformer"),
        ("HunyuanVideo15Pipeline", "transformer"),
        ("AnimateDiffPipeline", "text_encoder"),
    ],
)
def test_what_peft_saves_is_what_peft_merges(
    name: str, component: str, tmp_path: Path
) -> None:
    """With ranks and alphas of its own for some layers, which are in its settings."""
    from peft import LoraConfig, PeftModel, get_peft_model

    ends = LAYERS[name]
    config = LoraConfig(
        r=2,
        lora_alpha=6,
        use_rslora=True,
        lora_bias=True,
        target_modules=[*ends],
        rank_pattern={ends[0]: 4},
        alpha_pattern={ends[0]: 3, ends[1]: 5},
        init_lora_weights=False,
    )
    get_peft_model(getattr(pipeline_of(name), component), config).save_pretrained(
        tmp_path
    )
    pipeline = pipeline_of(name)
    plain = weights(pipeline)
    peft = PeftModel.from_pretrained(getattr(pipeline, component), tmp_path)
    setattr(pipeline, component, peft.merge_and_unload())
    expected = weights(pipeline)
    assert apart(expected, plain) > 0.01
    heard = Heard()
    assert apart(fused(name, f"{tmp_path}:{component}", heard), expected) < NEAR
    assert not heard.lines


def test_without_its_settings_alpha_is_the_rank(tmp_path: Path) -> None:
    """As upstream has it, which reads no settings of peft."""
    tensors = lora_for(pipeline_of("WanPipeline"))
    file = written(tensors, tmp_path / "adapter_model.safetensors", "base_model.model.")
    pipeline = pipeline_of("WanPipeline")
    pipeline.transformer.load_lora_adapter(str(file), prefix="base_model.model")
    pipeline.transformer.fuse_lora(0.5)
    pipeline.transformer.unload_lora()
    heard = Heard()
    assert apart(fused("WanPipeline", f"{file}:0.5", heard), weights(pipeline)) < NEAR
    (line,) = heard.lines
    assert "no adapter_config.json beside" in line


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', and no LORA"),
        ({"peft_type": "LORA", "init_lora_weights": "pissa"}, "changes the weights"),
        ({"peft_type": "LORA", "lora_alpha": "much"}, "is not what peft writes"),
        ([], "is not what peft writes"),
    ],
)
def test_settings_of_peft_that_are_not_held_are_refused(
    settings: Any, said: str, tmp_path: Path
) -> None:
    tensors = lora_for(pipeline_of("WanPipeline"))
    file = written(tensors, tmp_path / "adapter_model.safetensors", "base_model.model.")
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(TpuportError, match=said):
        fused("WanPipeline", str(file))


def parts_of(name: str, *components: str) -> Tensors:
    """A LoRA for several components."""
    pipeline = pipeline_of(name)
    return {
        f"{component}.{key}": tensor
        for component in components
        for key, tensor in lora_for(pipeline, component).items()
    }


def kohya_of_sd(tensors: Tensors) -> Tensors:
    """As kohya has Stable Diffusion's, with an alpha that differs in some layers."""
    found: Tensors = {}
    for key, tensor in tensors.items():
        path, _, factor = key.replace("text_encoder.", "te.text_model.").partition(
            ".lora_"
        )
        if "motion_modules" in path:  # upstream's converter does not know them
            continue
        name = "lora_" + path.replace(".", "_")
        found[f"{name}.lora_{'down' if factor[0] == 'A' else 'up'}.weight"] = tensor
        found[f"{name}.alpha"] = torch.tensor(3.0 if "attn1" in path else 1.0)
    return found


def test_text_encoders_are_fused_where_upstream_fuses_them(tmp_path: Path) -> None:
    name = "AnimateDiffSDXLPipeline"
    tensors = parts_of(name, "unet", "text_encoder", "text_encoder_2")
    file = written(tensors, tmp_path / "a.safetensors")
    expected = by_upstream(name, file, 0.7)
    changed = apart_by_component(weights(pipeline_of(name)), expected)
    assert {n for n, by in changed.items() if by > 0.05} == {
        *("unet", "text_encoder", "text_encoder_2")
    }
    assert apart(fused(name, f"{file}:0.7"), expected) < NEAR


def apart_by_component(one: Tensors, other: Tensors) -> dict[str, float]:
    found: dict[str, float] = {}
    for key in one:
        name, by = key.partition(".")[0], float((one[key] - other[key]).abs().max())
        found[name] = max(found.get(name, 0.0), by)
    return found


def test_kohyas_text_encoder_is_upstreams(tmp_path: Path) -> None:
    name = "AnimateDiffPipeline"
    tensors = kohya_of_sd(parts_of(name, "unet", "text_encoder"))
    file = written(tensors, tmp_path / "a.safetensors")
    expected = by_upstream(name, file, 0.7)
    assert apart_by_component(weights(pipeline_of(name)), expected)["text_encoder"] > 0
    assert apart(fused(name, f"{file}:0.7"), expected) < NEAR


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("CogVideoXPipeline", "text_encoder.encoder.block.0.layer.0.SelfAttention.q"),
        ("WanPipeline", "vae.decoder.conv_in"),
    ],
)
def test_components_that_upstream_does_not_load_are_refused(
    name: str, key: str, tmp_path: Path
) -> None:
    """Upstream passes over them without a word."""
    both = {f"{key}.lora_{n}.weight": torch.ones(2, 2) for n in "AB"}
    file = written(both, tmp_path / "a.safetensors")
    with pytest.raises(TpuportError, match=rf"{key}\.lora_A.* for its transformer$"):
        fused(name, str(file))
