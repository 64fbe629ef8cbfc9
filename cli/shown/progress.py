"""Progress for people, on stderr: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tpuport.cli.shown import signals
from tpuport.cli.shown.output import plural, say
from tpuport.cli.shown.tables import columns
from tpuport.core.reports import (
    CompileReport,
    Reporter,
    RunReport,
    StageReport,
    memory_sources,
    memory_table,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Seconds between two lines about the same stage where there is no terminal.
LINE_EVERY = 15.0


class Display(Reporter):
    """A reporter that is on display while its ``with`` block lasts.

    It hears of every step, so here a signal is found that a library swallowed.
    """

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the terminal as it was."""

    def stage_started(self, stage: str, total: int, unit: str) -> None:
        signals.check()

    def loading(self, component: str) -> None:
        signals.check()

    def compiling(self, stage: str, program: str) -> None:
        signals.check()

    def compiled(self, report: CompileReport) -> None:
        signals.check()

    def advanced(self, stage: str, done: int, total: int) -> None:
        signals.check()


class PlainDisplay(Display):
    """One line per event, without control codes: for logs and pipes."""

    def __init__(self) -> None:
        self._units: dict[str, str] = {}
        self._last_line = time.monotonic()

    def say(self, text: str) -> None:
        say(text)

    def began(self, what: str) -> None:
        say(f"{what} ...")

    def ended(self, what: str, seconds: float) -> None:
        say(_took(what, seconds))

    def stage_started(self, stage: str, total: int, unit: str) -> None:
        super().stage_started(stage, total, unit)
        self._units[stage] = unit
        self._last_line = time.monotonic()
        say(f"{stage}: started, {plural(total, unit)}")

    def loading(self, component: str) -> None:
        super().loading(component)
        say(f"loading {component}")

    def compiling(self, stage: str, program: str) -> None:
        super().compiling(stage, program)
        say(f"compiling {stage}/{program} ...")

    def compiled(self, report: CompileReport) -> None:
        super().compiled(report)
        say(_compiled(report))

    def advanced(self, stage: str, done: int, total: int) -> None:
        super().advanced(stage, done, total)
        now = time.monotonic()
        if done < total and now - self._last_line >= LINE_EVERY:
            self._last_line = now
            say(f"{stage}: {done} of {plural(total, self._units.get(stage, 'call'))}")

    def delivered(self, stage: str, frames: int, total: int) -> None:
        say(f"{stage}: {frames} of {plural(total, 'frame')}")

    def stage_finished(self, report: StageReport) -> None:
        say(_finished(report))


class BarDisplay(Display):
    """A bar per stage, and per other work while it lasts; on a terminal."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._work: dict[str, TaskID] = {}
        self._stage = ""
        # What the stage has delivered, in words.
        self._frames = ""

    def _bars(self) -> Progress:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                Task,
                TextColumn,
                TimeElapsedColumn,
            )
            from rich.text import Text

            class Count(MofNCompleteColumn):
                """Nothing of work that is not counted."""

                def render(self, task: Task) -> Text:
                    return Text() if task.total is None else super().render(task)

            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                Count(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[doing]}", markup=False),
                console=Console(stderr=True, highlight=False),
            )
            self._progress.start()
        return self._progress

    def _doing(self, text: str) -> None:
        if self._stage in self._tasks:
            self._bars().update(self._tasks[self._stage], doing=text)

    def say(self, text: str) -> None:
        self._bars().console.print(text, markup=False, soft_wrap=True)

    def began(self, what: str) -> None:
        self._work[what] = self._bars().add_task(what, total=None, doing="")

    def ended(self, what: str, seconds: float) -> None:
        if what in self._work:
            self._bars().remove_task(self._work.pop(what))
        self.say(_took(what, seconds))

    def stage_started(self, stage: str, total: int, unit: str) -> None:
        super().stage_started(stage, total, unit)
        self._stage, self._frames = stage, ""
        bars = self._bars()
        self._tasks[stage] = bars.add_task(stage, total=total, doing="")

    def loading(self, component: str) -> None:
        super().loading(component)
        self._doing(f"loading {component} ...")

    def compiling(self, stage: str, program: str) -> None:
        super().compiling(stage, program)
        self._doing(f"compiling {stage}/{program} ...")

    def compiled(self, report: CompileReport) -> None:
        super().compiled(report)
        self._doing("")

    def advanced(self, stage: str, done: int, total: int) -> None:
        super().advanced(stage, done, total)
        if stage in self._tasks:
            self._bars().update(
                self._tasks[stage], completed=done, total=total, doing=self._frames
            )

    def delivered(self, stage: str, frames: int, total: int) -> None:
        self._frames = f"{frames} of {plural(total, 'frame')}"
        self._doing(self._frames)

    def stage_finished(self, report: StageReport) -> None:
        parts = (self._frames, _compile_total(report), _per_call(report))
        text = ", ".join(filter(None, parts))
        self._doing(text)
        self._stage = ""

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._tasks.clear()
            self._work.clear()


def make_display() -> Display:
    """The display that fits where stderr goes."""
    return BarDisplay() if sys.stderr.isatty() else PlainDisplay()


def print_summary(report: RunReport) -> None:
    """The table at the end of a run."""
    for line in columns(report.summary(), indent="  "):
        say(line)
    stages = [(s.stage, s.unit, s.memory) for s in report.stages if s.memory]
    if stages:
        rows = columns(memory_table(stages), indent="  ")
        for line in ["", *rows, *(f"  {line}" for line in memory_sources(stages))]:
            say(line)


def _took(what: str, seconds: float) -> str:
    return f"{what} took {seconds:.1f} s"


def _compiled(report: CompileReport) -> str:
    what = f"{report.stage}/{report.program}"
    if report.loaded:
        return f"loaded {what} in {report.seconds:.1f} s, nothing compiled"
    cached = " (from the compile cache)" if report.cached else ""
    return f"compiled {what} in {report.seconds:.1f} s{cached}"


def _compile_total(report: StageReport) -> str:
    if not report.compiles:
        return ""
    if all(c.loaded for c in report.compiles):
        return f"warm, loaded in {report.compile_seconds:.1f} s"
    cached = ", cached" if all(c.cached for c in report.compiles) else ""
    return f"compile {report.compile_seconds:.1f} s{cached}"


def _per_call(report: StageReport) -> str:
    each: Any = report.seconds_per_call
    return "" if each is None else f"{each:.3f} s/{report.unit}"


def _finished(report: StageReport) -> str:
    text = f"{report.stage}: finished in {report.total_seconds:.1f} s"
    if report.backend != "tpuport":
        text += f" by {report.backend}"
    return ", ".join(filter(None, (text, _per_call(report))))
