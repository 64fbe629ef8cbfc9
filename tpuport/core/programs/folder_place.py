"""Whether ``tpuport compile`` may write to a folder, told before any import."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tpuport.core.files.folders import check_own_folder

SUFFIX = ".executable"
MANIFEST = "manifest.json"
MANIFEST_SCHEMA = "tpuport.executables"


def check_place(folder: Path) -> None:
    """Refuse a folder in which there is anything that no folder of executables has.

    Raises:
        UsageError: what is there, or why the folder cannot be written to.
    """
    check_own_folder("--out", folder, _is_own, "`tpuport compile` did not make")


def _is_own(path: Path) -> bool:
    if path.name == MANIFEST:
        with contextlib.suppress(ValueError, OSError):
            return MANIFEST_SCHEMA in path.read_text("utf-8")
    return path.suffix == SUFFIX
