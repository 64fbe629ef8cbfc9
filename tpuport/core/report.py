"""What happened, as values: the command line prints them, JSON carries them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileReport:
    """One program made ready to run.

    Attributes:
        stage, program: which.
        trace_seconds: tracing torch code and lowering it.
        compile_seconds: in the XLA compiler, or reading its cache.
        cached: whether the persistent cache had it.
    """

    stage: str
    program: str
    trace_seconds: float
    compile_seconds: float
    cached: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """One stage of one run, over all its batches.

    Attributes:
        stage: its name.
        backend: ``"tpuport"`` or ``"diffusers"``.
        unit: what one call is.
        load_seconds: reading weights and placing them.
        compiles: the programs compiled.
        compile_seconds: of all of them, tracing included.
        first_call_seconds: the first call of every program, after its compile.
        steady_calls: calls after those.
        steady_seconds: of those calls together, waited for at the end.
        total_seconds: wall time of the stage.
        sharding: the plan of each component, weights left out.
        attention: what attention ran as.
        patches: which patches were applied while tracing.
    """

    stage: str
    backend: str
    unit: str
    total_seconds: float
    load_seconds: float = 0.0
    compiles: tuple[CompileReport, ...] = ()
    compile_seconds: float = 0.0
    first_call_seconds: float = 0.0
    steady_calls: int = 0
    steady_seconds: float = 0.0
    sharding: tuple[dict[str, Any], ...] = ()
    attention: tuple[dict[str, Any], ...] = ()
    patches: tuple[dict[str, Any], ...] = ()

    @property
    def seconds_per_call(self) -> float | None:
        """In steady state; ``None`` when there was only a first call."""
        if not self.steady_calls:
            return None
        return self.steady_seconds / self.steady_calls

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "seconds_per_call": self.seconds_per_call}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """A whole run.

    Attributes:
        model, variant, weights: what ran.
        platform, mesh, devices: where.
        dtype: of the weights.
        stages: in order.
        total_seconds: wall time.
        peak_host_bytes: the process's high-water mark, since it started.
        peak_device_bytes: the highest over the devices, where the backend tells.
    """

    model: str
    variant: str
    weights: str
    platform: str
    mesh: str
    devices: int
    dtype: str
    stages: tuple[StageReport, ...]
    total_seconds: float
    peak_host_bytes: int
    peak_device_bytes: int | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        data = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name != "stages"
        }
        return {**data, "stages": [stage.as_dict() for stage in self.stages]}

    def summary(self) -> list[tuple[str, str]]:
        """(label, text) rows for the end of a run."""
        load = sum(s.load_seconds for s in self.stages)
        compile_seconds = sum(s.compile_seconds for s in self.stages)
        compiles = [c for s in self.stages for c in s.compiles]
        cached = sum(c.cached for c in compiles)
        rows = [
            ("load", f"{load:.2f} s"),
            (
                "compile",
                f"{compile_seconds:.2f} s ({len(compiles)} program"
                f"{'' if len(compiles) == 1 else 's'}, {cached} from the cache)",
            ),
        ]
        for stage in self.stages:
            text = f"{stage.total_seconds:.2f} s"
            if stage.backend != "tpuport":
                text += f" by {stage.backend}"
            else:
                text += f", first call {stage.first_call_seconds:.2f} s"
                per_call = stage.seconds_per_call
                if per_call is not None:
                    text += f", then {per_call:.3f} s/{stage.unit}"
            rows.append((stage.stage, text))
        rows.append(("total", f"{self.total_seconds:.2f} s"))
        memory = f"{self.peak_host_bytes / 2**30:.2f} GiB host"
        if self.peak_device_bytes is not None:
            memory += f", {self.peak_device_bytes / 2**30:.2f} GiB per device"
        rows.append(("peak memory", memory))
        return rows


def peak_host_bytes() -> int:
    """The high-water mark of this process's resident memory."""
    import resource

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

    def stage_started(self, stage: str, total: int, unit: str) -> None:
        """A stage begins; it will make ``total`` calls."""

    def loading(self, component: str) -> None:
        """A component's weights are about to be read."""

    def compiling(self, stage: str, program: str) -> None:
        """A program is about to be traced and compiled."""

    def compiled(self, report: CompileReport) -> None:
        """It was."""

    def advanced(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` calls were dispatched."""

    def stage_finished(self, report: StageReport) -> None:
        """A stage ended."""
