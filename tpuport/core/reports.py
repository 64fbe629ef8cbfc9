"""What happened, as values: the command line prints them, JSON carries them."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, TypedDict

LIVE, PLANNED, UNKNOWN = "live", "planned", "unknown"

_SOURCES = {
    LIVE: "live: the device's own count after the call; peak since the process began",
    PLANNED: "planned: the compiler's, for the program alone; this backend keeps no "
    "count",
    UNKNOWN: "unknown: this backend keeps no count, and what runs op by op has no plan",
}
"""A line for each source that a table has."""


class DeviceMemory(TypedDict):
    """One device after one call: ``"tpu:3"``, bytes held, and the most ever held."""

    device: str
    in_use: int
    peak: int


class CallMemory(TypedDict):
    """One call of a stage.

    ``call`` is its number in the stage, from 0, over all batches. ``source`` is
    ``"live"``, ``"planned"``, or ``"unknown"`` where the backend tells nothing and the
    call was not compiled; there are no ``devices`` then. ``parts`` are planned bytes
    per device by what they are for, empty for live ones.
    """

    stage: str
    program: str
    call: int
    source: str
    devices: tuple[DeviceMemory, ...]
    parts: Mapping[str, int]


StageCalls = tuple[str, str, Sequence[CallMemory]]
"""A stage: its name, what one call is, and its calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileReport:
    """One program made ready to run.

    Attributes:
        stage, program: which.
        trace_seconds: tracing torch code and lowering it.
        compile_seconds: in the XLA compiler, or reading its cache.
        cached: whether no compiler ran: the executable was loaded, or jax's own cache
            had what was traced.
        loaded: whether the executable was loaded; then nothing was traced either.
        load_seconds: finding, checking and loading it.
        executable: the file it was loaded from or is kept in, where there is one.
        executable_bytes: of the executable in it.
        remark: why the store for compiled programs did not take or give it.
    """

    stage: str
    program: str
    trace_seconds: float
    compile_seconds: float
    cached: bool
    loaded: bool = False
    load_seconds: float = 0.0
    executable: str = ""
    executable_bytes: int = 0
    remark: str = ""

    @property
    def seconds(self) -> float:
        """All of it: tracing and compiling, or loading."""
        return self.trace_seconds + self.compile_seconds + self.load_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """One stage of one run, over all its batches.

    Attributes:
        stage: its name.
        backend: ``"tpuport"`` or ``"diffusers"``.
        unit: what one call is.
        compiles: the programs made ready, compiled or loaded.
        compile_seconds: of all of them, tracing and loading included.
        steady_calls: calls after those.
        steady_seconds: of those calls together, waited for at the end.
        total_seconds: wall time of the stage.
        op_by_op: whether nothing was compiled: each op ran by itself.
        memory: of each call, where it was asked for.
        profile: ``folder`` and ``calls`` of the trace, where one was asked for and some
            call was steady.
    """

    stage: str
    backend: str
    unit: str
    total_seconds: float
    compiles: tuple[CompileReport, ...] = ()
    compile_seconds: float = 0.0
    steady_calls: int = 0
    steady_seconds: float = 0.0
    op_by_op: bool = False
    memory: tuple[CallMemory, ...] = ()
    profile: dict[str, Any] | None = None

    @property
    def seconds_per_call(self) -> float | None:
        """In steady state; ``None`` when there was only a first call."""
        if not self.steady_calls:
            return None
        return self.steady_seconds / self.steady_calls

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds_per_call": self.seconds_per_call}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """A whole run.

    Attributes:
        model, weights: what ran.
        platform, mesh, devices: where.
        dtype: of the weights.
        blocks: those in place, ``"native"`` or ``"upstream"``.
        stages: in order.
        total_seconds: wall time.
        peak_host_bytes: the process's high-water mark, since it started.
        peak_device_bytes: the highest over the devices, where the backend tells.
    """

    model: str
    weights: str
    platform: str
    mesh: str
    devices: int
    dtype: str
    blocks: str
    stages: tuple[StageReport, ...]
    total_seconds: float
    peak_host_bytes: int
    peak_device_bytes: int | None

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "warm": self.warm,
            "programs": self.programs,
            "stages": [stage.as_dict() for stage in self.stages],
        }

    @property
    def programs(self) -> dict[str, int]:
        """How many programs were loaded, came from jax's cache, and were compiled."""
        made = [c for s in self.stages for c in s.compiles]
        loaded = sum(c.loaded for c in made)
        cached = sum(c.cached and not c.loaded for c in made)
        return {
            "loaded": loaded,
            "cached": cached,
            "compiled": len(made) - loaded - cached,
        }

    @property
    def warm(self) -> bool:
        """Whether every program was loaded: nothing was traced or compiled."""
        counts = self.programs
        return counts["loaded"] > 0 and not counts["cached"] + counts["compiled"]

    def summary(self) -> list[tuple[str, str]]:
        """(label, text) rows for the end of a run; what most people look for is last.

        The rest of a report is for ``--json`` and ``--report``.
        """
        rows = [("compiled", self._compiled())]
        stepping = [s for s in self.stages if s.seconds_per_call is not None]
        for stage in sorted(stepping, key=lambda s: s.unit != "step")[:1]:
            each = each_text(stage.seconds_per_call or 0.0)
            rows.append((f"a {stage.unit}", f"{each}, after the first"))
        rest = self.total_seconds - sum(s.total_seconds for s in self.stages)
        # Imports, configs and checks before the first stage, and what lies between.
        parts = [f"start-up {max(rest, 0):.1f}"]
        parts += [f"{s.stage} {s.total_seconds:.1f}" for s in self.stages]
        rows.append(("in all", f"{self.total_seconds:.1f} s: {', '.join(parts)}"))
        return rows

    def _compiled(self) -> str:
        counts = self.programs
        seconds = sum(s.compile_seconds for s in self.stages)
        if not sum(counts.values()):
            return "nothing"
        kept = counts["loaded"] + counts["cached"]
        how = "loaded" if kept == counts["loaded"] else "from the cache"
        if not counts["compiled"]:
            return f"nothing: {plural(kept, 'program')} {how}"
        text = f"{plural(counts['compiled'], 'program')} in {seconds:.1f} s"
        return text + (f", and {kept} {how}" if kept else "")


def peak_host_bytes() -> int:
    """The high-water mark of this process's resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes(devices: Sequence[Any]) -> int | None:
    """The highest use over ``devices``, where the backend keeps count (not on CPU)."""
    peaks = []
    for device in devices:
        stats = device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            peaks.append(int(stats["peak_bytes_in_use"]))
    return max(peaks, default=None)


class Reporter:
    """Told what happens while it happens. This one keeps silent."""

    def say(self, text: str) -> None:
        """A line for people."""

    def picture(self, drawn: str, rows: int) -> None:
        """A picture in the terminal, in place of the one before.

        Args:
            drawn: what the terminal draws it from; the cursor may go anywhere.
            rows: of the terminal that the picture takes.
        """

    def idle(self) -> None:
        """Nothing is under way any more, also after an error."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Tell when an error ends all that the block had begun."""
        try:
            yield
        except BaseException:
            self.idle()
            raise

    def began(self, what: str) -> None:
        """Work that may take minutes begins."""

    def ended(self, what: str, seconds: float) -> None:
        """Work ended, well or not."""

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Tell that the block begins and ends; blocks may lie in each other."""
        self.began(what)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.ended(what, time.perf_counter() - started)

    def downloading(
        self, name: str, files: tuple[int, int], size: tuple[int, int]
    ) -> None:
        """Files and bytes of ``name`` that have come from the hub, each with its total,
        within ``timed(f"downloading {name}")``; called often, by several threads."""

    def stage_started(self, stage: str, total: int, unit: str) -> None:
        """A stage begins; it will make ``total`` calls."""

    def loading(self, component: str) -> None:
        """A component's weights are about to be read."""

    def compiling(self, stage: str, program: str) -> None:
        """A program is about to be traced and compiled."""

    def compiled(self, report: CompileReport) -> None:
        """A program was traced and compiled."""

    def advanced(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` calls ended."""

    def stage_finished(self, report: StageReport) -> None:
        """A stage ended."""


def bytes_text(size: float) -> str:
    """Bytes for people, in the largest unit that leaves something of the number."""
    if size >= 2**27:
        return f"{size / 2**30:.2f} GiB"
    if size >= 2**17:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**10:.1f} KiB" if size >= 2**10 else f"{size:.0f} B"


def seconds_text(seconds: float) -> str:
    """A time for people."""
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.3f} ms"


def each_text(seconds: float, unit: str = "") -> str:
    """The time of one call, for people: ``2.5 s a step``, where a unit is given."""
    text = f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.3g} s"
    article = "an" if unit.startswith(tuple("aeiou")) else "a"
    return f"{text} {article} {unit}" if unit else text


def plural(count: int, unit: str) -> str:
    """``1 step``, ``2 batches``."""
    if count == 1:
        return f"1 {unit}"
    ending = "es" if unit.endswith(("ch", "sh", "s", "x")) else "s"
    return f"{count} {unit}{ending}"


def words(entry: Mapping[str, Any]) -> str:
    """One record for people: how many of what, by what, and why."""
    text = f"{plural(entry['count'], entry['call'])} by {entry['implementation']}"
    return text + (f": {entry['reason']}" if entry["reason"] else "")


def memory_table(stages: Iterable[StageCalls]) -> list[tuple[str, ...]]:
    """A head, and a row for the calls in a row that are alike: their fullest device."""
    rows: list[tuple[str, ...]] = [
        ("stage", "call", "program", "device", "in use", "peak", "")
    ]
    for stage, unit, calls in stages:
        for _, group in groupby(
            calls, key=lambda c: [v for n, v in c.items() if n != "call"]
        ):
            call, *others = group
            which = f"{unit} {call['call'] + 1}"
            which += f"-{others[-1]['call'] + 1}" if others else ""
            held = _fullest(call["devices"])
            rows.append((stage, which, call["program"], *held, call["source"]))
    return rows


def memory_sources(stages: Iterable[StageCalls]) -> list[str]:
    """What the sources of a table mean, a line for each."""
    found = dict.fromkeys(c["source"] for _, _, calls in stages for c in calls)
    return [_SOURCES[source] for source in found]


def _fullest(devices: Sequence[DeviceMemory]) -> tuple[str, str, str]:
    """Which device has the highest peak, and its bytes; all where they are alike."""
    if not devices:
        return "", "-", "-"
    found = max(devices, key=lambda device: (device["peak"], device["in_use"]))
    name, count = found["device"], len(devices)
    if count > 1 and len({(d["in_use"], d["peak"]) for d in devices}) == 1:
        name = f"{count} x {name.partition(':')[0]}"
    elif count > 1:
        name += f", fullest of {count}"
    return name, bytes_text(found["in_use"]), bytes_text(found["peak"])
