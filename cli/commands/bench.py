"""``tpuport bench``: how fast a model runs here, and against upstream's own code."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from tpuport.cli.asked.environment import prepare, running
from tpuport.cli.asked.first import check_run
from tpuport.cli.asked.many_hosts import joined
from tpuport.cli.asked.options import command, flag, refuse_options
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.variants import check_model, with_model
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import give_out
from tpuport.cli.shown.tables import columns
from tpuport.core.enums import Backend
from tpuport.core.run.progress import Display
from tpuport.core.spec.step_cache import METHODS, StepCache
from tpuport.errors import UsageError


class _Once(Display):
    """Says nothing twice: every run would say it."""

    def __init__(self) -> None:
        super().__init__(signals.check)
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """A line, if it was not said."""
        if text not in self._said:
            self._said.add(text)
            super().say(text)


@command(
    "bench",
    quality=flag(
        "--quality",
        "Measure step caches: that of --cache, or all of them. PSNR and SSIM compare "
        "each with the exact run of the same seed.",
    ),
    repeat=flag("--repeat", "Steady runs of each backend and step cache.", min=1),
    against=flag("--against diffusers", "Also measure upstream's code."),
)
def bench(
    settings: Settings,
    context: typer.Context,
    quality: bool = False,
    repeat: int = 3,
    against: str | None = None,
) -> None:
    """Measure each stage: its first call, and its steady calls.

    --against diffusers also measures plain upstream code. The two take turns in one
    process, so that both see the same machine. --cache also measures a step cache: the
    time that it saves, and the quality that it costs.

    Example: tpuport bench --steps 4 --against diffusers
    """
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    if against not in (None, Backend.DIFFUSERS):
        raise UsageError(f"--against {against!r}: only diffusers can be named")
    prepare(debug=settings.debug)
    caches = [settings.step_cache] if settings.step_cache else []
    if quality and not caches:
        caches = [StepCache(method=name) for name in METHODS]
    check_run(settings)
    check_model(settings, prompt=False)
    settings = with_model(settings)
    how: dict[str, Any] = {"repeat": repeat, "against": against, "caches": caches}
    how |= {"opened": time.perf_counter(), "load": os.getloadavg()[0]}
    with joined(settings) as own:
        with running(own, _Once()) as display:
            from tpuport.cli.runs.benchmark import measure

            result = measure(own, **how, reporter=display)
        give_out(result, as_json=own.json, text=_text(result))


def _text(result: dict[str, Any]) -> Sequence[str]:
    request, caches = result["settings"], result.get("step_caches", {})
    backends = {n: b for n, b in result["backends"].items() if n not in caches}
    ratios = result.get("ratio", {})
    firsts = [backend["first"] for backend in backends.values()]
    steadies = [backend["steady"] for backend in backends.values()]
    rows = [["", *backends, *(["ratio"] if ratios else [])]]

    def row(label: str, values: Iterable[float], ratio: str = "") -> None:
        cells = [label, *(f"{value:.3f} s" for value in values)]
        if ratios:
            cells.append(f"{ratios[ratio]:.2f}x" if ratio else "")
        rows.append(cells)

    row("first run", [first["seconds"] for first in firsts])
    row("  compile", [first["compile_seconds"] for first in firsts])
    if ratios:
        rows[-1][2] = "-"  # upstream compiles nothing
    row("steady run", [one["seconds"] for one in steadies], "total")
    row("  fastest", [min(one["all_seconds"]) for one in steadies])
    row("  slowest", [max(one["all_seconds"]) for one in steadies])
    for name in steadies[0]["stages"]:
        row(f"  {name}", [one["stages"][name] for one in steadies], name)
        if name == "denoise":
            row("    per step", [one["seconds_per_step"] for one in steadies])
    # Not every pipeline has each of these.
    size = [f"{request['width']}x{request['height']}"] if request.get("width") else []
    words = {"num_frames": "frames", "num_inference_steps": "steps"}
    size += [f"{request[n]} {word}" for n, word in words.items() if request.get(n)]
    lines = [
        f"{', '.join([result['model'], *size])}, {result['dtype']}, "
        f"{result['blocks']} blocks, "
        f"{result['devices']} x {result['platform']} ({result['mesh']}), "
        f"median of {result['repeat']}",
        "",
        *columns(rows),
    ]
    if ratios:
        lines += [
            "",
            "ratio: diffusers / tpuport, above 1 tpuport is faster",
            f"largest difference of the frames: {result['max_frame_difference']:.2g}",
        ]
    if caches:
        lines += ["", *columns(_price_rows(result, caches))]
        lines += ["", "quality is of this video only; see docs/step-caching.md"]
    return [*lines, *(f"note: {note}" for note in result["notes"])]


def _price_rows(
    result: dict[str, Any], caches: dict[str, Any]
) -> Sequence[Sequence[str]]:
    """One row per step cache, and the exact run they are compared with."""
    exact = {"denoise_speedup": 1, "speedup": 1}
    rows = [["step cache", "denoise", "speed-up", "whole run", "PSNR", "SSIM"]]
    for name, price in {"tpuport": exact, **caches}.items():
        quality = ["-", "-"]
        if name in caches:
            psnr = "identical" if price["psnr"] is None else f"{price['psnr']:.2f} dB"
            quality = [psnr, f"{price['ssim']:.4f}"]
        rows.append(
            [
                name if name in caches else "none (exact)",
                f"{result['backends'][name]['steady']['stages']['denoise']:.3f} s",
                f"{price['denoise_speedup']:.2f}x",
                f"{price['speedup']:.2f}x",
                *quality,
            ]
        )
    return rows
