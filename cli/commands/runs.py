"""``tpuport runs``: what runs without --run-dir left, gone on with or removed."""

from __future__ import annotations

import shutil
import time

import typer

from tpuport.cli.asked.environment import default_cache_dir
from tpuport.cli.asked.options import command, flag, refuse_options
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.kept_runs import KeptRun, kept_run, kept_runs, remove
from tpuport.cli.shown.output import give_out
from tpuport.cli.shown.tables import columns
from tpuport.core.reports import bytes_text, plural
from tpuport.errors import ArtifactError, UsageError

_HEAD = ("ID", "AGE", "MODEL", "FINISHED", "SIZE", "STATE", "PROMPT")

#: Columns of a line where the output is not a terminal.
_WIDTH = 100

#: Days after which `runs clean` takes a run for forgotten.
FORGOTTEN = 7


@command("runs")
def runs(settings: Settings, context: typer.Context) -> None:
    """List the runs that ended early, and can be resumed.

    Runs with --run-dir are not listed: their files are in that folder. `tpuport runs
    resume ID` finishes a run, `tpuport runs clean` removes runs.

    Example: tpuport runs
    """
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    found = kept_runs(settings.cache_dir or default_cache_dir())
    lines = ["no run is kept"]
    if found:
        head, *rows = columns([_HEAD, *map(_row, found)])
        lines = [head]
        for run, row in zip(found, rows, strict=True):
            why = " ".join(run.failed.split())
            lines += [row, f"  failed: {why}"] if why else [row]
        width = shutil.get_terminal_size((_WIDTH, 24)).columns
        lines = [_cut(line, width) for line in lines]
    document = {"runs": [run.as_dict() for run in found]}
    give_out(document, as_json=settings.json, text=lines)


def _row(run: KeptRun) -> tuple[str, ...]:
    state = "can go on" if run.resumable else "cannot go on"
    if run.failed:
        state = "failed"
    if run.process is not None:
        state = f"in process {run.process}"
    prompt = run.prompts[0] if run.prompts else ""
    return (
        run.folder.name,
        _age(time.time() - run.changed),
        run.model or "unreadable",
        " ".join(run.finished) or "nothing",
        bytes_text(run.bytes),
        state,
        " ".join(prompt.split()),
    )


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."


def _age(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            return plural(int(seconds / size), unit)
    return plural(max(int(seconds), 0), "second")


@command(
    "runs clean",
    ids=typer.Argument(
        metavar="ID", show_default=False, help="As `tpuport runs` shows them."
    ),
    everything=flag("--all", "Remove every run that no process works on."),
)
def clean(
    settings: Settings, ids: list[str] | None = None, everything: bool = False
) -> None:
    """Remove runs that ended early.

    Without an ID and without --all, runs that failed or cannot go on, and runs of more
    than seven days. A run that a process works on is never removed.

    Example: tpuport runs clean --all
    """
    if ids and everything:
        raise UsageError("--all and an ID exclude each other; give one")
    cache = settings.cache_dir or default_cache_dir()
    if ids:
        found = [kept_run(cache, name) for name in ids]
    else:
        oldest = time.time() - FORGOTTEN * 86400
        found = [
            run
            for run in kept_runs(cache)
            if run.process is None
            and (everything or run.failed or run.changed < oldest or not run.resumable)
        ]
    names, sizes, busy = [], [], []
    for run in found:
        size = run.bytes
        try:
            remove(run)
        except ArtifactError as error:  # a process has begun to work on it
            busy.append(error)
        else:
            names.append(run.folder.name)
            sizes.append(size)
    document = {"removed": names, "bytes": sum(sizes)}
    last = f"{plural(len(names), 'run')} removed, {bytes_text(sum(sizes))}"
    text = [*(f"removed {name}" for name in names), last]
    give_out(document, as_json=settings.json, text=text)
    if ids and busy:
        raise busy[0]
