"""Writing a file whole or not at all.

A file appears under its name whole or not at all, so that what is killed half way
leaves the previous state.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpuport.errors import ArtifactError, UsageError


@contextlib.contextmanager
def replacing(path: Path, suffix: str = ".tmp") -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place when the block succeeds.

    The block fills the file, or replaces it, and closes it. It is then flushed to disk,
    renamed over ``path``, and the rename itself is flushed. When the block or any of
    those steps fails, the temporary file is removed and ``path`` is what it was before.

    Args:
        path: the final name; its folder must exist.
        suffix: of the temporary name, for writers that choose a format by it.

    Raises:
        OSError: whatever the file system raised; callers turn it into their own error.
    """
    # Not made from the target's name, which may already be as long as names can be.
    temporary = path.parent / f".tpuport-{secrets.token_hex(8)}{suffix}"
    try:
        # Made here for its mode: the umask decides, as for any file a user makes.
        # safetensors replaces it by a file that only the owner may read.
        with temporary.open("xb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Flush the names in ``folder``, where the file system can."""
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
    """Write ``data`` to ``path``, whole or not at all.

    Raises:
        ArtifactError: the file cannot be written; what was there before still is.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise cannot_write(path, error) from error


def atomic_write_json(path: Path, data: Any) -> None:
    """Write ``data`` to ``path`` as indented JSON, whole or not at all.

    Raises:
        UsageError: ``data`` is not JSON (NaN and infinity are not).
        ArtifactError: the file cannot be written.
    """
    try:
        text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
        encoded = text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be written as JSON: {error}") from error
    atomic_write_bytes(path, encoded + b"\n")


def cannot_write(path: Path, error: Exception) -> ArtifactError:
    """The error for a file that could not be written, in one line."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return ArtifactError(f"{path}: cannot be written: {one_line(reason)}")


def one_line(text: object) -> str:
    """``text`` with every line break and run of blanks made one space."""
    return " ".join(str(text).split())
