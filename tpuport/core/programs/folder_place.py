"""Whether ``tpuport compile`` may write to a folder, told before any import."""

from __future__ import annotations

import contextlib
import fnmatch
from pathlib import Path

from tpuport.core.files.atomic import TEMPORARY
from tpuport.core.files.folders import check_own_folder
from tpuport.core.files.stores import AnyPath, StorePath
from tpuport.errors import UsageError

SUFFIX = ".executable"
MANIFEST = "manifest.json"
#: The files of such a folder.
BUILT = (f"*{SUFFIX}", MANIFEST, "xla/*")
MANIFEST_SCHEMA = "tpuport.executables"


def check_place(folder: AnyPath) -> None:
    """Refuse a folder in which there is anything that no folder of executables has.

    Raises:
        UsageError: what is there, or why the folder cannot be written to.
        StoreError: the store cannot be read or written.
    """
    if isinstance(folder, StorePath):
        folder.check_writable()
        for name in sorted(folder.files()):
            probe = name.rpartition("/")[2].startswith(TEMPORARY)
            if not (probe or any(fnmatch.fnmatch(name, one) for one in BUILT)):
                raise UsageError(
                    f"--out {folder}: holds {name}, which `tpuport compile` did not "
                    "make; name another folder"
                )
        return
    check_own_folder("--out", folder, _is_own, "`tpuport compile` did not make")


def _is_own(path: Path) -> bool:
    if path.name == MANIFEST:
        with contextlib.suppress(ValueError, OSError):
            return MANIFEST_SCHEMA in path.read_text("utf-8")
    return path.suffix == SUFFIX
