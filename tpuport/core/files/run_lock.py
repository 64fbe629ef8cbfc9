"""A run directory is worked on by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tpuport.core.files.atomic import cannot_write, missing, remove_empty
from tpuport.core.files.run_record import RUN_FILE
from tpuport.errors import AtWorkError

#: Locked by the process at work, and holds its number; a dead process locks nothing.
LOCK_FILE = ".lock"

#: Seconds in which another process may only be looking.
_PATIENCE = 0.2

#: What file systems without locks say; there, nothing is held.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def holder(folder: Path) -> int | None:
    """The number of the process that works on a run directory; 0 if it is not known."""
    try:
        # NFS locks only what may be written.
        with (folder / LOCK_FILE).open("r+") as file:
            if _locked(file, fcntl.LOCK_SH):
                return None
            text = file.read(20)
            return int(text) if text.isdecimal() else 0
    except OSError:
        return None


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[Path]:
    """Hold a run directory, made where it is not there, while the block lasts.

    A folder in which no run was begun is left as it was.

    Raises:
        AtWorkError: another process works on it.
        ArtifactError: it cannot be made or written.
    """
    new = missing(folder)
    try:
        with _take(folder) as file:
            try:
                _sign(file, folder)
                yield folder
            finally:
                if not (folder / RUN_FILE).exists():
                    (folder / LOCK_FILE).unlink(missing_ok=True)
    finally:
        # After the file is closed: NFS keeps a name for a file that is open.
        remove_empty(new)


def _take(folder: Path) -> IO[str]:
    """The lock file, locked until it is closed.

    Whoever held it before may have removed the file, or the folder, meanwhile.
    """
    lock, until = folder / LOCK_FILE, time.monotonic() + _PATIENCE
    while True:
        with contextlib.ExitStack() as closing:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = closing.enter_context(lock.open("a+"))
                # The path may name another file than the open one by now.
                if _locked(file, fcntl.LOCK_EX) and os.path.samestat(
                    os.fstat(file.fileno()), lock.stat()
                ):
                    closing.pop_all()
                    return file
            except FileNotFoundError:
                pass
            except OSError as error:
                raise cannot_write(lock, error) from error
        if time.monotonic() > until:
            number = holder(folder)
            who = f"process {number}" if number else "another process"
            raise AtWorkError(
                f"{folder}: {who} is at work in this folder; wait until it has "
                "ended, or name another folder"
            )
        time.sleep(_PATIENCE / 10)


def _sign(file: IO[str], folder: Path) -> None:
    try:
        file.truncate(0)
        # Not by the file's buffer, which its close would write once more.
        os.write(file.fileno(), str(os.getpid()).encode())
    except OSError as error:
        raise cannot_write(folder / LOCK_FILE, error) from error


def _locked(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return error.errno in _WITHOUT_LOCKS
    return True
