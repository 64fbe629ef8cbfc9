"""Folders that are made once and kept: small checkpoints, in the cache folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tpuport.core.files.atomic import cannot_write, new_folder
from tpuport.core.files.fingerprint import fingerprint_files
from tpuport.core.files.typed import read_json
from tpuport.errors import ArtifactError, TpuportError, WeightsError

#: What lies in a folder that was made to its end.
_SEAL = "tpuport-demo.json"


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
