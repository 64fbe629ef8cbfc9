"""``tpuport generate``: from prompts to videos."""

from __future__ import annotations

import time
from typing import Any

from tpuport.api import DEFAULT_MODEL
from tpuport.cli.asked.cache_folder import cache_folder, new_run_folder
from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.noise import read_noise
from tpuport.cli.asked.options import command
from tpuport.cli.asked.sessions import (
    check_attention_here,
    check_early,
    check_prompts,
    check_run_early,
    in_words,
    make_request,
    open_session,
    read_source,
)
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.run_stages import (
    Video,
    check_noise,
    going_on,
    publish_videos,
    reusable,
    run_stage,
    stage_note,
    video_files,
)
from tpuport.cli.shown.output import print_json, say
from tpuport.cli.shown.outputs import default_out, plan_outputs
from tpuport.cli.shown.progress import make_display, print_summary
from tpuport.core.enums import Backend
from tpuport.core.files.run_record import RUN_FILE, STAGES
from tpuport.core.reports import RunReport, StageReport


@command("generate")
def generate(settings: Settings) -> None:
    """Make videos from prompts: encode, denoise and decode in a row.

    Several prompts and seeds make a video of every prompt with every seed.
    """
    prepare(debug=settings.debug)
    document, videos, report = _generate(settings)
    say("")
    print_summary(report)
    for made in videos:
        say(f"wrote {made.path}")
    if settings.json:
        print_json(document)


def _generate(settings: Settings) -> tuple[dict[str, Any], list[Video], RunReport]:
    started = time.perf_counter()
    known = check_early(settings)
    check_prompts(settings)
    check_run_early(known, settings)
    prompts, seeds = settings.videos()
    model = settings.model or DEFAULT_MODEL
    guess = known.variant.name if known.variant else "video"
    name = default_out(model, guess, seeds)
    plan_outputs(settings.out or name, len(prompts))
    if settings.run_dir is None:  # else denoise may be finished in it
        check_attention_here(settings)
    cache = cache_folder(settings.cache_dir)
    noise = read_noise(settings.latents)
    if noise is not None:
        noise.for_videos(len(prompts))
    reused: list[str] = []
    stages: list[StageReport] = []
    with (
        make_display() as display,
        open_session(settings, cache=cache, reporter=display) as session,
    ):
        source = read_source(settings, session.variant)
        request = make_request(session, settings, source)
        display.say(in_words(request))
        if not settings.run_dir or not (settings.run_dir / RUN_FILE).exists():
            session.check_weights(request=request)
        if noise is not None:
            session.check(request, noise.for_videos(len(prompts)))
        outputs = plan_outputs(
            settings.out or default_out(model, session.variant.name, seeds),
            len(prompts),
        )
        if settings.out is None:
            for path in outputs.paths:
                if path.exists():
                    display.say(f"overwrites {path}; --out names another file")
        run = session.open_run(settings.run_dir or new_run_folder(cache), request)
        check_noise(session, run, noise)
        temporary = settings.run_dir is None
        with going_on(run, settings, outputs.asked, temporary=temporary):
            if settings.backend != Backend.DIFFUSERS:
                left = [s for s in session.port.stages if not run.finished(s.name)]
                session.executor.check_built(request, left)
            for stage in STAGES[:2]:
                if reusable(session, run, stage, display.say):
                    reused.append(stage)
                    display.say(f"{stage}: finished in {run.path}, reused")
                    continue
                _, stage_report = run_stage(
                    session,
                    run,
                    stage,
                    noise=noise if stage == STAGES[0] else None,
                    source=source if stage == STAGES[0] else None,
                )
                stages.append(stage_report)
            with video_files(run, outputs) as files:
                _, stage_report = run_stage(
                    session,
                    run,
                    STAGES[2],
                    files=files,
                )
                report = session.run_report(
                    [*stages, stage_report], time.perf_counter() - started
                )
                videos = publish_videos(
                    session,
                    run,
                    files,
                    report=report,
                    note=stage_note(session),
                )
        document = {
            "command": "generate",
            "model": model,
            "variant": session.variant.name,
            "weights": session.checkpoint.reference,
            "videos": [video.as_dict() for video in videos],
            "settings": request.as_dict(),
            "dtype": session.dtype,
            "mesh": report.mesh,
            "attention": str(settings.attention),
            "blocks": session.port.blocks,
            "implementations": dict(report.implementations),
            "encode_on": session.encode_on,
            "backend": settings.backend,
            "run_dir": str(settings.run_dir) if settings.run_dir else None,
            "reused": reused,
            "report": report.as_dict(),
        }
    return document, videos, report
