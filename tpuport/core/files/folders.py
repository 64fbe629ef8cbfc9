"""Folders: whether one can be written to, and those that are made once and kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tpuport.core.files.atomic import TEMPORARY, cannot_write, new_folder
from tpuport.core.files.fingerprint import fingerprint_files
from tpuport.core.files.typed import read_json
from tpuport.errors import ArtifactError, TpuportError, UsageError, WeightsError

#: What lies in a folder that was made to its end.
_SEAL = "tpuport-demo.json"


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


def made_once(
    folder: Path, make: Callable[[Path], None], what: str, say: Callable[[str], None]
) -> None:
    """Have ``make`` fill ``folder``, unless it did and nothing is damaged since.

    Args:
        make: takes an empty folder.
        what: for ``say``, which is told when the folder is made.

    Raises:
        WeightsError: the folder cannot be written.
    """
    if not _intact(folder):
        say(what)
        _make(make, folder)


def _files(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != _SEAL]


def _intact(folder: Path) -> bool:
    """Whether the folder is there and is what was made: the seal says."""
    try:
        return bool(read_json(folder / _SEAL, ArtifactError, "") == _seal_of(folder))
    except (OSError, TpuportError):
        return False


def _seal_of(folder: Path) -> dict[str, str]:
    return {"fingerprint": fingerprint_files(folder, _files(folder))}


def _make(make: Callable[[Path], None], folder: Path) -> None:
    try:
        with new_folder(folder) as temporary:
            make(temporary)
            (temporary / _SEAL).write_text(json.dumps(_seal_of(temporary)) + "\n")
            if folder.is_dir():
                shutil.rmtree(folder)
    except Exception as error:
        # Another process may have put the same folder there meanwhile.
        if isinstance(error, OSError) and _intact(folder):
            return
        # safetensors and tokenizers write by themselves, with errors of their own.
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        raise WeightsError(
            f"{cannot_write(folder, error)}; --cache-dir names another folder"
        ) from error
