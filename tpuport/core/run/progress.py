"""Progress for people, on stderr: lines that stay, and one line that is under way."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpuport.core.enums import Backend
from tpuport.core.reports import (
    CompileReport,
    Reporter,
    StageReport,
    bytes_text,
    each_text,
    plural,
)

if TYPE_CHECKING:
    from rich.live import Live
    from rich.segment import Segment

#: Seconds: the longest silence where there is no terminal.
BEAT = 5.0


@dataclass(eq=False)
class _Work:
    """Something under way.

    Attributes:
        what: its name for people.
        since: when the work began; all times are of ``time.monotonic``.
        unit: of a stage, what a call is, such as ``"step"``.
        done, total: calls of a stage.
        counted: files of a download, or what else is under way, in words.
        first, last: when calls number ``first_done`` and ``done`` had ended. The calls
            between are timed: the first one waits for its compile.
    """

    what: str
    since: float
    unit: str = ""
    done: int = 0
    total: int = 0
    counted: str = ""
    first: float = 0.0
    last: float = 0.0
    first_done: int = 0

    def advanced(self, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` calls ended."""
        self.last = time.monotonic()
        if not self.first or done < self.done:
            self.first, self.first_done = self.last, done
        self.done, self.total = done, total

    def how_far(self, *, waits: bool) -> str:
        """Of a stage: calls or frames done, seconds a call, and the time left.

        Args:
            waits: whether the calls wait for a compile or for weights. Nobody knows how
                long, so the time left is not said.
        """
        if not self.done:
            return self.counted
        text = ", ".join(filter(None, (f"{self.done}/{self.total}", self.counted)))
        timed = self.done - self.first_done
        if timed > 0:
            each = (self.last - self.first) / timed
            text += f", {each_text(each, self.unit)}"
            left = each * (self.total - self.done) - (time.monotonic() - self.last)
            # What takes longer than foretold has no time left to say either.
            if not waits and left >= 0.5:
                text += f", {_left(left)} left"
        return text


class Display(Reporter):
    """Shows what happens while it happens.

    On a terminal one line moves: what is under way, for how many seconds, and how far a
    stage is. Elsewhere a line grows by a dot every five seconds, and by words each time
    the seconds of the work have doubled. There, work that ends within five seconds of
    the last output has no line.

    Args:
        on_event: called at every step, compile and load, in the thread of the run. An
            error of the call ends the run.
    """

    def __init__(self, on_event: Callable[[], None] = lambda: None) -> None:
        self._on_event = on_event
        self._works: list[_Work] = []
        self._stage: _Work | None = None
        self._line: _Moving | _Growing = (
            _Moving(self._status) if _can_move() else _Growing(self._status)
        )

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        self.idle()

    def _status(self) -> tuple[str, str]:
        """The outermost work, and how far the work is; another thread asks."""
        works = list(self._works)
        if not works:
            return "", ""
        outer, inner = works[0], works[-1]
        told = (work.how_far(waits=work is not inner) for work in works)
        parts = [text for text in told if text]
        passed = f"{time.monotonic() - inner.since:.0f} s"
        if inner is not outer:
            parts.append(f"{inner.what} {passed}")
        return outer.what, ", ".join(parts) or passed

    def _begin(self, work: _Work) -> None:
        self._works.append(work)
        if len(self._works) == 1:
            self._line.start()

    def _end(self, work: _Work, said: str, line: str = "") -> None:
        """End a work and all that is part of the work.

        Args:
            said: ends the line of an outermost work that has a line.
            line: stays where an outermost work had no line.
        """
        if work in self._works:
            del self._works[self._works.index(work) :]
            if not self._works:
                self._line.stop(said, line)

    def mind(self) -> None:
        """End the run if a signal asked for that."""
        self._on_event()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._line.say(text)

    def picture(self, drawn: str, rows: int) -> None:
        """Above the line that moves; elsewhere nothing."""
        self._line.picture(drawn, rows)

    def began(self, what: str) -> None:
        """Work begins, maybe as part of other work."""
        self._begin(_Work(what, time.monotonic()))

    def ended(self, what: str, seconds: float) -> None:
        """Work ended, well or not: the last one of this name."""
        for work in reversed(self._works):
            if work.what == what:
                self._end(work, f"{seconds:.1f} s")
                return

    def idle(self) -> None:
        """Nothing is under way any more, also after an error."""
        if self._works:
            self._end(self._works[0], "")
        self._stage = None

    def downloading(
        self, name: str, files: tuple[int, int], size: tuple[int, int]
    ) -> None:
        """Files come from the hub."""
        for work in self._works:
            if work.what == f"downloading {name}":
                work.counted = (
                    f"{files[0]} of {plural(files[1], 'file')}, "
                    f"{bytes_text(size[0])} of {bytes_text(size[1])}"
                )

    def stage_started(self, stage: str, total: int, unit: str) -> None:
        self._on_event()
        self._stage = _Work(stage, time.monotonic(), unit=unit, total=total)
        self._begin(self._stage)

    def _doing(self, what: str) -> None:
        """The stage does something before its next call, in place of what it did.

        Args:
            what: empty for nothing.
        """
        self._on_event()
        if self._stage in self._works:
            del self._works[self._works.index(self._stage) + 1 :]
            if what:
                self._begin(_Work(what, time.monotonic()))

    def loading(self, component: str) -> None:
        """Weights are read."""
        self._doing(f"loading {component}")

    def compiling(self, stage: str, program: str) -> None:
        self._doing(f"compiling {program}")

    def compiled(self, report: CompileReport) -> None:
        self._doing("")

    def compiles(self) -> bool:
        """Whether a compile is under way; another thread asks."""
        return any(work.what.startswith("compiling ") for work in [*self._works])

    def advanced(self, stage: str, done: int, total: int) -> None:
        """Calls ended."""
        self._doing("")
        if self._stage is not None:
            self._stage.advanced(done, total)

    def counted(self, text: str) -> None:
        """Say of the stage what else there is to count, in words."""
        if self._stage is not None:
            self._stage.counted = text

    def stage_finished(self, report: StageReport) -> None:
        """A stage ended: its line stays."""
        work, self._stage = self._stage, None
        if work is None:
            return
        said = f"{plural(work.total, work.unit)} in {report.total_seconds:.1f} s"
        if report.backend != Backend.TPUPORT:
            said += f" by {report.backend}"
        if any(not program.loaded for program in report.compiles):
            said += f", compiling {report.compile_seconds:.1f} s"
        if report.seconds_per_call is not None:
            said += f", {each_text(report.seconds_per_call, report.unit)}"
        self._end(work, said, f"{report.stage}: {said}")


def _can_move() -> bool:
    """Whether stderr is a terminal that can go back in a line."""
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    from rich.console import Console

    return not Console(stderr=True).is_dumb_terminal


def _put(text: str) -> None:
    """Write to stderr. A run goes on where nobody reads stderr any more."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, end="", file=sys.stderr, flush=True)


class _Moving:
    def __init__(self, status: Callable[[], tuple[str, str]]) -> None:
        self._status = status
        self._live: Live | None = None
        #: Of a picture with nothing between it and the line.
        self._rows = 0
        #: Pictures come from another thread than lines.
        self._drawing = threading.RLock()

    def _render(self) -> object:
        from rich.text import Text

        # Nothing once the work has ended: a notebook shows the last line for good.
        line = ": ".join(filter(None, self._status()))
        return Text(line, no_wrap=True, overflow="ellipsis")

    def start(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            get_renderable=self._render,  # type: ignore[arg-type]
            console=Console(stderr=True, highlight=False),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def picture(self, drawn: str, rows: int) -> None:
        from rich.segment import ControlType, Segment

        with self._drawing:
            if self._live is None:
                return
            room = "" if rows == self._rows else "\n" * rows
            self._rows = rows
            # Up to where the picture begins, and back to where the line is.
            text = f"{room}\x1b7\x1b[{rows}A\r{drawn}\x1b8"
            told = Segment(text, None, [(ControlType.CARRIAGE_RETURN,)])
            self._live.console.print(_Raw(told), end="", soft_wrap=True)

    def stop(self, said: str, line: str) -> None:
        with self._drawing:
            if self._live is not None:
                self._live.stop()
                self._live, self._rows = None, 0
        if line:
            self.say(line)

    def say(self, text: str) -> None:
        with self._drawing:
            self._rows = 0
            if self._live is None:
                _put(f"{text}\n")
            else:
                self._live.console.print(text, markup=False, soft_wrap=True)


class _Raw:
    """Bytes for the terminal, which rich hands on as they are."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def __rich_console__(self, *about: object) -> Iterator[Segment]:
        yield self._segment


class _Growing:
    """The line where there is no terminal, written piece by piece."""

    def __init__(self, status: Callable[[], tuple[str, str]]) -> None:
        self._status = status
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._first = True
        self._open = False
        self._began = self._last = 0.0
        self._words_after = BEAT

    def _write(self, text: str) -> None:
        _put(text)
        self._open = not text.endswith("\n")
        self._first = False
        self._last = time.monotonic()

    def start(self) -> None:
        with self._lock:
            # Not ``_last``: short works in a row must not add up to silence.
            self._began = time.monotonic()
            self._words_after = BEAT
            if self._first:  # a command shows at once that it runs
                self._write(f"{self._status()[0]} ...")
            self._stop = threading.Event()
            threading.Thread(target=self._grow, args=(self._stop,), daemon=True).start()

    def _grow(self, stop: threading.Event) -> None:
        while not stop.wait(max(self._last + BEAT - time.monotonic(), BEAT / 50)):
            with self._lock:
                if not stop.is_set() and time.monotonic() >= self._last + BEAT:
                    self._beat()

    def _beat(self) -> None:
        what, how_far = self._status()
        passed = time.monotonic() - self._began
        if self._open and passed < self._words_after:
            self._write(".")
            return
        while self._words_after <= passed:
            self._words_after *= 2
        self._write(f" {how_far}" if self._open else f"{what} ... {how_far}")

    def picture(self, drawn: str, rows: int) -> None:
        pass

    def stop(self, said: str, line: str) -> None:
        with self._lock:
            self._stop.set()
            if self._open:
                self._write(f" {said}\n")
            elif line:
                self._write(f"{line}\n")

    def say(self, text: str) -> None:
        with self._lock:
            self._write(f"\n{text}\n" if self._open else f"{text}\n")


def _left(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
