"""``tpuport encode``, ``denoise`` and ``decode``: a run, one stage a command."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.noise import read_noise
from tpuport.cli.asked.options import command
from tpuport.cli.asked.sessions import (
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
from tpuport.cli.runs.any_pipeline import for_a_plugin, is_any, with_model
from tpuport.cli.runs.any_runs import (
    decode_any,
    denoise_any,
    encode_again,
    encode_any,
)
from tpuport.cli.runs.kept_runs import going_on
from tpuport.cli.runs.run_stages import (
    decode_videos,
    describe_results,
    encode_report,
    inputs_of,
    open_existing,
    recorded_noise,
    recorded_source,
    run_stage,
)
from tpuport.cli.shown.output import show_results
from tpuport.core.files.outputs import Video
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.run_lock import working_in
from tpuport.core.files.run_record import (
    RUN_FILE,
    STAGE_FILES,
    STAGES,
    is_pipeline_run,
)
from tpuport.core.reports import RunReport
from tpuport.core.spec import rules
from tpuport.core.spec.requests import read_source, recorded_request
from tpuport.core.spec.run_settings import Asked, defaults_of, settings_of
from tpuport.errors import UsageError
from tpuport.plugins import get_port

if TYPE_CHECKING:
    from tpuport.core.run.session import Session


@command("encode")
def encode(settings: Settings) -> None:
    """Encode the prompts into a run directory.

    Takes the settings of `generate` and keeps them in the run directory, where
    `denoise` and `decode` read them. Without --prompt, `encode` reads them there too.

    Example: tpuport encode --prompt "a panda" --run-dir run
    """
    prepare(debug=settings.debug)
    if settings.run_dir is None:
        raise UsageError(f"--run-dir is missing; name a folder for {STAGES[0]}")
    started = time.perf_counter()
    exists = not settings.prompt and (settings.run_dir / RUN_FILE).exists()
    if exists:
        _check_says_nothing(settings)
        if is_pipeline_run(settings.run_dir):
            encode_again(settings, started)
            return
        run, settings = open_existing(settings, STAGES[0])
        _check_going_on(settings, run, STAGES[0])
    else:
        settings = with_model(settings)
        if is_any(settings):
            encode_any(settings, started)
            return
        known = check_early(settings)
        check_prompts(settings)
        check_run_early(known, settings, STAGES[:1])
    assert settings.run_dir is not None
    noise = read_noise(settings.latents)
    if noise is not None and not exists:
        noise.for_videos(len(settings.videos()[0]))
    with (
        shown_session(settings) as session,
        working_in(settings.run_dir) as folder,
    ):
        if exists:
            request = recorded_request(session.port, run.settings, run.file)
            report = encode_report(run)
            note = {} if report is None else report.get("note", {})
            source = read_source(settings.image, settings.video, request.num_frames)
            source = source or recorded_source(note.get("source"), run.file, request)
            noise = noise or recorded_noise(note.get("initial_latents"), run.file)
        else:
            source = source_of(settings, session.variant)
            request = make_request(session, settings, source)
            session.reporter.say(in_words(request))
        if noise is not None:
            session.check(request, noise.for_videos(len(request.prompts)))
        run = session.open_run(folder, request)
        with going_on(run.path):
            _, stage = run_stage(session, run, STAGES[0], noise=noise, source=source)
        report = session.run_report([stage], time.perf_counter() - started)
    _show_results(settings, STAGES[0], session, run, report)


def _check_says_nothing(settings: Settings) -> None:
    """Refuse a flag that says what to make, where run.json says so.

    Raises:
        UsageError: which one.
    """
    defaults = defaults_of(Asked)
    for name, setting in settings_of(Asked).items():
        where = name in ("image", "video")  # may have moved
        if not where and name in defaults and getattr(settings, name) != defaults[name]:
            raise UsageError(
                f"{setting.flags[0]}: {settings.run_dir} has its own; leave the flag "
                "out, or give --prompt and all that the run was begun with"
            )


def _check_going_on(settings: Settings, run: RunDirectory, stage: str) -> None:
    """:func:`check_early`, and the run itself held against --executables."""
    known = check_early(settings)
    request = recorded_request(get_port(run.model), run.settings, run.file)
    if known.variant is not None:
        rules.check(replace(known, request=request, stages=[stage]))


@command("denoise")
def denoise(settings: Settings) -> None:
    """Denoise in a run directory that `encode` made.

    --vae matters here with --executables only: they were compiled for one autoencoder.

    Example: tpuport denoise --run-dir run
    """
    prepare(debug=settings.debug)
    started = time.perf_counter()
    if settings.run_dir is not None and is_pipeline_run(settings.run_dir):
        denoise_any(settings, started)
        return
    run, settings = open_existing(for_a_plugin(settings), STAGES[1])
    _check_going_on(settings, run, STAGES[1])
    with (
        shown_session(settings) as session,
        working_in(run.path),
        going_on(run.path),
    ):
        _, stage = run_stage(session, run, STAGES[1])
        report = session.run_report([stage], time.perf_counter() - started)
    _show_results(settings, STAGES[1], session, run, report)


@command("decode")
def decode(settings: Settings) -> None:
    """Decode the latents of a run directory into videos.

    Without --out the video becomes video.mp4 in the run directory.

    Example: tpuport decode --run-dir run --out panda.mp4
    """
    prepare(debug=settings.debug)
    started = time.perf_counter()
    if settings.run_dir is not None and is_pipeline_run(settings.run_dir):
        decode_any(settings, started)
        return
    run, settings = open_existing(for_a_plugin(settings), STAGES[2])
    _check_going_on(settings, run, STAGES[2])
    request = recorded_request(get_port(run.model), run.settings, run.file)
    place = str(run.path / "video.mp4")
    outputs = outputs_of(
        settings, place, len(request.prompts), request=request, inputs=inputs_of(run)
    )
    with (
        shown_session(settings) as session,
        working_in(run.path),
        going_on(run.path),
    ):
        videos, report = decode_videos(session, run, outputs, [], started)
    _show_results(settings, STAGES[2], session, run, report, videos)


def _show_results(
    settings: Settings,
    stage: str,
    session: Session,
    run: RunDirectory,
    report: RunReport,
    videos: Sequence[Video] = (),
) -> None:
    """The end of a stage: the summary, what was written, what comes next."""
    files = [run.path / STAGE_FILES[stage]] if stage in STAGE_FILES else []
    document = {
        **describe_results(stage, session, run, report, videos),
        "run_dir": str(run.path),
        "files": [str(path) for path in files],
    }
    written = [*files, *(video.path for video in videos)]
    show_results(document, report, written, as_json=settings.json, file=settings.report)
