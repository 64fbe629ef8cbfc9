"""A pipeline measured, and beside upstream's own code."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from tpuport.cli.asked.settings import PROMPT, Settings
from tpuport.cli.runs.video_run import VideoRun, find
from tpuport.core.drive.step_caches import StepCaches
from tpuport.core.enums import Backend, StageName
from tpuport.core.files.fingerprint import versions
from tpuport.core.files.quality import compare
from tpuport.core.reports import Reporter, StageReport
from tpuport.core.spec.step_cache import StepCache

#: Load average per CPU before the start from which the times are called in question.
BUSY = 0.5

#: The first run of upstream comes second in the process and finds torch imported.
FIRST_NOTE = (
    "both keep their modules loaded after the first run; the first run of diffusers "
    "comes after that of tpuport and finds the libraries imported"
)

#: What the result has of the report of a run.
_OF_RUN = (
    *("model", "weights", "dtype", "blocks", "mesh", "platform", "devices"),
    *("peak_host_bytes", "peak_device_bytes"),
)


@dataclass
class Runs:
    """What one backend or step cache did: its first run, then the steady ones."""

    run: VideoRun
    caches: StepCaches | None = None
    seconds: list[float] = field(default_factory=list)
    stages: list[dict[str, StageReport]] = field(default_factory=list)
    frames: Any = None

    def take(self) -> None:
        """Run once more."""
        self.run.caches, began = self.caches, time.perf_counter()
        made, reports = self.run.made(0)
        assert made is not None
        self.seconds.append(time.perf_counter() - began)
        self.stages.append({str(report.stage): report for report in reports})
        self.frames = made.frames

    def as_dict(self, steps: int) -> dict[str, Any]:
        first, *steady = self.stages
        made = [program for stage in first.values() for program in stage.compiles]
        medians = {n: median(run[n].total_seconds for run in steady) for n in first}
        denoise = medians.get(StageName.DENOISE)
        return {
            "first": {
                "seconds": self.seconds[0],
                "compile_seconds": sum(s.compile_seconds for s in first.values()),
                "programs": len(made),
                "loaded": sum(program.loaded for program in made),
                "cached_programs": sum(program.cached for program in made),
                "stages": {name: one.total_seconds for name, one in first.items()},
            },
            "steady": {
                "seconds": median(self.seconds[1:]),
                "all_seconds": self.seconds[1:],
                "stages": medians,
                "seconds_per_step": denoise / steps if denoise is not None else None,
            },
        }


def measure(
    settings: Settings,
    *,
    repeat: int,
    against: str | None,
    caches: Sequence[StepCache] = (),
    opened: float,
    load: float,
    reporter: Reporter,
) -> dict[str, Any]:
    """Run the benchmark; the result is JSON-ready.

    Each backend has a pipeline of its own, with its own weights.

    Args:
        repeat: steady runs of each.
        caches: step caches, each run in turns with the exact run.
        against: ``"diffusers"``, to measure upstream's code too.
        opened: when the command began to import what it needs.
        load: average of the machine then.
    """
    cpus = os.cpu_count() or 1
    backends = [Backend.TPUPORT, *([Backend.DIFFUSERS] if against else [])]
    cached = {str(cache): cache for cache in caches}
    runs: dict[str, Runs] = {}
    with contextlib.ExitStack() as stack:
        folder = find(settings, reporter)
        prompt = (PROMPT,) if "prompt" in folder.parameters else ()
        for backend in backends:
            own = replace(settings, prompt=prompt, backend=backend)
            if backend == Backend.DIFFUSERS:  # neither is upstream's
                own = replace(own, executables=None, step_cache=None)
            else:
                own = replace(own, step_cache=caches[0] if caches else None)
            run = VideoRun.prepared(own, folder, reporter)
            stack.enter_context(run.opened())
            runs[str(backend)] = Runs(run)
            if run.caches is not None:
                for name, cache in cached.items():
                    runs[name] = Runs(run, run.caches.other(cache))
        opened = time.perf_counter() - opened
        # Turn by turn, so that a machine that slows down slows all.
        for turn in range(1 + repeat):
            what = "first run" if turn == 0 else f"run {turn} of {repeat}"
            for name, one in runs.items():
                with reporter.timed(f"{name}: {what}"):
                    one.take()
        exact = runs[str(Backend.TPUPORT)]
        last = [*exact.stages[-1].values()]
        total = sum(sum(one.seconds) for one in runs.values())
        report = exact.run.report(last, total)
    denoised = exact.stages[-1].get(StageName.DENOISE)
    steps = denoised.steady_calls + 1 if denoised else 1
    result: dict[str, Any] = {
        "command": "bench",
        **{name: getattr(report, name) for name in _OF_RUN},
        "settings": exact.run.asked,
        "versions": versions(),
        "repeat": repeat,
        "load_average": load,
        "cpus": cpus,
        "notes": [],
        "open_seconds": opened,
        "backends": {name: taken.as_dict(steps) for name, taken in runs.items()},
    }
    steady = {name: found["steady"] for name, found in result["backends"].items()}
    mine = steady[str(Backend.TPUPORT)]
    if against:
        result |= _compared(exact, runs[against], mine, steady[against])
        result["notes"].append(FIRST_NOTE)
    if cached:
        result["step_caches"] = {
            name: _priced(exact, runs[name], mine, steady[name]) for name in cached
        }
    if load > BUSY * cpus:
        result["notes"].append(
            f"the machine was busy at the start (load {load:.1f} on {cpus} CPUs): do "
            "not trust these times"
        )
    return result


def _compared(
    ours: Runs, theirs: Runs, mine: dict[str, Any], others: dict[str, Any]
) -> dict[str, Any]:
    """How much longer upstream's code takes, and how far its frames are."""
    stages = mine["stages"]
    return {
        "ratio": {
            "total": others["seconds"] / mine["seconds"],
            **{name: others["stages"][name] / stages[name] for name in stages},
        },
        "max_frame_difference": float(np.abs(ours.frames - theirs.frames).max()),
    }


def _priced(
    exact: Runs, cached: Runs, before: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    """What a step cache saves, as ratios above 1, and what it costs."""
    return {
        "speedup": before["seconds"] / after["seconds"],
        "denoise_speedup": before["stages"]["denoise"] / after["stages"]["denoise"],
        **compare(cached.frames, exact.frames),
    }
