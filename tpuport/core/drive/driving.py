"""A call of an upstream pipeline, told as stages: encode, denoise, decode.

Upstream's code knows no stages. Denoise begins with the first call of a denoiser and
ends with the last ``scheduler.step``. Without a scheduler denoise ends before the
first call that decodes. Without a denoiser too, a component that neither encodes nor
decodes is one, such as an upsampler.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from tpuport.core.drive.step_caches import StepCaches
from tpuport.core.drive.tape import Recorded, StageEnd, Tape
from tpuport.core.enums import Backend, StageName, denoises
from tpuport.core.reports import Reporter, StageReport
from tpuport.core.seam.journal import Asked, Journal
from tpuport.core.seam.standing import Standing, is_heard

UNITS = {StageName.ENCODE: "call", StageName.DENOISE: "step", StageName.DECODE: "call"}
#: What adds up over several reports of a stage.
_SUMMED = (
    *("total_seconds", "compiles", "compile_seconds"),
    *("steady_calls", "steady_seconds"),
)


@dataclass(eq=False)
class Drive:
    """What happens in one call of a pipeline.

    Attributes:
        parts: the components of the pipeline.
        tape: answers what was recorded, and records the rest.
        before_live: told the name of a call that is not given back.
        around: makes such a call, of a stage; to look at it.
        caches: let most steps reuse what others computed.
        on_step: called after each ``scheduler.step``.
        steps: when the result of each ``scheduler.step`` was there.
        reports: of the stages that ended.
        stage: under way.
        made: how many steps the host has made; the devices may be one behind.
    """

    parts: Mapping[str, Any]
    journal: Journal
    backend: Backend
    tape: Tape | None = None
    before_live: Callable[[str], None] = lambda name: None
    around: Callable[[StageName, str, Callable[[], Any]], Any] = (
        lambda stage, name, run: run()
    )
    caches: StepCaches | None = None
    on_step: Callable[[], None] = lambda: None
    steps: list[float] = field(default_factory=list)
    reports: list[StageReport] = field(default_factory=list)
    stage: StageName | None = None
    made: int = 0
    _since: float = 0.0
    _schedulers: dict[int, tuple[int, Any]] = field(default_factory=dict)
    _again: int = 0
    _told: bool = False
    _stepped: bool = False
    _under_way: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.scheduler = self.parts.get("scheduler")
        for one in (self.scheduler, *self.parts.values()):  # and others, for sound say
            if hasattr(one, "set_timesteps"):
                self.key_of(one)
        modules = [n for n, m in self.parts.items() if isinstance(m, torch.nn.Module)]
        self._named = any(map(denoises, modules))
        self._stepped = not (self._schedulers and self._named)
        if self.tape is not None:
            self.tape.denoises = self.denoises
            self.tape.by_steps = bool(self._schedulers)
            self.tape.caches = self.caches
            self.tape.place = self.journal.between.of_host

    def denoises(self, name: str) -> bool:
        """Whether a call of that name belongs to the stage denoise."""
        by_name = self._named or self._schedulers
        return denoises(name) if by_name else "code" not in name

    @property
    def _reporter(self) -> Reporter:
        return self.journal.reporter

    def begin(self, stage: StageName) -> None:
        """A stage begins; the one before ends."""
        if self.stage is not None:
            self.end()
        self.stage = stage
        if self.tape is None or self.tape.live:
            self._tell(stage)

    def _tell(self, stage: StageName) -> None:
        """Tell of a stage, unless all of it is given back."""
        if self._told:
            return
        self._told, self._since = True, time.perf_counter()
        total = self._planned() if stage == StageName.DENOISE else 1
        self._reporter.stage_started(stage, total or 1, UNITS[stage])

    def end(self) -> None:
        """The stage under way ends."""
        assert self.stage is not None
        self.arrived()
        if self._told:
            report = self._report(self.stage, time.perf_counter())
            self.reports.append(report)
            self._reporter.stage_finished(report)
        self.stage, self._told = None, False

    def called(self, name: str) -> None:
        """A module is about to be called."""
        if self.denoises(name):
            if self.stage == StageName.ENCODE:
                self.begin(StageName.DENOISE)
        elif self.stage != StageName.DECODE and self._decodes(name):
            self.begin(StageName.DECODE)

    def answered(self, asked: Asked) -> Any:
        """The result of a module's call."""
        if self.caches is not None:
            asked = self.caches.taken(asked, self._timesteps, self._planned())
        if self.tape is None:
            self.called(asked.name)
            assert self.stage is not None
            return self.around(self.stage, asked.name, asked.run)
        after = not self.denoises(asked.name) and self._decodes(asked.name)
        self.tape.check_end(asked, after=after)
        self.called(asked.name)

        def live(*args: Any, **kwargs: Any) -> Any:
            assert self.stage is not None
            self._tell(self.stage)
            self.before_live(asked.name)
            run = functools.partial(asked.answer, *args, **kwargs)
            return self.around(self.stage, asked.name, run)

        return self.tape.call(replace(asked, answer=live), after=after)

    def key_of(self, scheduler: Any) -> int:
        """The number of a scheduler; the pipeline's own is 0, copies come later."""
        number = len(self._schedulers)
        return self._schedulers.setdefault(id(scheduler), (number, scheduler))[0]

    def step(self, scheduler: Any, run: Callable[[], Any]) -> Any:
        """The result of a scheduler's step; of a copied one, nobody is told."""
        key, tape, between = self.key_of(scheduler), self.tape, self.journal.between
        live = tape is None or tape.live
        if key == 0 and self.caches is not None:
            self.caches.stepping(self._timesteps, self._planned())
        arrives: Callable[[], None] | None = None

        def made() -> Any:
            nonlocal arrives
            result = run()
            arrives = between.step()
            return result

        result = made() if tape is None else tape.step(key, scheduler, made)
        self._stepped = True
        if key == 0:
            self._again += not live
            self.stepped(arrives)
        return result

    def stepped(self, arrives: Callable[[], None] | None) -> None:
        """``scheduler.step`` ended; the host goes on once the one before is there.

        Args:
            arrives: waits for the result; ``None`` if the result is there.
        """
        if self.stage == StageName.ENCODE:
            self.begin(StageName.DENOISE)
        self.made += 1
        self.on_step()
        self.arrived()
        if arrives is None:
            self._tell_step()
        self._under_way = arrives

    def arrived(self) -> None:
        """Wait for the last step."""
        wait, self._under_way = self._under_way, None
        if wait is not None:
            wait()
            self._tell_step()

    def _tell_step(self) -> None:
        self.steps.append(time.perf_counter())
        if not self._told:
            return
        total = self._planned() or len(self.steps)
        self._reporter.advanced(StageName.DENOISE, len(self.steps), total)

    def _decodes(self, name: str) -> bool:
        """Whether a call that does not denoise comes after the steps."""
        if self.made and self.made >= self._planned():
            return True
        # Steps may be left out, or copies of the scheduler make all of them; without a
        # scheduler or a denoiser there are none.
        return self._stepped and "decode" in name

    def _planned(self) -> int:
        """How many steps there are; a run from a video leaves the first ones out."""
        left_out = getattr(self.scheduler, "begin_index", None) or 0
        return 0 if self._timesteps is None else len(self._timesteps) - left_out

    @property
    def _timesteps(self) -> Any:
        return getattr(self.scheduler, "timesteps", None)

    def _report(self, stage: StageName, now: float) -> StageReport:
        calls = [c for c in self.journal.calls if c.started >= self._since]
        made = tuple(c.compiled for c in calls if c.compiled is not None)
        ends = self.steps[self._again :] if stage == StageName.DENOISE else []
        compiled = [c.started + c.seconds for c in calls if c.compiled is not None]
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


@contextlib.contextmanager
def driving(
    pipeline: Any,
    journal: Journal,
    backend: Backend,
    tape: Tape | None = None,
    **how: Any,
) -> Iterator[Drive]:
    """Watch the calls of ``pipeline`` in this block.

    Args:
        journal: of its seam; of an upstream pipeline that is not ported, a new one.
        tape: answers what was recorded, and records the rest.
        how: other fields of the drive.
    """
    parts = pipeline.components
    drive = Drive(parts, journal, backend, tape, **how)
    on_host = {name: one for name, one in parts.items() if not is_heard(one, journal)}
    with contextlib.ExitStack() as stack:
        # The seam tells of the calls of other components.
        stack.callback(Standing(on_host, journal).close)
        journal.calls.clear()
        stack.callback(setattr, journal, "answer", journal.answer)
        stack.callback(setattr, journal, "on_step", journal.on_step)
        journal.answer, journal.on_step = drive.answered, drive.step
        with journal.reporter.watched():
            drive.begin(StageName.ENCODE)
            yield drive
            drive.end()
        caches = drive.caches
        if caches is not None and caches.calls[0] and not caches.calls[1]:
            journal.reporter.say(f"step cache {caches.cache}: no call was cached")


def merged(reports: Iterable[StageReport]) -> list[StageReport]:
    """One report for each stage, over all videos."""
    found: dict[str, StageReport] = {}
    for one in reports:
        if (before := found.get(one.stage)) is not None:
            sums = {n: getattr(before, n) + getattr(one, n) for n in _SUMMED}
            one = replace(before, **sums)
        found[one.stage] = one
    return list(found.values())


def tape_of(
    pipeline: Any,
    arguments: Mapping[str, Any],
    before: Recorded,
    until: StageName | None = None,
) -> Tape:
    """The tape of one call.

    Args:
        arguments: of the call; its generators are part of what is kept.
        before: what an earlier run recorded.
        until: the stage to end with.
    """
    given = arguments.get("generator")
    generators = given if isinstance(given, list | tuple) else [given]
    return Tape(
        before,
        until,
        generators=tuple(one for one in generators if one is not None),
        guidance={
            name: component
            for name, component in pipeline.components.items()
            if name.startswith("guider")
        },
    )


def called(
    pipeline: Any,
    arguments: Mapping[str, Any],
    journal: Journal,
    backend: Backend,
    tape: Tape | None = None,
    **how: Any,
) -> tuple[Any, Drive]:
    """What upstream returns, and what happened.

    Args:
        journal, tape, how: as of :func:`driving`; a step cache is in place.

    Returns:
        the output; ``None`` if the stage that the tape ends with is over.
    """
    with driving(pipeline, journal, backend, tape, **how) as drive:
        try:
            output = pipeline(**arguments)
            if tape is not None:
                tape.end()
        except StageEnd:
            output = None
    return output, drive
