"""One replica: this process, which makes one pack of requests after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tpuport.cli.batches.packs import Pack, kept_in, run_dir
from tpuport.cli.shown.errors import may_pass
from tpuport.cli.shown.output import told
from tpuport.core.reports import CompileReport, Reporter
from tpuport.core.run.progress import Display
from tpuport.errors import in_one_line

if TYPE_CHECKING:
    from tpuport.cli.runs.many import Engine


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Requests that a replica has no more to do with.

    Attributes:
        replica: its number.
        pack: what one call was to make.
        error: in one line; empty where the videos are there.
        lost: the replica is gone, or must not be used again.
        remarks: lines for people.
    """

    replica: int
    pack: Pack
    error: str = ""
    lost: bool = False
    remarks: tuple[str, ...] = field(default=())


class Replicas(Protocol):
    """What makes the videos of requests, several at a time."""

    def idle(self) -> list[int]:
        """The numbers of replicas that wait for requests."""

    def begin(self, replica: int, pack: Pack) -> None:
        """Give a replica requests to make in one call."""

    def wait(self) -> list[Ended]:
        """The requests that ended, after a while maybe none."""


class Told(Reporter):
    """Lets a display tell each remark once, and loads and compiles as they go on."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """A line that stays, once."""
        if text not in self._said:
            self._said.add(text)
            self._display.say(text)

    def began(self, what: str) -> None:
        """Work begins."""
        self._display.began(what)

    def ended(self, what: str, seconds: float) -> None:
        """Work ended."""
        self._display.ended(what, seconds)

    def compiling(self, stage: str, program: str) -> None:
        """A program is traced and compiled."""
        self._display.began(f"compiling {program}")

    def compiled(self, report: CompileReport) -> None:
        """A program is compiled."""
        self._display.ended(f"compiling {report.program}", report.compile_seconds)

    def stage_started(self, stage: str, total: int, unit: str) -> None:
        """A stage begins: a signal is minded."""
        self._display.mind()

    def advanced(self, stage: str, done: int, total: int) -> None:
        """Calls ended: a signal is minded."""
        self._display.mind()


class ThisProcess:
    """:class:`Replicas` of one, without Ray."""

    def __init__(self, engine: Engine, tell: Told) -> None:
        self._engine, self._tell = engine, tell
        self._given: Pack | None = None

    def idle(self) -> list[int]:
        """The process, unless it has requests."""
        return [0] if self._given is None else []

    def begin(self, replica: int, pack: Pack) -> None:
        """Take requests, to be made by :meth:`wait`."""
        self._given = pack

    def wait(self) -> list[Ended]:
        """Make the videos of the requests."""
        pack, self._given = self._given, None
        assert pack is not None
        error, again = "", False
        try:
            with told(self._tell.say):
                given = [(one.settings, one.digest) for one in pack]
                self._engine.make_pack(given, run_dir(pack), kept_in=kept_in(pack))
        except Exception as raised:
            error = in_one_line(raised) or type(raised).__name__
            again = may_pass(raised)  # the engine has closed what was open
        return [Ended(replica=0, pack=pack, error=error, lost=again)]


@contextlib.contextmanager
def this_process(display: Display) -> Iterator[ThisProcess]:
    """The process as a replica; torch and jax are imported."""
    from tpuport.cli.runs.many import Engine

    tell = Told(display)
    with Engine(tell) as engine:
        yield ThisProcess(engine, tell)
