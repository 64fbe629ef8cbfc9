"""What the three stage commands do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tpuport.cli.asked.built import check_built_request
from tpuport.cli.asked.cache_folder import cache_folder, new_run_folder
from tpuport.cli.asked.noise import read_noise
from tpuport.cli.asked.sessions import (
    check_early,
    check_prompts,
    check_run_early,
    in_words,
    known_variant,
    make_request,
    open_session,
    read_source,
)
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.run_stages import (
    Video,
    open_existing,
    publish_videos,
    run_stage,
    stage_note,
    video_files,
)
from tpuport.cli.shown.output import give_out, say
from tpuport.cli.shown.outputs import plan_outputs
from tpuport.cli.shown.progress import make_display, print_summary
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.run_record import STAGE_FILES, STAGES
from tpuport.core.reports import RunReport
from tpuport.core.spec.request import Request

if TYPE_CHECKING:
    from tpuport.core.run.session import Session


def encode_stage(settings: Settings) -> None:
    """Create the run directory and encode into it."""
    started = time.perf_counter()
    port = check_early(settings)
    check_prompts(settings)
    check_run_early(port, settings, STAGES[:1])
    cache = cache_folder(settings.cache_dir)
    noise = read_noise(settings.latents)
    if noise is not None:
        noise.for_videos(len(settings.videos()[0]))
    with (
        make_display() as display,
        open_session(settings, cache=cache, reporter=display) as session,
    ):
        source = read_source(settings, session.variant)
        request = make_request(session, settings, source)
        display.say(in_words(request))
        if noise is not None:
            session.check_latents(request, noise.for_videos(len(request.prompts)))
        run = session.open_run(settings.run_dir or new_run_folder(cache), request)
        _, stage = run_stage(
            session,
            run,
            STAGES[0],
            attention=settings.attention,
            backend=settings.backend,
            noise=noise,
            source=source,
        )
        report = session.run_report([stage], time.perf_counter() - started)
    _tell(settings, STAGES[0], session, run, report)


def _check_going_on(settings: Settings, run: RunDirectory, stage: str) -> None:
    """:func:`check_early`, and the run itself held against --executables."""
    port = check_early(settings)
    variant = known_variant(port, settings)
    if variant is not None:
        request = Request.from_dict(run.settings)
        check_built_request(port.form_of(variant), settings, request, [stage])


def denoise_stage(settings: Settings) -> None:
    """Denoise in an existing run directory."""
    started = time.perf_counter()
    run, settings = open_existing(settings)
    _check_going_on(settings, run, STAGES[1])
    cache = cache_folder(settings.cache_dir)
    with (
        make_display() as display,
        open_session(settings, cache=cache, reporter=display) as session,
    ):
        _, stage = run_stage(
            session,
            run,
            STAGES[1],
            attention=settings.attention,
            backend=settings.backend,
        )
        report = session.run_report([stage], time.perf_counter() - started)
    _tell(settings, STAGES[1], session, run, report)


def decode_stage(settings: Settings) -> None:
    """Decode an existing run directory into videos."""
    started = time.perf_counter()
    run, settings = open_existing(settings)
    _check_going_on(settings, run, STAGES[2])
    count = len(Request.from_dict(run.settings).prompts)
    out = settings.out or str(run.path / "video.mp4")
    outputs = plan_outputs(out, count, settings.report)
    cache = cache_folder(settings.cache_dir)
    with (
        make_display() as display,
        open_session(settings, cache=cache, reporter=display) as session,
        video_files(run, outputs) as files,
    ):
        _, stage = run_stage(
            session,
            run,
            STAGES[2],
            attention=settings.attention,
            backend=settings.backend,
            files=files,
        )
        report = session.run_report([stage], time.perf_counter() - started)
        videos = publish_videos(
            session,
            run,
            files,
            report=report,
            note=stage_note(session, settings.attention, settings.backend),
        )
    _tell(settings, STAGES[2], session, run, report, videos)


def _tell(
    settings: Settings,
    stage: str,
    session: Session,
    run: RunDirectory,
    report: RunReport,
    videos: Sequence[Video] = (),
) -> None:
    """The end of a stage: the summary, what was written, what comes next."""
    files = [run.path / STAGE_FILES[stage]] if stage in STAGE_FILES else []
    written = [*files, *(video.path for video in videos)]
    say("")
    print_summary(report)
    for path in written:
        say(f"wrote {path}")
    document: dict[str, Any] = {
        "command": stage,
        "model": run.model,
        "variant": run.variant,
        "weights": session.checkpoint.reference,
        "run_dir": str(run.path),
        "files": [str(path) for path in files],
        "videos": [video.as_dict() for video in videos],
        "settings": run.settings,
        "dtype": session.dtype,
        "mesh": report.mesh,
        "attention": settings.attention or "auto",
        "blocks": session.port.blocks,
        "implementations": dict(report.implementations),
        "backend": settings.backend or "tpuport",
        "report": report.as_dict(),
    }
    give_out(document, as_json=settings.json, report=settings.report)
