"""What a benchmark measures: the runs of a backend, side by side with another."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field
from typing import Any

from tpuport.cli.shown import signals
from tpuport.core.reports import StageReport
from tpuport.core.run.progress import Display

#: Load average per CPU before the start from which the times are called in question.
BUSY = 0.5

#: The first run of upstream comes second in the process and finds torch imported.
FIRST_NOTE = (
    "both keep their modules loaded after the first run; the first run of diffusers "
    "comes after that of tpuport and finds the libraries imported"
)


@dataclass
class Runs:
    """What one backend did: its first run, then the steady ones."""

    seconds: list[float] = field(default_factory=list)
    stages: list[dict[str, StageReport]] = field(default_factory=list)
    frames: Any = None

    def as_dict(self, steps: int) -> dict[str, Any]:
        first, steady = self.stages[0], self.stages[1:]
        names = list(first)
        medians = {
            name: statistics.median(run[name].total_seconds for run in steady)
            for name in names
        }
        return {
            "first": {
                "seconds": self.seconds[0],
                "compile_seconds": sum(s.compile_seconds for s in first.values()),
                "programs": sum(len(s.compiles) for s in first.values()),
                "loaded": sum(c.loaded for s in first.values() for c in s.compiles),
                "cached_programs": sum(
                    c.cached for s in first.values() for c in s.compiles
                ),
                "stages": {name: first[name].total_seconds for name in names},
            },
            "steady": {
                "seconds": statistics.median(self.seconds[1:]),
                "all_seconds": self.seconds[1:],
                "stages": medians,
                "seconds_per_step": medians["denoise"] / steps,
            },
        }


def compared(
    ours: Runs, theirs: Runs, backends: dict[str, Any], name: str
) -> dict[str, Any]:
    """How much longer upstream's code takes, and how far its frames are."""
    import numpy as np

    mine, others = (backends[key]["steady"] for key in ("tpuport", name))
    stages = mine["stages"]
    return {
        "ratio": {
            "total": others["seconds"] / mine["seconds"],
            **{name: others["stages"][name] / stages[name] for name in stages},
        },
        "max_frame_difference": float(np.abs(ours.frames - theirs.frames).max()),
    }


def priced(
    exact: Runs, cached: Runs, backends: dict[str, Any], name: str
) -> dict[str, Any]:
    """What a step cache saves, as ratios above 1, and what it costs."""
    from tpuport.core.files.quality import compare

    before, after = (backends[key]["steady"] for key in ("tpuport", name))
    return {
        "speedup": before["seconds"] / after["seconds"],
        "denoise_speedup": before["stages"]["denoise"] / after["stages"]["denoise"],
        **compare(cached.frames, exact.frames),
    }


@dataclass(frozen=True, slots=True)
class Machine:
    """How busy the machine was at the start.

    Attributes:
        load_average: of the last minute.
        cpus: how many there are.
    """

    load_average: float
    cpus: int

    @classmethod
    def now(cls) -> Machine:
        """This machine."""
        return cls(os.getloadavg()[0], os.cpu_count() or 1)

    def about(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"load_average": self.load_average, "cpus": self.cpus}

    def notes(self) -> list[str]:
        """What calls the times in question."""
        if self.load_average <= BUSY * self.cpus:
            return []
        return [
            f"the machine was busy at the start (load {self.load_average:.1f} on "
            f"{self.cpus} CPUs): do not trust these times"
        ]


class Once(Display):
    """Says nothing twice: every run would say it."""

    def __init__(self) -> None:
        super().__init__(signals.check)
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            super().say(text)
