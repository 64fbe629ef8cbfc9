"""A call of an upstream pipeline, told as stages: encode, denoise, decode.

Upstream's code knows no stages. Denoise begins with the first call of a denoiser and
ends with the last ``scheduler.step``; all pipelines have that method.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from tpuport.core.enums import DENOISERS, Backend, StageName
from tpuport.core.reports import Reporter, StageReport
from tpuport.core.seam.journal import Called, Journal
from tpuport.core.seam.seam import is_ported

UNITS = {StageName.ENCODE: "call", StageName.DENOISE: "step", StageName.DECODE: "call"}


@dataclass(eq=False)
class Drive:
    """What happens in one call of a pipeline.

    Attributes:
        steps: when each ``scheduler.step`` had ended.
        reports: of the stages that ended.
        stage: under way.
    """

    scheduler: Any
    journal: Journal
    backend: Backend
    steps: list[float] = field(default_factory=list)
    reports: list[StageReport] = field(default_factory=list)
    stage: StageName | None = None
    _since: float = 0.0

    @property
    def _reporter(self) -> Reporter:
        return self.journal.reporter

    def begin(self, stage: StageName) -> None:
        """A stage begins; the one before ends."""
        if self.stage is not None:
            self.end()
        self.stage, self._since = stage, time.perf_counter()
        total = self._planned() if stage == StageName.DENOISE else 1
        self._reporter.stage_started(stage, total or 1, UNITS[stage])

    def end(self) -> None:
        """The stage under way ends."""
        assert self.stage is not None
        report = self._report(self.stage, time.perf_counter())
        self.reports.append(report)
        self._reporter.stage_finished(report)
        self.stage = None

    def called(self, name: str) -> None:
        """A module is about to be called."""
        if name.startswith(DENOISERS):
            if self.stage == StageName.ENCODE:
                self.begin(StageName.DENOISE)
        elif self.stage == StageName.DENOISE and self._all_steps():
            self.begin(StageName.DECODE)

    def stepped(self) -> None:
        """``scheduler.step`` ended."""
        if self.stage == StageName.ENCODE:
            self.begin(StageName.DENOISE)
        self.steps.append(time.perf_counter())
        total = self._planned() or len(self.steps)
        self._reporter.advanced(StageName.DENOISE, len(self.steps), total)

    def _all_steps(self) -> bool:
        return len(self.steps) >= self._planned()

    def _planned(self) -> int:
        """How many steps there are; a run from a video leaves the first ones out."""
        left_out = getattr(self.scheduler, "begin_index", None) or 0
        return len(getattr(self.scheduler, "timesteps", ())) - left_out

    def _report(self, stage: StageName, now: float) -> StageReport:
        calls = [c for c in self.journal.calls if c.started >= self._since]
        made = tuple(c.compiled for c in calls if c.compiled is not None)
        ends = self.steps if stage == StageName.DENOISE else []
        compiled = [_end(call) for call in calls if call.compiled is not None]
        # The first step, and a step that compiled, are no steady ones.
        steady = [
            end - begin
            for begin, end in pairwise(ends)
            if not any(begin < one <= end for one in compiled)
        ]
        return StageReport(
            stage=stage,
            backend=self.backend,
            unit=UNITS[stage],
            total_seconds=now - self._since,
            compiles=made,
            compile_seconds=sum(c.seconds for c in made),
            steady_calls=len(steady),
            steady_seconds=sum(steady),
        )


def _end(call: Called) -> float:
    return call.started + call.seconds


@contextlib.contextmanager
def driving(pipeline: Any, journal: Journal, backend: Backend) -> Iterator[Drive]:
    """Watch the calls of ``pipeline`` in this block.

    Args:
        journal: of its seam; of an upstream pipeline that is not ported, a new one.
    """
    scheduler = pipeline.components.get("scheduler")
    drive = Drive(scheduler, journal, backend)
    with contextlib.ExitStack() as stack:
        if scheduler is not None:
            _hook(scheduler, drive, stack)
        stack.enter_context(_watched(pipeline, drive))
        journal.calls.clear()
        before, journal.on_call = journal.on_call, drive.called
        stack.callback(setattr, journal, "on_call", before)
        with journal.reporter.watched():
            drive.begin(StageName.ENCODE)
            yield drive
            drive.end()


@contextlib.contextmanager
def _watched(pipeline: Any, drive: Drive) -> Iterator[None]:
    """Tell ``drive`` of the calls of modules on the host; the seam tells of others."""
    names = {
        module: name
        for name, component in pipeline.components.items()
        if isinstance(component, torch.nn.Module) and not is_ported(component)
        for module in component.modules()
    }
    if not names:
        yield
        return

    def before(module: torch.nn.Module, inputs: Any) -> None:
        if module in names:
            drive.called(names[module])

    handle = torch.nn.modules.module.register_module_forward_pre_hook(before)
    try:
        yield
    finally:
        handle.remove()


class _Step:
    """In place of a scheduler's ``step``, with upstream's signature.

    A pipeline may copy its scheduler, for sound say: the copy has its own ``step``.
    """

    def __init__(self, scheduler: Any, drive: Drive) -> None:
        self._scheduler, self._drive = scheduler, drive
        functools.update_wrapper(self, scheduler.step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = type(self._scheduler).step(self._scheduler, *args, **kwargs)
        self._drive.stepped()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._scheduler)]
        return functools.partial(type(copied).step, copied)


def _hook(scheduler: Any, drive: Drive, stack: contextlib.ExitStack) -> None:
    vars(scheduler)["step"] = _Step(scheduler, drive)
    stack.callback(vars(scheduler).pop, "step", None)


def merged(reports: Iterable[StageReport]) -> list[StageReport]:
    """One report for each stage, over all videos."""
    found: dict[str, StageReport] = {}
    for one in reports:
        before = found.get(one.stage)
        found[one.stage] = one if before is None else _sum(before, one)
    return list(found.values())


def _sum(one: StageReport, other: StageReport) -> StageReport:
    names = ("total_seconds", "compiles", "compile_seconds")
    counts = ("steady_calls", "steady_seconds")
    sums = {n: getattr(one, n) + getattr(other, n) for n in (*names, *counts)}
    return replace(one, **sums)
