"""Progress for people, on stderr: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tpuport.cli.shown.output import plural, say
from tpuport.cli.shown.tables import columns
from tpuport.core.reports import (
    CompileReport,
    Reporter,
    RunReport,
    StageReport,
    bytes_text,
    memory_sources,
    memory_table,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Seconds between two lines about the same stage where there is no terminal.
LINE_EVERY = 15.0
#: And of a download.
DOWNLOAD_EVERY = 10.0


class Display(Reporter):
    """A reporter that is on display while its ``with`` block lasts."""

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

    def downloading(
        self, name: str, files: tuple[int, int], size: tuple[int, int]
    ) -> None:
        now = time.monotonic()
        ended = size[1] and files[0] == files[1] > 0
        if ended or now - self._last_line >= DOWNLOAD_EVERY:
            self._last_line = now
            say(
                f"downloading {name}: {files[0]} of {plural(files[1], 'file')}, "
                f"{bytes_text(size[0])} of {bytes_text(size[1])}"
            )

    def stage_started(self, stage: str, total: int, unit: str) -> None:
        self._units[stage] = unit
        self._last_line = time.monotonic()
        say(f"{stage}: started, {plural(total, unit)}")

    def loading(self, component: str) -> None:
        say(f"loading {component}")

    def compiling(self, stage: str, program: str) -> None:
        say(f"compiling {stage}/{program} ...")

    def compiled(self, report: CompileReport) -> None:
        say(_compiled(report))

    def advanced(self, stage: str, done: int, total: int) -> None:
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

    def downloading(
        self, name: str, files: tuple[int, int], size: tuple[int, int]
    ) -> None:
        if size[1]:  # nothing has to come of what is in the cache
            what = f"downloading {name}"
            if what not in self._tasks:
                self._tasks[what] = self._bars().add_task(what, doing="")
            done, total = (round(part / 2**20) for part in size)
            doing = f"MiB, {files[0]} of {plural(files[1], 'file')}"
            task = self._tasks[what]
            self._bars().update(task, completed=done, total=total, doing=doing)

    def stage_started(self, stage: str, total: int, unit: str) -> None:
        self._stage, self._frames = stage, ""
        bars = self._bars()
        self._tasks[stage] = bars.add_task(stage, total=total, doing="")

    def loading(self, component: str) -> None:
        self._doing(f"loading {component} ...")

    def compiling(self, stage: str, program: str) -> None:
        self._doing(f"compiling {stage}/{program} ...")

    def compiled(self, report: CompileReport) -> None:
        self._doing("")

    def advanced(self, stage: str, done: int, total: int) -> None:
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
