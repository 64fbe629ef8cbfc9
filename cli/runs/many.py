"""Many requests in one process: a pipeline stays open as long as it is the same."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tpuport.cli.asked.first import count_of
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.staged import alike, begun
from tpuport.cli.runs.variants import with_model
from tpuport.cli.runs.video_run import VideoRun, Wanted, find
from tpuport.core.drive.run_in_store import RunInStore
from tpuport.core.files.run_lock import holder
from tpuport.core.files.stores import StorePath
from tpuport.core.mesh.hosts import here
from tpuport.core.reports import Reporter, RunReport
from tpuport.core.spec.run_settings import RunSettings
from tpuport.errors import ArtifactError, AtWorkError, TpuportError, WriteError

#: Seconds in which a process that lost its driver ends.
_ORPHAN = 60.0


class Stopped(TpuportError):
    """A reporter ends a run that nobody wants any more."""


class Engine:
    """Makes the videos of one request after the other.

    Weights are loaded once for each pipeline, and programs are compiled once for each
    shape. A request that fails closes the pipeline: nothing of it reaches the next one.
    One that is :class:`Stopped` does not: every call begins with what is its own.

    Args:
        reporter: told of what is loaded and compiled.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._open: VideoRun | None = None
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the pipeline."""
        self._open = None
        self._closing.close()

    def make_pack(
        self,
        requests: Sequence[tuple[Settings, str]],
        folder: Path,
        previews: Sequence[Path] = (),
        plain: bool = False,
        kept_in: StorePath | None = None,
    ) -> RunReport:
        """Make the videos of several requests in one call, or go on with the call.

        Args:
            requests: the settings, with the place of the videos, and the digest of
                each. The settings differ in prompts, negative prompts, seeds and
                places alone; each has a prompt, and all or none a negative one.
            folder: the run directory, which is removed when all videos are there. The
                videos of a request appear together, those of the first request first.
            previews: a file of each video for its frames while steps run, which may
                share some; empty for none.
            plain: whether frames of one colour will do.
            kept_in: a folder of a store that keeps the checkpoints too.
        """
        in_store = None
        if here().first:
            _wait_for(folder)
            if kept_in is not None:
                in_store = RunInStore(folder, kept_in)
                if holder(folder) is None:
                    in_store.fetch()

        def made() -> RunReport:
            return self._made(requests, folder, previews, plain, in_store)

        try:
            report = made()
        except (WriteError, AtWorkError):
            raise
        except ArtifactError:
            # Of other versions, weights or a file that was altered: from the beginning.
            if not folder.exists() or holder(folder) is not None or not here().first:
                raise
            shutil.rmtree(folder)
            if in_store is not None:
                in_store.remove()
            report = made()
        if here().first:
            shutil.rmtree(folder, ignore_errors=True)
        if in_store is not None:
            in_store.remove()
        return report

    def _made(
        self,
        requests: Sequence[tuple[Settings, str]],
        run_dir: Path,
        previews: Sequence[Path],
        plain: bool,
        in_store: RunInStore | None,
    ) -> RunReport:
        started = time.perf_counter()
        named = [(with_model(settings), digest) for settings, digest in requests]
        wanted = _wanted(named) if len(named) > 1 else ()
        settings = replace(_together(named[0][0], wanted), run_dir=run_dir)
        folder = find(settings, self._reporter)
        run = VideoRun.prepared(settings, folder, self._reporter, wanted=wanted)
        run.request, run.previews, run.plain = named[0][1], tuple(previews), plain
        run.in_store = in_store
        outputs = []
        if here().first:
            outputs = [run.outputs_of(asked, count_of(asked)) for asked, _ in named]
        self._take(run)
        out = outputs[0].asked if outputs and not wanted else ""
        with begun(run, out) as kept:
            here().same(alike(run))
            run.kept = kept
            try:
                return run.make_open(outputs, started)[1]
            except Stopped:
                raise
            except BaseException:
                self.close()
                raise

    def _take(self, run: VideoRun) -> None:
        """Have the pipeline of a run open."""
        if self._open is None or _opened_with(run) != _opened_with(self._open):
            self.close()
            self._closing.enter_context(run.opened())
            self._open = run
            return
        other = self._open
        run.folder = other.folder  # whose fingerprints are known
        for name in ("pipeline", "journal", "load", "caches", "inspection", "blocks"):
            setattr(run, name, getattr(other, name))
        run.journal.reporter = run.reporter


def _wanted(requests: Sequence[tuple[Settings, str]]) -> tuple[Wanted, ...]:
    """The videos of several requests."""
    return tuple(
        Wanted(prompt, settings.negative_prompt, seed, digest)
        for settings, digest in requests
        for prompt in settings.prompt
        for seed in settings.seed
    )


def _together(settings: Settings, wanted: Sequence[Wanted]) -> Settings:
    """The settings of one call that makes these videos; without any, as they are."""
    if not wanted:
        return settings
    return replace(
        settings,
        prompt=tuple(str(video.prompt) for video in wanted),
        seed=(wanted[0].seed,),
        batch_size=max(settings.batch_size or 1, len(wanted)),
        out=None,
    )


def _opened_with(run: VideoRun) -> tuple[Any, ...]:
    """What a pipeline is opened with, and not given in a call."""
    folder, settings = run.folder, run.settings
    names = [f.name for f in fields(RunSettings)] + ["on_host", "step_cache"]
    return (
        *(folder.folder, folder.index, folder.tiling),
        *(folder.scheduler, folder.scheduler_options),
        [lora.as_dict() for lora in folder.loras],
        folder.guidance if folder.has_guider else None,
        *(run.placed.spec, {name: getattr(settings, name) for name in names}),
    )


def _wait_for(folder: Path) -> None:
    """Wait until a process whose driver was killed has let go of a run directory."""
    until = time.monotonic() + _ORPHAN
    while holder(folder) is not None and time.monotonic() < until:
        time.sleep(0.5)
