"""``tpuport resume``: a run that ended early goes on."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tpuport.cli.asked.cache_folder import cache_folder
from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import command
from tpuport.cli.asked.sessions import check_early, outputs_of, shown_session
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.any_pipeline import for_a_plugin
from tpuport.cli.runs.any_runs import resume_any
from tpuport.cli.runs.kept_runs import (
    KeptRun,
    asked_for,
    going_on,
    is_kept,
    kept_run,
    look,
    out_of,
    temporary,
)
from tpuport.cli.runs.run_stages import (
    decode_videos,
    describe_results,
    inputs_of,
    open_existing,
    run_stage,
)
from tpuport.cli.shown.output import show_results
from tpuport.core.files.run_lock import working_in
from tpuport.core.files.run_record import RUN_FILE, STAGES, is_pipeline_run
from tpuport.core.spec.requests import recorded_request
from tpuport.errors import UsageError
from tpuport.plugins import get_port


@command("resume")
def resume(
    settings: Settings,
    name: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A folder of --run-dir, or an ID of `tpuport runs`."
        ),
    ],
) -> None:
    """Finish a run that ended early, and write its videos.

    The run keeps its settings, and the videos go where the run was to write them; --out
    names another place. The folder of a run without --run-dir is removed afterwards.

    Example: tpuport resume fox --out fox.mp4
    """
    prepare(debug=settings.debug)
    started = time.perf_counter()
    folder = Path(name).expanduser()
    is_folder = (folder / RUN_FILE).exists()
    if folder.is_dir() and not is_folder:
        raise UsageError(
            f"{folder}: holds no run (there is no {RUN_FILE}); name a folder of "
            "--run-dir, or an ID of `tpuport runs`"
        )
    if is_folder:
        kept = look(folder)
    else:
        kept = kept_run(cache_folder(settings.cache_dir), name)
    if is_pipeline_run(kept.folder):
        settings = replace(settings, run_dir=kept.folder)
        resume_any(out_of(kept, settings), started)
    else:
        _resume_stages(kept, settings, started)


def _resume_stages(kept: KeptRun, settings: Settings, started: float) -> None:
    in_cache = is_kept(kept.folder)
    asked = (
        asked_for(kept, settings)
        if in_cache
        else replace(settings, run_dir=kept.folder)
    )
    run, settings = open_existing(for_a_plugin(asked), STAGES[1])
    check_early(settings)
    request = recorded_request(get_port(run.model), run.settings, run.file)
    count, inputs = len(request.prompts), inputs_of(run)
    place = str(run.path / "video.mp4")
    outputs = outputs_of(settings, place, count, request=request, inputs=inputs)
    with (
        shown_session(settings) as session,
        temporary(run.path) if in_cache else working_in(run.path),
        going_on(run.path),
    ):
        left = STAGES[len(kept.finished) : 2]
        stages = [run_stage(session, run, stage)[1] for stage in left]
        videos, report = decode_videos(session, run, outputs, stages, started)
        document = {
            **describe_results("resume", session, run, report, videos),
            "reused": list(kept.finished),
        }
    written = [video.path for video in videos]
    show_results(document, report, written, as_json=settings.json, file=settings.report)
