"""Runs without ``--run-dir``: folders in the cache, kept where a run ends early."""

from __future__ import annotations

import contextlib
import functools
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from tpuport.cli.asked.environment import default_cache_dir
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown.errors import may_pass
from tpuport.core.files.folders import check_folder
from tpuport.core.files.run_lock import LOCK_FILE, holder, working_in
from tpuport.core.files.run_record import PIPELINE_SCHEMA, RUN_FILE, tapes_in, told_of
from tpuport.core.files.sealed_json import read_document, write_document
from tpuport.core.files.stores import from_anywhere, place
from tpuport.core.files.typed import checked
from tpuport.errors import ArtifactError, TpuportError, UsageError, in_one_line

#: Beside run.json: where the videos go.
_ASKED_FILE, _ASKED = "asked.json", "tpuport.asked"
#: Beside run.json: the error that ended the run and would end the run again.
_FAILED_FILE = "failed.txt"


class Asked(TypedDict):
    """The content of ``asked.json``."""

    out: str
    overwrite: bool
    report: str | None


@dataclass(frozen=True, kw_only=True)
class KeptRun:
    """A folder of a run without ``--run-dir``.

    Attributes:
        folder: named by the run's id.
        process: the number of the process at work in the folder.
        model, prompts: the class of the pipeline, and what it was asked for; empty
            where run.json cannot be read.
        changed: when the run was last kept, in seconds since the epoch.
    """

    folder: Path
    process: int | None
    model: str
    prompts: tuple[str, ...]
    changed: float

    @functools.cached_property
    def finished(self) -> tuple[str, ...]:
        """How far the tape of each video is; see :func:`told_of`."""
        return tuple(_finished(self.folder))

    @property
    def resumable(self) -> bool:
        """Whether ``tpuport resume`` can go on with the run."""
        try:
            _read_asked(self.folder)
        except ArtifactError:
            return False
        return bool(self.finished)

    @property
    def failed(self) -> str:
        """The error that would end the run again; empty where there was none."""
        try:
            return (self.folder / _FAILED_FILE).read_text(errors="replace")
        except OSError:
            return ""

    @property
    def bytes(self) -> int:
        """Bytes on disk."""
        total = 0
        for path in self.folder.rglob("*"):
            with contextlib.suppress(OSError):  # removed meanwhile
                total += path.stat().st_size if path.is_file() else 0
        return total

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, for ``--json``."""
        return {
            "id": self.folder.name,
            "folder": str(self.folder),
            "model": self.model,
            "prompts": list(self.prompts),
            "finished": list(self.finished),
            "resumable": self.resumable,
            "failed": self.failed,
            "age_seconds": round(time.time() - self.changed),
            "bytes": self.bytes,
            "process": self.process,
        }


def kept_runs(cache: Path) -> list[KeptRun]:
    """The runs in a cache folder, the oldest first."""
    check_folder("--cache-dir", cache / "runs")
    found = []
    for folder in (cache / "runs").glob("*"):
        # Its own process may remove a run while another one looks.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found.append(look(folder))
    return sorted(found, key=lambda run: run.changed)


def kept_run(cache: Path, name: str) -> KeptRun:
    for run in kept_runs(cache):
        if run.folder.name == name:
            return run
    raise UsageError(f"no run {name!r} is kept in {cache}; `tpuport runs` lists them")


def look(folder: Path) -> KeptRun:
    """The run in a folder, as far as it can be read."""
    process, file = holder(folder), folder / RUN_FILE
    model, prompts = "", ()
    with contextlib.suppress(TpuportError):
        record = read_document(file, PIPELINE_SCHEMA, "")
        model, prompts = record["pipeline"], tuple(record["asked"].get("prompt", ()))
    written = [file if file.exists() else folder, *tapes_in(folder)]
    return KeptRun(
        folder=folder,
        process=process,
        model=model,
        prompts=prompts,
        changed=max(one.stat().st_mtime for one in written),
    )


def _finished(folder: Path) -> list[str]:
    """How far the tape of each video is, as far as tapes can be read."""
    # Maybe called while an error is reported, which must not be replaced.
    with contextlib.suppress(TpuportError):
        return [told_of(tape) for tape in tapes_in(folder)]
    return []


def remove(run: KeptRun) -> None:
    """Remove a kept run.

    Raises:
        ArtifactError: a process is at work in the folder.
    """
    lock = run.folder / LOCK_FILE
    if lock.is_dir():  # which no process can hold
        shutil.rmtree(lock, ignore_errors=True)
    with temporary(run.folder):
        pass


def is_kept(folder: Path) -> bool:
    """Whether a folder is of a run without ``--run-dir``."""
    return (folder / _ASKED_FILE).exists()


@contextlib.contextmanager
def temporary(folder: Path) -> Iterator[Path]:
    """Hold the folder of a run without ``--run-dir`` while the block lasts.

    The folder is then removed, but not after an error if the run can go on. An error
    that will come again before the first step leaves nothing.

    Raises:
        ArtifactError: a process is at work in it.
    """
    with working_in(folder):
        kept = False
        try:
            yield folder
        except BaseException as error:
            kept = is_kept(folder) and _worth_keeping(folder, error)
            raise
        finally:
            if not kept:
                shutil.rmtree(folder, ignore_errors=True)


def _worth_keeping(folder: Path, error: BaseException) -> bool:
    done = _finished(folder)
    stepped = any(one.startswith("step") for one in done)
    return bool(done) and (may_pass(error) or stepped)


def sweep(cache: Path) -> None:
    """Remove what dead processes left, but for runs that have a tape.

    Whether the tape is whole, whoever goes on with the run finds out.
    """
    for run in kept_runs(cache):
        # Without a lock file, a process may just be making the folder.
        left = (run.folder / LOCK_FILE).exists() and run.process is None
        if left and not (tapes_in(run.folder) and is_kept(run.folder)):
            with contextlib.suppress(ArtifactError):  # another process removes them
                remove(run)


def keep_asked(folder: Path, settings: Settings, out: str) -> None:
    """Write beside run.json what :func:`out_of` reads, also after a kill."""
    report = settings.report and from_anywhere(str(settings.report))
    content = {
        "out": from_anywhere(out),
        "overwrite": settings.overwrite,
        "report": report,
    }
    write_document(folder / _ASKED_FILE, _ASKED, content)


def _read_asked(folder: Path) -> Asked:
    """The content of a run's ``asked.json``."""
    file, remedy = folder / _ASKED_FILE, "make the video again"
    return checked(Asked, read_document(file, _ASKED, remedy), file, remedy)


def out_of(run: KeptRun, settings: Settings) -> Settings:
    """Settings with the place that a kept run's videos were to go."""
    if not is_kept(run.folder):
        return settings
    asked = _read_asked(run.folder)
    report = None if asked["report"] is None else place(asked["report"])
    return replace(
        settings,
        out=settings.out or asked["out"],
        overwrite=settings.overwrite or asked["overwrite"],
        report=settings.report or report,
    )


@contextlib.contextmanager
def going_on(folder: Path) -> Iterator[None]:
    """Add to an error what is finished and, if the error can pass, how to go on.

    For a run without ``--run-dir``, an error that will come again is kept too.
    """
    alone = (folder / _ASKED_FILE).exists()
    if alone:
        (folder / _FAILED_FILE).unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        done, again = _finished(folder), may_pass(error)
        if done and (again or (alone and _worth_keeping(folder, error))):
            kept = f"finished: {', '.join(done)}; kept in {folder}"
            how = _resume_command(folder) if alone else "the same command"
            if not alone and tapes_in(folder):
                how += f", or tpuport resume {shlex.quote(str(folder))}"
            error.add_note(kept + (f". Go on with: {how}" if again else ""))
        elif again:
            error.add_note("nothing was kept; run the same command again")
        if alone and done and not again:
            with contextlib.suppress(OSError):  # the error itself must be told
                text = in_one_line(error) or type(error).__name__
                (folder / _FAILED_FILE).write_bytes(text.encode(errors="replace"))
        raise


def _resume_command(folder: Path) -> str:
    words = ["tpuport", "resume", folder.name]
    cache = folder.parent.parent
    if cache != default_cache_dir():
        words += ["--cache-dir", str(cache)]
    return shlex.join(words)
