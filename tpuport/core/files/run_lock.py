"""A run directory is worked on by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tpuport.core.files.atomic import cannot_write
from tpuport.core.files.run_record import RUN_FILE
from tpuport.errors import ArtifactError

#: Locked by the process at work, and holds its number; a dead process locks nothing.
LOCK_FILE = ".lock"

#: Seconds in which another process may only be looking.
_LOOKING = 0.2


def check_free(folder: Path) -> None:
    """Refuse a run directory that another process works on; makes nothing.

    Raises:
        ArtifactError: which process does.
    """
    if (folder / LOCK_FILE).exists():
        _take(folder).close()


def holder(folder: Path) -> int | None:
    """The number of the process that works on a run directory."""
    try:
        with (folder / LOCK_FILE).open() as file:
            return None if _locked(file) else int(file.read() or 0)
    except OSError:
        return None


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[Path]:
    """Hold a run directory, made where it is not there, while the block lasts.

    A folder in which no run was begun is left as it was.

    Raises:
        ArtifactError: another process works on it, or it cannot be made or written.
    """
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    with _take(folder) as file:
        try:
            _sign(file, folder)
            yield folder
        finally:
            if not (folder / RUN_FILE).exists():
                (folder / LOCK_FILE).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    if new:
                        folder.rmdir()


def _take(folder: Path) -> IO[str]:
    """The lock file, locked until it is closed."""
    try:
        file = (folder / LOCK_FILE).open("a+")
        until = time.monotonic() + _LOOKING
        while not _locked(file):
            if time.monotonic() > until:
                file.seek(0)
                raise ArtifactError(
                    f"{folder}: process {file.read()} is at work in this run "
                    "directory; wait until it has ended, or use another one"
                )
            time.sleep(_LOOKING / 10)
    except OSError as error:
        raise cannot_write(folder / LOCK_FILE, error) from error
    return file


def _sign(file: IO[str], folder: Path) -> None:
    try:
        file.truncate(0)
        # Not by the file's buffer, which its close would write once more.
        os.write(file.fileno(), str(os.getpid()).encode())
    except OSError as error:
        raise cannot_write(folder / LOCK_FILE, error) from error


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
