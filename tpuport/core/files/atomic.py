"""Writing a file whole or not at all.

A file appears under its name whole or not at all, so that what is killed half way
leaves the previous state. What a killed process leaves beside it has the name of that
process, so that the next one removes the leftovers.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tpuport.errors import UsageError, WriteError

#: How the names of temporary files and folders begin.
TEMPORARY = ".tpuport-"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def temporary_beside(path: Path, suffix: str = "") -> Path:
    """A name for what will take the place of ``path``; nothing is made.

    What dead processes left in the folder is removed, once for each process.
    """
    folder = path.absolute().parent
    _remove_once(folder, os.getpid())
    # Not made from the target's name, which may already be as long as names can be.
    own = f"{machine()}-{os.getpid()}-{began(os.getpid())}"
    return folder / f"{TEMPORARY}{own}-{secrets.token_hex(8)}{suffix}"


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files and folders of dead processes of this host.

    Those of living processes and of other hosts stay, and so does what may not be
    removed. A folder that is not there has none.
    """
    for left in folder.glob(f"{TEMPORARY}*-*-*-*"):
        host, pid, then, _ = left.name.removeprefix(TEMPORARY).split("-", 3)
        if host != machine() or not pid.isdecimal():
            continue
        if began(int(pid)) not in ("", then):
            with contextlib.suppress(OSError):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


@functools.cache
def _remove_once(folder: Path, pid: int) -> None:
    remove_leftovers(folder)


def began(pid: int) -> str | None:
    """When a process began, as digits that no later process of that number has.

    ``None`` for a process that does not live, "" where the system does not tell.
    """
    try:
        with contextlib.suppress(PermissionError):  # it lives, of another user
            os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # no /proc, as on macOS, or a process that it hides
        return ""
    # Z and X: it has ended, and its parent has not looked yet.
    return None if fields[0] in "ZX" else _short(f"{boot}{fields[19]}")


def machine() -> str:
    """This host, or the container that has process numbers of its own."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return _short(socket.gethostname() + space)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block succeeds.

    The block fills the file and closes it. The file is then flushed to disk,
    renamed over ``path``, and the rename itself is flushed. When the block or any of
    those steps fails, the temporary file is removed and ``path`` is what it was before.

    Args:
        path: the final name; its folder must exist.

    Raises:
        OSError: whatever the file system raised; callers turn it into their own error.
    """
    temporary = temporary_beside(path, ".tmp")
    with _passing(temporary):
        try:
            temporary.touch(exist_ok=False)
            yield temporary
            flush(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    _flush_folder(path.parent)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the name ``folder`` when the block succeeds.

    Raises:
        OSError: it cannot be made, or there is something else than an empty folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(folder)
    temporary.mkdir()
    with _passing(temporary):
        try:
            yield temporary
            os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def scratch_folder(
    prefix: str = "tpuport-", place: Path | None = None
) -> Iterator[Path]:
    """An empty folder that goes with the block."""
    with (
        tempfile.TemporaryDirectory(
            prefix=prefix, dir=place, ignore_cleanup_errors=True
        ) as name,
        _passing(Path(name)),
    ):
        yield Path(name)


_unfinished: set[Path] = set()


@contextlib.contextmanager
def _passing(path: Path) -> Iterator[None]:
    """A file or folder goes with :func:`remove_unfinished` in this block."""
    _unfinished.add(path)
    try:
        yield
    finally:
        _unfinished.discard(path)


def remove_unfinished() -> None:
    """Remove what this process, which ends, has begun and not finished: temporary
    files, and folders of :func:`new_folder` and :func:`scratch_folder`."""
    for path in [*_unfinished]:
        with contextlib.suppress(OSError):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def missing(folder: Path) -> list[Path]:
    """A folder and those above it that are not there, the deepest first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders in which nothing was put, in the order given."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def flush(file: Path) -> None:
    """Have the content of ``file`` on disk."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Network and FUSE file systems may not know how to flush a folder; the file's
        # own content is already flushed.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, whole or not at all; into a device or a pipe at once.

    Raises:
        WriteError: the file cannot be written; what was there before still is.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        with replacing(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise cannot_write(path, error) from error


def atomic_write_json(path: Path, data: Any) -> None:
    """Write ``data`` to ``path`` as indented JSON, whole or not at all.

    Raises:
        UsageError: ``data`` is not JSON (NaN and infinity are not).
        WriteError: the file cannot be written.
    """
    atomic_write_bytes(path, json_bytes(path, data))


def json_bytes(path: object, data: Any) -> bytes:
    """``data`` as indented JSON, for ``path``; raises as :func:`atomic_write_json`."""
    try:
        text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
        return text.encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be written as JSON: {error}") from error


def no_room(error: BaseException) -> bool:
    """Whether an error, Python's or a library's own, says that a disk is full."""
    return getattr(error, "errno", None) in _NO_ROOM or any(
        os.strerror(number) in str(error) for number in _NO_ROOM
    )


def cannot_write(path: object, error: BaseException) -> WriteError:
    """The error for a file that could not be written, in one line."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    if no_room(error):
        reason = "no room is left on the disk; make room, or name another place"
    return WriteError(f"{path}: cannot be written: {one_line(reason)}")


def one_line(text: object) -> str:
    """``text`` with every line break and run of blanks made one space."""
    return " ".join(str(text).split())
