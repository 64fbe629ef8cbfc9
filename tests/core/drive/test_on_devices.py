"""Between two calls of a denoiser nothing leaves the devices that need not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tpuport
from tests.core.drive.test_tape import Run, equal, on_disk
from tests.pipelines.example import all_examples, made, run
from tpuport.core.drive.driving import driving
from tpuport.core.enums import Backend, StageName
from tpuport.core.seam import program_runs
from tpuport.core.seam.arithmetic import Arithmetic
from tpuport.core.seam.device_tensors import DeviceTensor
from tpuport.core.seam.ported import seam_of

#: UniPC, flow matching by Euler, DDIM, and DPM with noise at each step.
NAMES = ("WanPipeline-2.2", "LTXPipeline", "CogVideoXPipeline")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors here are small."""
    monkeypatch.setattr(program_runs, "FEWEST", 1)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is compiled between calls."""
    found: list[str] = []
    make = Arithmetic._made

    def noted(self: Arithmetic, steps: Any, wanted: Any, *rest: Any) -> Any:
        told = [(one.args, one.kwargs, one.result, of) for one, of in steps]
        found.append(repr((told, wanted)))
        return make(self, steps, wanted, *rest)

    monkeypatch.setattr(Arithmetic, "_made", noted)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_step_reads_what_is_on_the_devices(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[tuple[Any, int]] = []
    copied = DeviceTensor.copied

    def noted(self: DeviceTensor) -> Any:
        reads.append((drive.stage, drive.made))
        return copied(self)

    monkeypatch.setattr(DeviceTensor, "copied", noted)
    pipeline, call = made(all_examples()[name])
    with (
        tpuport.ported(pipeline, mesh="sp=2"),
        driving(pipeline, seam_of(pipeline).journal, Backend.TPUPORT) as drive,
    ):
        run(pipeline, call | {"num_inference_steps": 4})
    assert drive.made == 4
    assert reads  # the frames
    assert not [one for one in reads if one[0] == StageName.DENOISE and one[1] < 4]


def test_a_run_that_is_kept_compiles_what_any_run_compiles(
    tmp_path: Path, programs: list[str]
) -> None:
    """Executables that were made ahead by a rehearsal are all that the run needs."""
    one = all_examples()["CogVideoXPipeline"]
    Run(one, port=tmp_path)
    kept = sorted(programs)
    programs.clear()
    pipeline, call = made(one)
    with tpuport.ported(pipeline):
        run(pipeline, call)
    assert sorted(programs) == kept


@pytest.mark.parametrize("name", NAMES)
def test_steps_on_the_devices_go_on_to_the_same_bytes(
    name: str, tmp_path: Path, programs: list[str]
) -> None:
    """A run that goes on runs the same programs, on numbers of a file.

    Each takes 15 s: three runs, which compile their modules.
    """
    one, more = all_examples()[name], {"num_inference_steps": 4}
    whole = Run(one, port=tmp_path, **more)
    known = set(programs)
    assert known
    killed = Run(one, kill_after=3, port=tmp_path, **more)
    assert killed.recorded.stepped > 0
    again = Run(one, on_disk(killed.recorded, tmp_path), port=tmp_path, **more)
    assert equal(again.arrays, whole.arrays)
    assert set(programs) == known
