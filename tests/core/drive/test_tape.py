"""A run that was stopped goes on to the same bytes, with nothing known of the model.

Upstream's own code drives, without programs: what a tape gives back must be right.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import tpuport
from tests.pipelines.example import Example, all_examples, made
from tpuport.core.drive.driving import called, driving, tape_of
from tpuport.core.drive.step_caches import standing, step_caches
from tpuport.core.drive.tape import Recorded, Tape, TapeError
from tpuport.core.drive.tape_folder import TapeFolder
from tpuport.core.enums import Backend, StageName
from tpuport.core.reports import Reporter
from tpuport.core.seam.journal import Journal
from tpuport.core.seam.ported import seam_of
from tpuport.core.spec.step_cache import StepCache

GATE = (
    "WanPipeline",
    "WanPipeline-2.2",  # UniPC, which keeps results of steps before
    "CogVideoXPipeline",
    "LTX2Pipeline",  # two schedulers step
    "AnyFlowFARPipeline",  # a cache of frames in an argument
    "SkyReelsV2DiffusionForcingPipeline",  # a scheduler for each frame
    "VideoToVideoSDPipeline",  # latents that are no C array
    "MiniMaxH3ModularPipeline",
    "EchoModularPipeline",  # no scheduler
    "LTXLatentUpsamplePipeline",  # no denoiser either
)
EXAMPLES = [
    pytest.param(one, id=name, marks=() if name in GATE else pytest.mark.slow)
    for name, one in all_examples().items()
    if not one.refused
]
Arrays = list[np.ndarray]


class Killed(BaseException):
    """Stands for the end of a process."""


class Run:
    """One run of an example, from a tape on disk.

    With ``port`` by programs, which other runs find compiled in that folder; with
    ``cache`` of steps.

    Attributes:
        arrays: what was made; ``None`` if the run ended before.
        recorded: what another run can go on from.
        calls: of denoisers, and how many of them were cached.
        programs: of each module that was called.
    """

    def __init__(
        self,
        one: Example,
        before: Recorded = Recorded(),
        *,
        until: StageName | None = None,
        kill_after: int | None = None,
        port: Path | None = None,
        cache: StepCache | None = None,
        on_host: tuple[str, ...] = (),
        **more: Any,
    ) -> None:
        pipeline, call = made(one)
        torch.manual_seed(3)
        generator = torch.Generator("cpu").manual_seed(3)
        given = {"output_type": "np", **call, **more, "generator": generator}
        self.tape = tape_of(pipeline, given, before, until)
        self.arrays: Arrays | None = None
        self.steps, self.programs = 0, dict[str, int]()
        journal, caches = Journal(Reporter()), None
        ported = functools.partial(
            *(tpuport.ported, pipeline),
            progress=False,
            on_host=on_host,
            cache_dir=port and port / "compiled",
        )
        if kill_after is not None:
            self.tape.step = self._killing(kill_after)  # type: ignore[method-assign]
            self.tape.on_recorded = functools.partial(self._kill_between, kill_after)
        with contextlib.ExitStack() as stack:
            if cache is not None:
                target = None
                if port is not None:
                    with ported():
                        target = seam_of(pipeline).target
                caches = step_caches(pipeline, cache, target)
                stack.enter_context(standing(caches.modules.values()))
            if port is not None:
                stack.enter_context(ported())
                journal = seam_of(pipeline).journal
            stack.enter_context(contextlib.suppress(Killed))
            found, drive = called(
                *(pipeline, given, journal, Backend.DIFFUSERS, self.tape), caches=caches
            )
            self.steps = len(drive.steps)
            if found is not None:
                self.tape.record()
                values = [value for value in found.values() if value is not None]
                self.arrays = [np.asarray(value) for value in values]
            if port is not None:
                entries = seam_of(pipeline).entries
                self.programs = {n: len(e.programs) for n, e in entries.items()}
        self.calls = (0, 0) if caches is None else caches.calls
        self.recorded = self.tape.recorded

    def _kill_between(self, after: int) -> None:
        """The process ends between two calls, where no scheduler makes steps."""
        if not self.tape.by_steps and self.tape.recorded.stepped == after:
            raise Killed

    def _killing(self, after: int) -> Callable[..., Any]:
        """A step of the tape; the process ends after so many of the first scheduler."""
        count, step = 0, self.tape.step

        def killing(key: int, scheduler: Any, run: Callable[[], Any]) -> Any:
            nonlocal count
            found = step(key, scheduler, run)
            count += key == 0 or after == 1
            if count == after:
                raise Killed
            return found

        return killing


def on_disk(recorded: Recorded, folder: Path) -> Recorded:
    """What was recorded, written and read by another process."""
    TapeFolder(folder).write(recorded)
    return TapeFolder(folder).read()


def equal(found: Arrays | None, expected: Arrays | None) -> bool:
    assert found is not None
    assert expected is not None
    pairs = zip(found, expected, strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("one", EXAMPLES)
def test_a_run_goes_on_to_the_same_bytes(one: Example, tmp_path: Path) -> None:
    """Some examples take more than 10 s: they run six times."""
    whole = Run(one)
    if not whole.tape.by_steps:
        whole.steps = whole.recorded.stepped
    for after in sorted({1, whole.steps // 2, whole.steps} - {0}):
        recorded = Run(one, kill_after=after).recorded
        again = Run(one, on_disk(recorded, tmp_path / str(after)))
        assert equal(again.arrays, whole.arrays), f"after step {after}"


@pytest.mark.parametrize("one", EXAMPLES)
def test_stages_make_the_bytes_of_one_run(one: Example, tmp_path: Path) -> None:
    whole = Run(one)
    encoded = Run(one, until=StageName.ENCODE)
    assert encoded.arrays is None
    assert encoded.recorded.stepped == 0
    before = on_disk(encoded.recorded, tmp_path / "encode")
    denoised = Run(one, before, until=StageName.DENOISE)
    if not one.name.startswith("Cosmos"):  # some of these end with latents
        assert denoised.arrays is None
    assert (denoised.recorded.stepped > 0) == ("Decode" not in one.name)
    assert denoised.recorded.finished == StageName.DENOISE
    decoded = Run(one, on_disk(denoised.recorded, tmp_path / "denoise"))
    assert equal(decoded.arrays, whole.arrays)


def test_a_ported_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    one = all_examples()["LTX2Pipeline"]
    whole = Run(one, port=tmp_path)
    killed = Run(one, kill_after=2, port=tmp_path)
    # The sound had not stepped yet: a denoiser's answer waited for it.
    assert (killed.recorded.stepped, whole.recorded.stepped) == (2, 4)
    # Of the encoder, what upstream reads is kept, and no logits.
    answer = killed.recorded.calls[0].answer
    assert answer is not None
    assert {tensor.is_meta for tensor in answer.tensors} == {True, False}
    assert not answer.later
    again = Run(one, on_disk(killed.recorded, tmp_path), port=tmp_path)
    assert equal(again.arrays, whole.arrays)
    assert again.recorded.stepped == whole.recorded.stepped


@pytest.mark.parametrize("after", [2, 3, 5])
def test_the_history_of_a_scheduler_goes_along(after: int, tmp_path: Path) -> None:
    """UniPC takes a step from the results of two steps before."""
    one, more = all_examples()["WanPipeline-2.2"], {"num_inference_steps": 6}
    whole = Run(one, **more)
    recorded = Run(one, kill_after=after, **more).recorded
    assert recorded.stepped > 0
    assert equal(Run(one, on_disk(recorded, tmp_path), **more).arrays, whole.arrays)


def test_random_numbers_go_on_where_they_were() -> None:
    """Also where upstream draws by what a denoiser answered, which is zero then."""
    model = torch.nn.Linear(4, 4)
    torch.nn.init.ones_(model.weight)

    def drive(tape: Tape, steps: int) -> tuple[torch.Tensor, Recorded]:
        torch.manual_seed(1)
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(4)
        pipeline = SimpleNamespace(
            components={"scheduler": scheduler, "transformer": model}
        )
        x = torch.ones(1, 4)
        with driving(pipeline, Journal(Reporter()), Backend.TPUPORT, tape):
            for timestep in scheduler.timesteps[:steps]:
                answer = model(x)
                if answer.abs().sum() > 0:
                    torch.randn(3)
                noise = torch.randn(1, 4)
                (x,) = scheduler.step(answer, timestep, x + noise, return_dict=False)
        tape.record()
        return x, tape.recorded

    with torch.no_grad():
        expected, _ = drive(Tape(), 4)
        _, recorded = drive(Tape(), 2)
        found, _ = drive(Tape(recorded), 4)
    assert torch.equal(found, expected)


def test_calls_of_another_run_are_refused() -> None:
    recorded = Run(all_examples()["WanPipeline"], kill_after=2).recorded
    with pytest.raises(TapeError, match="upstream calls"):
        Run(all_examples()["CogVideoXImageToVideoPipeline"], recorded)


def test_a_state_that_cannot_be_made_again_is_refused() -> None:
    """A call that keeps state is made again, with the arguments that it had."""
    model = Keeping()

    def drive(tape: Tape, first: float) -> None:
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(2)
        parts = {"scheduler": scheduler, "transformer": model}
        x = torch.full((1, 4), first)
        pipeline = SimpleNamespace(components=parts)
        with driving(pipeline, Journal(Reporter()), Backend.TPUPORT, tape):
            for timestep in scheduler.timesteps:
                (x,) = scheduler.step(model(x), timestep, x, return_dict=False)
        tape.record()

    tape = Tape()
    drive(tape, 1.0)
    calls = tape.recorded.calls
    assert [call.answer for call in calls] == [None, None]
    drive(Tape(Recorded(calls[:1])), 1.0)
    with pytest.raises(TapeError, match="transformer keeps a state"):
        drive(Tape(Recorded(calls[:1])), 2.0)


class Keeping(torch.nn.Module):
    """Keeps the last tensor that it was given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.clone()
        return x


def test_what_every_step_asks_for_is_not_kept() -> None:
    """A controlnet's answers are large, and the next step takes their place."""
    one = all_examples()["AnimateDiffControlNetPipeline"]
    recorded = Run(one).recorded
    large = [
        call.answer is not None and not call.answer.tensors[0].is_meta
        for call in recorded.calls
        if call.name == "controlnet"
    ]
    assert large == [False] * len(large) != []
    # Nor does a run keep what it decodes.
    assert {c.answer for c in recorded.calls if c.name.startswith("vae")} == {None}


def test_a_scheduler_that_cannot_be_kept_is_told_and_runs() -> None:
    scheduler = diffusers.SASolverScheduler()
    scheduler.set_timesteps(3)
    told = []
    tape = Tape(on_recorded=lambda: told.append(tape.unkept))
    pipeline = SimpleNamespace(components={"scheduler": scheduler})
    x = torch.ones(1, 4)
    with driving(pipeline, Journal(Reporter()), Backend.TPUPORT, tape):
        for timestep in scheduler.timesteps:
            (x,) = scheduler.step(x, timestep, x, return_dict=False)
    assert bool(torch.isfinite(x).all())
    tape.record()
    (why,) = told
    assert "SASolverScheduler has a state of its own" in why
    assert tape.recorded == Recorded()
