"""The folder that ``tpuport compile`` writes and ``generate --executables`` reads.

The folder holds the executables of a run, their manifest, and in ``xla`` the entries of
jax's own compile cache for these programs. jax may refuse to load an executable that
was built without the chip. The entries then spare the compile, if jax computes an equal
key on the machine with the chips.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from tpuport.core.files.sealed_json import read_document, write_document
from tpuport.core.files.typed import checked
from tpuport.core.programs.executable_files import Entry, read_entry
from tpuport.core.programs.folder_place import MANIFEST, MANIFEST_SCHEMA
from tpuport.errors import ArtifactError, MissingArtifactError

#: Differences that a message names: it is one line.
_NAMED = 3

_REMEDY = "make the folder with `tpuport compile`"
_AGAIN = "compile again with `tpuport compile`, or leave --executables out"


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


@dataclass(frozen=True, kw_only=True)
class BuiltFolder:
    """A folder of executables, read.

    Attributes:
        folder: where it is.
        manifest: what ``manifest.json`` says.
        entries: one per program it names.
    """

    folder: Path
    manifest: Manifest
    entries: tuple[Entry, ...]

    @classmethod
    def open(cls, folder: Path) -> BuiltFolder:
        """Read the manifest and the header of every executable in it.

        Raises:
            MissingArtifactError: there is no such folder, or no manifest in it.
            ArtifactError: the manifest or an executable is missing or damaged.
        """
        if not folder.is_dir():
            problem = "is not a folder" if folder.exists() else "does not exist"
            raise MissingArtifactError(
                f"the folder of executables {folder} {problem}; {_REMEDY}"
            )
        manifest = _manifest(folder)
        entries = []
        for program in manifest["programs"]:
            path = folder / Path(program["file"]).name
            if not path.is_file():
                raise ArtifactError(f"{path}: is missing; {_REMEDY}")
            entries.append(read_entry(path))
        return cls(folder=folder, manifest=manifest, entries=tuple(entries))

    def refusal(self, name: str, found: Sequence[str]) -> ArtifactError:
        """The error for a program that is of another run, and what differs."""
        if left := len(found[_NAMED:]):
            found = [*found[:_NAMED], f"{left} more"]
        return ArtifactError(
            f"{self.folder}: {name} is not for this run (what it was compiled for "
            f"-> what this run has): {'; '.join(found)}; {_AGAIN}"
        )


def _manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        ArtifactError: it is missing or not usable.
    """
    file = folder / MANIFEST
    found = read_document(file, MANIFEST_SCHEMA, _REMEDY)
    return checked(Manifest, found, file, _REMEDY, extra="allow")


def write_manifest(
    folder: Path,
    entries: Sequence[Entry],
    about: Mapping[str, Any],
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write the manifest of a folder; returns what it says.

    Other components of an earlier manifest stay in it where it is of the same pipeline,
    topology and settings; executables that are no longer in it are removed.

    Args:
        entries: all programs of their components.
        about: pipeline, topology and settings, for people.
        say: told what is removed of other components.
    """
    programs = [
        {
            "component": entry.key.component,
            "program": entry.key.program,
            "file": entry.path.name,
            "bytes": entry.size,
            "seconds": entry.seconds,
            "digest": entry.key.digest,
        }
        for entry in entries
    ]
    content: dict[str, Any] = {
        **about,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    earlier: dict[str, Any] = {"programs": []}
    with contextlib.suppress(ArtifactError):
        earlier = dict(_manifest(folder))
    here = {entry.key.component for entry in entries}
    others = [p for p in earlier["programs"] if p["component"] not in here]
    # As they come back from a file: tuples are lists there.
    now = json.loads(json.dumps(dict(about)))
    if all(earlier.get(name) == value for name, value in now.items()):
        programs += others
    elif others:
        names = ", ".join(dict.fromkeys(p["component"] for p in others))
        say(f"{folder}: what it held of {names} had other settings: removed")
    content["programs"] = programs
    write_document(folder / MANIFEST, MANIFEST_SCHEMA, content)
    kept = {program["file"] for program in programs}
    for name in {program["file"] for program in earlier["programs"]} - kept:
        if Path(name).name == name:
            (folder / name).unlink(missing_ok=True)
    return content
