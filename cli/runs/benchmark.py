"""A pipeline measured, and beside upstream's own code."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tpuport.cli.asked.settings import PROMPT, Settings
from tpuport.cli.runs.measured import FIRST_NOTE, Machine, Once, Runs, compared, priced
from tpuport.cli.runs.taped_call import TapedCall
from tpuport.cli.runs.video_run import VideoRun, find
from tpuport.core.enums import Backend, StageName
from tpuport.core.files.fingerprint import versions
from tpuport.core.spec.step_cache import StepCache


def measure(
    settings: Settings,
    *,
    repeat: int,
    against: str | None,
    caches: Sequence[StepCache] = (),
) -> dict[str, Any]:
    """Run the benchmark; the result is JSON-ready.

    Each backend has a pipeline of its own, with its own weights.

    Args:
        repeat: steady runs of each.
        caches: step caches, each run in turns with the exact run.
        against: ``"diffusers"``, to measure upstream's code too.

    Raises:
        TpuportError: as of a run of the pipeline.
    """
    machine = Machine.now()
    backends = [Backend.TPUPORT, *([Backend.DIFFUSERS] if against else [])]
    cached = {str(cache): cache for cache in caches}
    runs = {str(name): Runs() for name in (*backends, *cached)}
    with Once() as display, contextlib.ExitStack() as stack:
        opened = time.perf_counter()
        folder = find(settings, display)
        prompt = (PROMPT,) if "prompt" in folder.parameters else ()
        measured: dict[str, tuple[VideoRun, TapedCall]] = {}
        for backend in backends:
            own = replace(settings, prompt=prompt, backend=backend)
            if backend == Backend.DIFFUSERS:  # neither is upstream's
                own = replace(own, executables=None, step_cache=None)
            else:
                own = replace(own, step_cache=caches[0] if caches else None)
            run = VideoRun.prepared(own, folder, display)
            one = stack.enter_context(run.opened())
            measured[str(backend)] = run, replace(one, caches=None)
            if one.caches is not None:
                for name, cache in cached.items():
                    measured[name] = run, replace(one, caches=one.caches.other(cache))
        opened = time.perf_counter() - opened
        # Turn by turn, so that a machine that slows down slows all.
        for turn in range(1 + repeat):
            what = "first run" if turn == 0 else f"run {turn} of {repeat}"
            for name, (run, one) in measured.items():
                with display.timed(f"{name}: {what}"):
                    began = time.perf_counter()
                    made, reports = run.made(one)
                assert made is not None
                runs[name].seconds.append(time.perf_counter() - began)
                runs[name].stages.append({str(r.stage): r for r in reports})
                runs[name].frames = made.frames
        ours, _ = measured[str(Backend.TPUPORT)]
        last = list(runs[str(Backend.TPUPORT)].stages[-1].values())
        report = ours.report(last, sum(sum(r.seconds) for r in runs.values()))
    denoised = runs[str(Backend.TPUPORT)].stages[-1].get(StageName.DENOISE)
    steps = denoised.steady_calls + 1 if denoised else 1
    result: dict[str, Any] = {
        "command": "bench",
        **{name: getattr(report, name) for name in _OF_RUN},
        "settings": ours.asked,
        "versions": versions(),
        "repeat": repeat,
        **machine.about(),
        "notes": [],
        "open_seconds": opened,
        "backends": {name: taken.as_dict(steps) for name, taken in runs.items()},
    }
    if against:
        mine, theirs = (runs[str(name)] for name in backends)
        result |= compared(mine, theirs, result["backends"], against)
        result["notes"].append(FIRST_NOTE)
    if cached:
        exact = runs[str(Backend.TPUPORT)]
        result["step_caches"] = {
            name: priced(exact, runs[name], result["backends"], name) for name in cached
        }
    result["notes"] += machine.notes()
    return result


#: What the result has of the report of a run.
_OF_RUN = (
    *("model", "weights", "dtype", "blocks", "mesh", "platform", "devices"),
    *("peak_host_bytes", "peak_device_bytes"),
)
