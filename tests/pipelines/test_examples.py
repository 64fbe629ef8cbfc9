"""Every pipeline that runs makes upstream's video: same weights, prompt and seed.

What is planned of a folder is what runs.

An example compiles all modules of a pipeline, so some take more than 10 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import UMT5EncoderModel

import tpuport
from tests.pipelines.example import (
    Example,
    all_examples,
    difference,
    made,
    run,
    saved,
)
from tests.tolerances import TOLERANCES
from tpuport import targets
from tpuport.core.drive.driving import driving
from tpuport.core.drive.rehearsal import without_weights
from tpuport.core.enums import Backend, StageName
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.pipelines.call_arguments import as_arrays
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.plan.pipeline_plan import rehearsed
from tpuport.core.programs.program_key import ARITHMETIC
from tpuport.core.reports import Reporter
from tpuport.core.seam import program_runs
from tpuport.core.seam.devices import Devices, TracedProgram
from tpuport.core.seam.entry import PortError
from tpuport.core.seam.ported import modules_of
from tpuport.core.seam.seam import Seam
from tpuport.core.seam.target import Target
from tpuport.core.spec.run_settings import RunSettings

Called = tuple[str, tuple[str, ...], dict[StageName, int]]
"""A program: its name, its inputs, and how often each stage calls it."""

NO_FOLDERS = {
    "MiniMaxH3ModularPipeline": "a processor of the tests' own",
    **dict.fromkeys(
        [
            "CosmosTextToWorldPipeline",
            "CosmosVideoToWorldPipeline",
            "Cosmos2TextToImagePipeline",
            "Cosmos2VideoToWorldPipeline",
            "Cosmos2_5_PredictBasePipeline",
            "Cosmos2_5_TransferPipeline",
        ],
        "upstream loads no such folder without the package cosmos_guardrail",
    ),
}
"""Examples that upstream cannot run from the folder that they are saved to."""

RUNNING = [
    pytest.param(one, id=name, marks=() if one.gate else pytest.mark.slow)
    for name, one in all_examples().items()
    if not one.refused
]
GATE = ("WanPipeline", "LTX2Pipeline", "WanModularPipeline")
REHEARSED = [
    pytest.param(one, id=name, marks=() if name in GATE else pytest.mark.slow)
    for name, one in all_examples().items()
    if not one.refused and name not in NO_FOLDERS
]


@pytest.mark.parametrize("one", RUNNING)
def test_a_pipeline_makes_upstreams_video(one: Example) -> None:
    pipeline, call = made(one)
    expected = run(pipeline, call)
    with tpuport.ported(pipeline, mesh="dp=2,sp=2"):
        found = run(pipeline, call)
    assert difference(found, expected) < TOLERANCES["video float32"]
    # The call must matter: another prompt or noise would be another video.
    assert all(array.std() > 0 for array in expected)


@pytest.mark.parametrize("one", REHEARSED)
def test_what_is_planned_is_what_runs(
    one: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between the calls of modules, for which the tensors here are small."""
    monkeypatch.setattr(program_runs, "FEWEST", 1)
    pipeline, call = made(one)
    folder = PipelineFolder.find(saved(pipeline, tmp_path), Reporter())
    placed, settings = targets.place_for_port(MeshSpec(dp=2, sp=2)), RunSettings()
    target = targets.claimed_target(folder.class_name, placed, settings, Reporter())
    planned = planned_calls(folder, target, call)
    if "scheduler" in folder.components():
        assert ARITHMETIC in {name for name, _, _ in planned}
    assert planned == calls_of(folder.load(torch.float32, Reporter()), target, call)


@pytest.mark.parametrize("one", REHEARSED)
def test_a_plan_has_the_dtypes_of_a_run_in_bfloat16(
    one: Example, tmp_path: Path
) -> None:
    folder = PipelineFolder.find(saved(made(one)[0], tmp_path), Reporter())
    loaded = dtypes_of(folder.load(torch.bfloat16, Reporter()))
    assert torch.bfloat16 in loaded.values()
    assert dtypes_of(without_weights(folder, torch.bfloat16)) == loaded


def dtypes_of(pipeline: Any) -> dict[str, torch.dtype]:
    """Of all parameters and buffers."""
    return {
        f"{name}.{path}": tensor.dtype
        for name, module in modules_of(pipeline).items()
        for path, tensor in chain(module.named_parameters(), module.named_buffers())
    }


def test_a_component_on_the_host_is_in_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code need not trace, and its weights are on no device."""
    original = UMT5EncoderModel.forward

    def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        assert bool(torch.isfinite(found.last_hidden_state).all())
        return found

    pipeline, call = made(all_examples()["WanPipeline"])
    folder = PipelineFolder.find(saved(pipeline, tmp_path), Reporter())
    monkeypatch.setattr(UMT5EncoderModel, "forward", reading)
    target = targets.general_target(targets.place_for_port(None), RunSettings())
    given = (target, "float32", as_arrays(folder) | call, Reporter())
    with pytest.raises(PortError, match="text_encoder"):
        rehearsed(folder, *given)
    found = rehearsed(folder, *given, on_host=["text_encoder"])
    components = {program.component for program in found.programs}
    assert components == {"transformer", "vae"}
    assert {plan.component.partition(".")[0] for plan in found.plans} == components
    entry = next(p for p in found.programs if p.name == "transformer")
    vae = sum(p.total_bytes for p in found.plans if p.component != "transformer")
    assert entry in found.in_stages(["denoise", "decode"])
    assert 0 < entry.resident <= vae
    assert found.in_stages(["denoise"]) == [entry]
    assert not entry.resident  # a stage may be a run of its own


def planned_calls(
    folder: PipelineFolder, target: Target, call: Mapping[str, Any]
) -> list[Called]:
    """The programs that a plan of the folder's pipeline lists."""
    arguments = as_arrays(folder) | call
    found = rehearsed(folder, target, "float32", arguments, Reporter())
    return in_order((p.name, p.inputs, dict(p.by_stage)) for p in found.programs)


def calls_of(pipeline: Any, target: Target, call: dict[str, Any]) -> list[Called]:
    """The programs of a run."""
    found: list[Called] = []

    class Noting(Devices):
        """Devices whose programs note that they are called."""

        def compiled(self, program: TracedProgram, seconds: float) -> Any:
            compiled, report = super().compiled(program, seconds)
            inputs = tuple(
                f"{one.dtype}[{','.join(map(str, one.shape))}]"
                for one in program.traced.jaxpr.in_avals[len(program.weights) :]
            )
            by_stage: dict[StageName, int] = {}
            found.append((program.name, inputs, by_stage))

            def run(*given: Any) -> Any:
                stage = drive.stage or StageName.ENCODE
                by_stage[stage] = by_stage.get(stage, 0) + 1
                return compiled(*given)

            return run, report

    seam = Seam(modules_of(pipeline), target, Reporter(), devices=Noting)
    try:
        with driving(pipeline, seam.journal, Backend.TPUPORT) as drive:
            run(pipeline, call)
    finally:
        seam.close()
    return in_order(found)


def in_order(programs: Iterable[Called]) -> list[Called]:
    """The programs in an order that tells nothing."""
    return sorted(programs, key=str)
