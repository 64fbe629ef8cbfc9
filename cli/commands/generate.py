"""``tpuport generate``: from prompts to videos."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.noise import Noise, read_noise
from tpuport.cli.asked.options import command
from tpuport.cli.asked.sessions import (
    check_attention_here,
    check_early,
    check_prompts,
    check_run_early,
    in_words,
    make_request,
    outputs_of,
    shown_session,
    source_of,
)
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.any_pipeline import is_any, with_model
from tpuport.cli.runs.any_runs import generate_any
from tpuport.cli.runs.kept_runs import going_on, keep_asked, new_run
from tpuport.cli.runs.run_stages import (
    check_noise,
    decode_videos,
    describe_results,
    reusable,
    run_stage,
)
from tpuport.cli.shown.output import show_results
from tpuport.core.enums import Backend
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.run_lock import working_in
from tpuport.core.files.run_record import RUN_FILE, STAGES
from tpuport.core.files.sources import Source
from tpuport.core.reports import StageReport
from tpuport.core.spec.requests import recorded_request

if TYPE_CHECKING:
    from tpuport.core.run.session import Session


@command("generate")
def generate(settings: Settings) -> None:
    """Make videos from prompts: encode, denoise and decode in a row.

    Every prompt is made with every seed. `tpuport models` shows the variants, and what
    they use for settings that you leave out.

    Example: tpuport generate --prompt "a panda" --variant 5b --out panda.mp4
    """
    prepare(debug=settings.debug)
    started = time.perf_counter()
    settings = with_model(settings)
    if is_any(settings):
        generate_any(settings, started)
        return
    _check(settings)
    prompts, seeds = settings.videos()
    noise = read_noise(settings.latents)
    if noise is not None:
        noise.for_videos(len(prompts))
    with shown_session(settings) as session:
        source = source_of(settings, session.variant)
        request = make_request(session, settings, source)
        session.reporter.say(in_words(request))
        if not settings.run_dir or not (settings.run_dir / RUN_FILE).exists():
            session.check_weights(request=request)
        if noise is not None:
            session.check(request, noise.for_videos(len(prompts)))
        name = default_out(session.port.name, session.variant.name, seeds)
        outputs = outputs_of(settings, name, len(prompts), request=request)
        given, cache = settings.run_dir, session.settings.cache_dir
        assert cache is not None
        with new_run(cache) if given is None else working_in(given) as folder:
            run = session.open_run(folder, request)
            check_noise(session, run, noise)
            if given is None:
                keep_asked(folder, settings, outputs.asked)
            with going_on(run.path):
                stages, reused = _before_decode(session, run, noise, source)
                videos, report = decode_videos(session, run, outputs, stages, started)
                described = describe_results("generate", session, run, report, videos)
        document = {
            **described,
            "encode_on": session.encode_on,
            "run_dir": str(given) if given else None,
            "reused": reused,
        }
    written = [video.path for video in videos]
    show_results(document, report, written, as_json=settings.json, file=settings.report)


def _check(settings: Settings) -> None:
    """All that can be refused before a session is opened."""
    known = check_early(settings)
    check_prompts(settings)
    check_run_early(known, settings)
    prompts, seeds = settings.videos()
    guess = known.variant.name if known.variant else "video"
    assert known.port is not None
    name = default_out(known.port.name, guess, seeds)
    outputs_of(settings, name, len(prompts))
    if settings.run_dir is None:  # else denoise may be finished in it
        check_attention_here(settings)


def default_out(model: str, variant: str, seeds: tuple[int, ...]) -> str:
    """The name in the current folder when ``--out`` is not given."""
    seed = f"-seed{seeds[0]}" if len(set(seeds)) == 1 else ""
    return f"{model}-{variant}{seed}.mp4"


def _before_decode(
    session: Session, run: RunDirectory, noise: Noise | None, source: Source | None
) -> tuple[list[StageReport], list[str]]:
    """Encode and denoise; the reports, and the stages that were finished before."""
    reused: list[str] = []
    stages: list[StageReport] = []
    say = session.reporter.say
    if session.settings.backend != Backend.DIFFUSERS:
        *before, last = session.port.stages
        left = [*(s for s in before if not run.finished(s.name)), last]
        request = recorded_request(session.port, run.settings, run.file)
        session.executor.check_built(request, left)
    for stage in STAGES[:2]:
        if reusable(session, run, stage, say):
            reused.append(stage)
            say(f"{stage}: finished in {run.path}, reused")
            continue
        first = stage == STAGES[0]
        _, report = run_stage(
            session,
            run,
            stage,
            noise=noise if first else None,
            source=source if first else None,
        )
        stages.append(report)
    return stages, reused
