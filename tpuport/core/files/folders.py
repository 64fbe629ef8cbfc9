"""Folders to write to: whether there can be one, before anything is done."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tpuport.core.files.atomic import TEMPORARY
from tpuport.errors import UsageError


def check_folder(flag: str, folder: Path) -> None:
    """Refuse a folder to write to that cannot be one; creates nothing.

    Raises:
        UsageError: it is a file, a file is in its way, or it may not be written.
    """
    for path in (folder, *folder.absolute().parents):
        if path.exists():
            if not path.is_dir():
                raise UsageError(
                    f"{flag} {folder}: {path} is not a folder; move it away, or name "
                    f"another place with {flag}"
                )
            if not os.access(path, os.W_OK | os.X_OK):
                raise UsageError(f"{flag} {folder}: {path} may not be written")
            return


def check_own_folder(
    flag: str, folder: Path, own: Callable[[Path], bool], what: str
) -> None:
    """Refuse a folder to write to in which there is anything of others.

    Args:
        own: whether a path in the folder is of an earlier run.
        what: the others are, in words.

    Raises:
        UsageError: what is there, or as :func:`check_folder`.
    """
    check_folder(flag, folder)
    for path in sorted(folder.glob("*")):
        if not (path.name.startswith(TEMPORARY) or own(path)):
            raise UsageError(
                f"{flag} {folder}: holds {path.name}, which {what}; name another folder"
            )
