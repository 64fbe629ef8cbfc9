"""LoRAs are found and fused as upstream fuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tpuport
from tests.core.heard import Heard
from tests.core.pipelines.lora_files import (
    apart,
    by_upstream,
    fused,
    lora_for,
    pipeline_of,
    weights,
    written,
)
from tests.core.pipelines.test_lora_keys import WAN, renamed
from tests.tolerances import TOLERANCES
from tpuport.core.pipelines import loras
from tpuport.core.pipelines.loras import Lora
from tpuport.core.reports import Reporter
from tpuport.core.spec.lora_choice import LoraChoice
from tpuport.errors import TpuportError, UsageError


@pytest.mark.parametrize(
    "name", ["WanPipeline", "CogVideoXPipeline", "HunyuanVideo15Pipeline"]
)
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
            expected[f"transformer.{path}.weight"] += 0.7 * product
    file = written(tensors, tmp_path / "a.safetensors", "transformer.")
    found = fused("AllegroPipeline", f"{file}:0.7")
    assert apart(found, expected) < TOLERANCES["fused weight"]


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
    monkeypatch.setattr(loras, "file_names", lambda *_: there)
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
