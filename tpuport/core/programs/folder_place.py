"""A folder of executables: whether ``tpuport compile`` may write there, its manifest.

Importing this module imports neither torch nor jax.
"""

from __future__ import annotations

import contextlib
import fnmatch
from pathlib import Path

from typing_extensions import TypedDict

from tpuport.core.files.atomic import TEMPORARY
from tpuport.core.files.folders import check_own_folder
from tpuport.core.files.sealed_json import read_document
from tpuport.core.files.stores import AnyPath, StorePath
from tpuport.core.files.typed import checked
from tpuport.errors import MissingArtifactError, UsageError

SUFFIX = ".executable"
MANIFEST = "manifest.json"
#: The files of such a folder.
BUILT = (f"*{SUFFIX}", MANIFEST, "xla/*")
MANIFEST_SCHEMA = "tpuport.executables"
REMEDY = "make the folder with `tpuport compile`"


class ProgramEntry(TypedDict):
    """An executable of a folder."""

    component: str
    program: str
    file: str
    bytes: int
    seconds: float
    digest: str


class Manifest(TypedDict):
    """What is read of a manifest; the rest is for people."""

    programs: list[ProgramEntry]
    versions: dict[str, str | None]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder of executables.

    Raises:
        MissingArtifactError: there is no such folder, or no manifest in it.
        ArtifactError: the manifest is damaged.
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise MissingArtifactError(
            f"the folder of executables {folder} {problem}; {REMEDY}"
        )
    file = folder / MANIFEST
    found = read_document(file, MANIFEST_SCHEMA, REMEDY)
    return checked(Manifest, found, file, REMEDY, extra="allow")


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
