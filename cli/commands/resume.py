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
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.kept_runs import kept_run, look, out_of
from tpuport.cli.runs.staged import go_on_with_run
from tpuport.core.files.run_record import RUN_FILE
from tpuport.errors import UsageError


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
    if (folder / RUN_FILE).exists():
        kept = look(folder)
    elif folder.is_dir():
        raise UsageError(
            f"{folder}: holds no run (there is no {RUN_FILE}); name a folder of "
            "--run-dir, or an ID of `tpuport runs`"
        )
    else:
        kept = kept_run(cache_folder(settings.cache_dir), name)
    own = out_of(kept, replace(settings, run_dir=kept.folder))
    go_on_with_run(own, started, None)
