"""Weights are read when a component is called, and are the ones that a load reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.pipelines.example import all_examples, made, saved
from tpuport.core.drive.late_weights import LateWeights
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.reports import Reporter
from tpuport.errors import WeightsError


@pytest.mark.parametrize("name", ["LTXPipeline", "WanModularPipeline"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_late_weights_are_those_of_a_load(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    pipeline = made(all_examples()[name])[0]
    with torch.no_grad():
        for tensor in pipeline.vae.buffers():
            tensor.fill_(0.25)  # trained buffers, which pipelines read
    folder = PipelineFolder.find(saved(pipeline, tmp_path / "p"), Reporter())
    loaded = folder.load(dtype, Reporter())
    late = LateWeights(folder, dtype, Reporter())
    for tensor_name, tensor in late.pipeline.vae.named_buffers():
        assert torch.equal(tensor, loaded.vae.get_buffer(tensor_name))
    weight = next(late.pipeline.transformer.parameters())
    assert bool(weight.isnan().all())
    random = torch.get_rng_state()
    for component in ("text_encoder", "transformer", "vae"):
        late.load(f"{component}.some.module")
        late.load(component)
        expected = getattr(loaded, component).state_dict()
        found = getattr(late.pipeline, component).state_dict()
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key
    # Upstream draws numbers when a class is built, and a run must not see that.
    assert torch.equal(torch.get_rng_state(), random)


def test_weights_that_nobody_calls_need_not_be_there(tmp_path: Path) -> None:
    pipeline = made(all_examples()["LTXPipeline"])[0]
    folder = PipelineFolder.find(saved(pipeline, tmp_path / "p"), Reporter())
    for name in ("text_encoder", "vae"):
        for file in (tmp_path / "p" / name).glob("*.safetensors"):
            file.unlink()
    late = LateWeights(folder, torch.float32, Reporter())
    late.load("transformer")
    # A pipeline that reads them outside of calls must not go on with other numbers.
    assert all(bool(b.isnan().all()) for b in late.pipeline.vae.buffers())
    with pytest.raises(WeightsError, match="text_encoder/ has no safetensors weights"):
        late.load("text_encoder")
    shutil.rmtree(tmp_path / "p" / "vae")
    with pytest.raises(WeightsError, match="vae"):
        late.load("vae.decode")
