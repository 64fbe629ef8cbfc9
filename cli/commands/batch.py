"""``tpuport batch``: the requests of a file, on one machine or on many slices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from tpuport.cli.asked.environment import (
    BATCHES,
    cache_folder,
    check_cache,
    prepare,
    running,
)
from tpuport.cli.asked.options import command, flag
from tpuport.cli.asked.settings import Settings
from tpuport.cli.batches.cluster import Slice, slice_of
from tpuport.cli.batches.driver import Batch
from tpuport.cli.batches.folder import BatchFolder
from tpuport.cli.batches.local import Replicas, this_process
from tpuport.cli.batches.ray_replicas import ray_replicas
from tpuport.cli.batches.requests import text_of
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import check_report, give_out, say
from tpuport.core.files.stores import from_anywhere, local_of
from tpuport.core.run.progress import Display
from tpuport.core.spec import kinds
from tpuport.core.spec.run_settings import read_value
from tpuport.errors import UsageError


@command(
    "batch",
    requests=typer.Argument(
        metavar="FILE|-",
        help="JSON lines, here or in a store: a request each, of the flags below.",
    ),
    out=flag("--out FOLDER", "Where the videos go, here or in a store; required."),
    ray=flag("--ray ADDRESS|local", "A Ray cluster; local starts one here."),
    replicas=flag(
        "--replicas N",
        "Replicas on the cluster. (default: all its slices, or one CPU)",
        min=1,
    ),
    topology=flag("--topology NAME", "The slice of each replica, such as v6e-8."),
)
def batch(
    settings: Settings,
    requests: str,
    out: str | None = None,
    ray: str | None = None,
    replicas: int | None = None,
    topology: str | None = None,
) -> None:
    """Make the videos of a file of requests.

    A line is a JSON object whose keys are flags of `generate`, and maybe an `id`. The
    flags here are for all lines that say nothing else. Run again, it goes on. With
    --batch-size, requests that are alike but for prompt and seed share a call.

    Example: tpuport batch prompts.jsonl --out videos/ --mesh dp=8 --batch-size 8
    """
    prepare(debug=settings.debug)
    started = time.perf_counter()
    file = None if requests == "-" else read_value(kinds.any_path, requests, "FILE")
    if not settings.out:
        raise UsageError(
            "--out is missing; name the folder for the videos, such as --out videos"
        )
    place = read_value(kinds.any_path, settings.out, "--out")
    if isinstance(place, Path):
        folder = BatchFolder(place.absolute())
    else:
        cache = cache_folder(settings.cache_dir)
        folder = BatchFolder(place, local_of(place, cache / BATCHES))
    read = [file] if isinstance(file, Path) else []
    if settings.report is not None:
        check_report(settings.report, read)
        if from_anywhere(str(settings.report)).startswith(f"{folder.path}/"):
            raise UsageError(
                "--report: is in the folder of the batch; put it elsewhere"
            )
    found = slice_of(ray, replicas, topology)
    text = text_of(file)  # refused before there is a folder
    name = "the standard input" if file is None else str(file)
    below = replace(settings, report=None, read_from=(*settings.read_from, *read))
    with folder.held():
        made, count = Batch.read(text, name, folder, below), 0
        try:
            if made.left:
                given = (settings, ray, replicas, found)
                with _replicas(*given) as (display, those, count):
                    made.run(those, display)
        except BaseException as error:
            if not isinstance(error, UsageError):
                error.add_note(f"{made.told()}. Go on with the same command")
            raise
        document = made.document(started, count)
    give_out(document, as_json=settings.json, report=settings.report)
    say(f"{made.told()}; see {folder.errors if made.failed else folder.results}")
    if made.failed:
        raise typer.Exit(1)


@contextlib.contextmanager
def _replicas(
    settings: Settings, ray: str | None, count: int | None, where: Slice
) -> Iterator[tuple[Display, Replicas, int]]:
    """What shows the batch, what makes the videos, and how many of these there are."""
    if ray is None:
        with running(settings) as display, this_process(display) as here:
            yield display, here, 1
        return
    check_cache(settings)
    with Display(signals.check) as display:
        given: Any = (ray, count, where, display)
        with ray_replicas(*given, debug=settings.debug) as (those, number):
            yield display, those, number
