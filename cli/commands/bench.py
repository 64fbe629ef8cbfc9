"""``tpuport bench``: how fast a model runs here, and against upstream's own code."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuport.cli.asked.cache_folder import cache_folder
from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import command, refuse_options
from tpuport.cli.asked.sessions import (
    check_early,
    check_run_early,
    make_request,
    open_session,
    source_of,
)
from tpuport.cli.asked.settings import PROMPT, Settings
from tpuport.cli.runs.any_bench import measure_any
from tpuport.cli.runs.any_pipeline import is_any, with_model
from tpuport.cli.runs.measured import FIRST_NOTE, Machine, Once, Runs, compared, priced
from tpuport.cli.shown.output import print_json
from tpuport.cli.shown.tables import columns
from tpuport.core.enums import Backend, Pixels
from tpuport.core.files.fingerprint import versions
from tpuport.core.reports import RunReport, StageReport
from tpuport.core.spec.choices import choices
from tpuport.core.spec.request import Request, denoising_steps
from tpuport.core.spec.step_cache import METHODS, StepCache
from tpuport.errors import UsageError

if TYPE_CHECKING:
    from tpuport.core.run.session import Session


@command("bench")
def bench(
    settings: Settings,
    context: typer.Context,
    quality: Annotated[
        bool,
        typer.Option(
            "--quality",
            help="Measure step caches: that of --cache, or all of them. PSNR and SSIM "
            "compare each with the exact run of the same seed.",
        ),
    ] = False,
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat", min=1, help="Steady runs of each backend and step cache."
        ),
    ] = 3,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="diffusers", help="Also measure upstream's code."
        ),
    ] = None,
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
    settings = with_model(settings)
    if is_any(settings):
        result = measure_any(settings, repeat=repeat, against=against, caches=caches)
    else:
        result = measure(settings, repeat=repeat, against=against, caches=caches)
    if settings.json:
        print_json(result)
    else:
        print("\n".join(_text(result)))


def measure(
    settings: Settings,
    *,
    repeat: int,
    against: str | None,
    caches: Sequence[StepCache] = (),
) -> dict[str, Any]:
    """Run the benchmark; the result is JSON-ready.

    Args:
        repeat: steady-state runs of each.
        caches: step caches, each run in turns with the exact run.
    """
    exact = replace(settings, step_cache=None, prompt=(PROMPT,))
    check_run_early(check_early(settings), settings)
    cache = cache_folder(settings.cache_dir)
    machine = Machine.now()
    backends = ["tpuport", *([against] if against else [])]
    cached = {str(cache): cache for cache in caches}
    runs = {name: Runs() for name in [*backends, *cached]}
    with Once() as display:
        opened = time.perf_counter()
        with open_session(
            settings, cache=cache, reporter=display, keep_loaded=True
        ) as session:
            opened = time.perf_counter() - opened
            source = source_of(settings, session.variant)
            request = make_request(session, exact, source)
            requests = {
                name: replace(request, step_cache=cache)
                for name, cache in cached.items()
            }
            for asked in requests.values():
                session.check(asked)
            pixels = {source.kind: source.for_videos(1)} if source else {}
            # What `tpuport compile` builds makes bytes, as `generate` writes them.
            frames = Pixels.UINT8 if settings.executables else Pixels.FLOAT32
            # Turn by turn, so that a machine that slows down slows all.
            for turn in range(1 + repeat):
                what = "first run" if turn == 0 else f"run {turn} of {repeat}"
                for name, taken in runs.items():
                    asked = requests.get(name, request)
                    backend = name if name in backends else "tpuport"
                    with display.timed(f"{name}: {what}"):
                        _run(session, asked, backend, taken, pixels, frames)
            report = session.run_report(
                list(runs["tpuport"].stages[-1].values()),
                sum(sum(r.seconds) for r in runs.values()),
            )
    result: dict[str, Any] = {
        "command": "bench",
        **_about(session, request, report),
        "repeat": repeat,
        **machine.about(),
        "notes": [],
        "open_seconds": opened,
        "backends": {
            name: run.as_dict(denoising_steps(request)) for name, run in runs.items()
        },
    }
    if against:
        result |= compared(runs["tpuport"], runs[against], result["backends"], against)
        result["notes"].append(FIRST_NOTE)
        if frames == Pixels.UINT8:
            result["notes"].append(
                "frames were made as bytes, as with --executables: differences are "
                f"multiples of {1 / 255:.4f}"
            )
    if cached:
        result["step_caches"] = {
            name: priced(runs["tpuport"], runs[name], result["backends"], name)
            for name in cached
        }
    result["notes"] += machine.notes()
    return result


#: What the result has of the report of a run.
_OF_RUN = (
    *("model", "variant", "weights", "dtype", "blocks", "mesh", "platform", "devices"),
    *("peak_host_bytes", "peak_device_bytes"),
)


def _about(session: Session, request: Request, report: RunReport) -> dict[str, Any]:
    """What was measured, and on what."""
    return {
        **{name: getattr(report, name) for name in _OF_RUN},
        "settings": request.as_dict(),
        "implementations": choices(session.port),
        "versions": versions(),
    }


def _run(
    session: Session,
    request: Request,
    backend: str,
    runs: Runs,
    pixels: Mapping[str, Any],
    frames: Pixels,
) -> None:
    """One whole run, kept in ``runs``; ``pixels`` are what it starts from.

    ``frames`` is what they are made as, ``"float32"`` or ``"uint8"``; they are kept as
    floats in [0, 1].
    """
    import numpy as np

    from tpuport.core.run.frame_delivery import Delivery

    delivery = Delivery(frames)
    started = time.perf_counter()
    tensors: dict[str, Any] = dict(pixels)
    reports: dict[str, StageReport] = {}
    for stage in session.port.stages:
        tensors, report = session.run_stage(
            stage.name, request, tensors, backend=backend, delivery=delivery
        )
        reports[stage.name] = report
    runs.seconds.append(time.perf_counter() - started)
    runs.stages.append(reports)
    delivery.check()
    made = tensors["frames"]
    runs.frames = made.astype(np.float32) / 255 if made.dtype == np.uint8 else made


def _text(result: dict[str, Any]) -> Sequence[str]:
    """The result for people."""
    request, caches = result["settings"], result.get("step_caches", {})
    backends = {n: b for n, b in result["backends"].items() if n not in caches}
    against = [name for name in backends if name != "tpuport"]
    head = ["", *backends, *(["ratio"] if against else [])]
    rows: list[list[str]] = [head]

    def row(label: str, values: list[float], ratio: float | None = None) -> None:
        cells = [label, *(f"{value:.3f} s" for value in values)]
        if against:
            cells.append("" if ratio is None else f"{ratio:.2f}x")
        rows.append(cells)

    firsts = [backend["first"] for backend in backends.values()]
    steadies = [backend["steady"] for backend in backends.values()]
    ratios = result.get("ratio", {})
    row("first run", [first["seconds"] for first in firsts])
    row("  load", [first["load_seconds"] for first in firsts])
    row("  compile", [first["compile_seconds"] for first in firsts])
    row("steady run", [s["seconds"] for s in steadies], ratios.get("total"))
    row("  fastest", [min(s["all_seconds"]) for s in steadies])
    row("  slowest", [max(s["all_seconds"]) for s in steadies])
    for name in steadies[0]["stages"]:
        row(f"  {name}", [s["stages"][name] for s in steadies], ratios.get(name))
        if name == "denoise":
            row("    per step", [s["seconds_per_step"] for s in steadies])
    if against:  # upstream compiles nothing
        for line in rows:
            if line[0].strip() == "compile":
                line[2] = "-"
    lines = [
        f"{result['model']} {result['variant']}".strip()
        + f", {request['width']}x{request['height']}, {request['num_frames']} frames, "
        f"{request['num_inference_steps']} steps, {result['dtype']}, "
        f"{result['blocks']} blocks, "
        f"{''.join(f'{f} {n}, ' for n, f in result['implementations'].items())}"
        f"{result['devices']} x {result['platform']} ({result['mesh']}), "
        f"median of {result['repeat']}",
        "",
        *columns(rows),
    ]
    if against:
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
    rows = [["step cache", "denoise", "speed-up", "whole run", "PSNR", "SSIM"]]

    def denoise(name: str) -> str:
        return f"{result['backends'][name]['steady']['stages']['denoise']:.3f} s"

    rows.append(["none (exact)", denoise("tpuport"), "1.00x", "1.00x", "-", "-"])
    for name, price in caches.items():
        psnr = "identical" if price["psnr"] is None else f"{price['psnr']:.2f} dB"
        rows.append(
            [
                name,
                denoise(name),
                f"{price['denoise_speedup']:.2f}x",
                f"{price['speedup']:.2f}x",
                psnr,
                f"{price['ssim']:.4f}",
            ]
        )
    return rows
