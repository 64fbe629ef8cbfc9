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
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from tpuport.core.enums import StageName, WeightsOn
from tpuport.core.files.atomic import one_line
from tpuport.core.files.fingerprint import versions
from tpuport.core.files.sealed_json import write_document
from tpuport.core.mesh.compiler_flags import GATHERS
from tpuport.core.programs.executable_files import Entry, load, read_entry
from tpuport.core.programs.folder_place import (
    MANIFEST,
    MANIFEST_SCHEMA,
    REMEDY,
    Manifest,
    read_manifest,
)
from tpuport.core.programs.jax_cache import XLA_FOLDER, persistent_cache
from tpuport.core.programs.program_key import (
    ARITHMETIC,
    WHOLE,
    ProgramKey,
    config_of,
    device_fields,
    differences,
)
from tpuport.core.reports import Reporter, plural
from tpuport.errors import ArtifactError, in_one_line

#: Whose flags of the compiler a program may have.
_STAGES = (
    (StageName.DENOISE,),
    (StageName.DENOISE, GATHERS),
    (StageName.DECODE,),
    (StageName.DECODE, GATHERS),
)
_AGAIN = "compile again with `tpuport compile`, or leave --executables out"


@dataclass(frozen=True, kw_only=True)
class BuiltFolder:
    """A folder of executables, read.

    Attributes:
        folder: where it is.
        manifest: what ``manifest.json`` says.
        entries: one per program it names.
        reporter: told of programs that are not in it.
    """

    folder: Path
    manifest: Manifest
    entries: tuple[Entry, ...]
    reporter: Reporter

    @classmethod
    def open(cls, folder: Path, reporter: Reporter) -> BuiltFolder:
        """Read the manifest and the header of every executable in it.

        Raises:
            MissingArtifactError: there is no such folder, or no manifest in it.
            ArtifactError: the manifest or an executable is missing or damaged.
        """
        manifest = read_manifest(folder)
        entries = []
        for program in manifest["programs"]:
            path = folder / Path(program["file"]).name
            if not path.is_file():
                raise ArtifactError(f"{path}: is missing; {REMEDY}")
            entries.append(read_entry(path))
        return cls(
            folder=folder, manifest=manifest, entries=tuple(entries), reporter=reporter
        )

    def check(
        self,
        mesh: jax.sharding.Mesh,
        weights_on: WeightsOn = WeightsOn.AUTO,
        **about: Any,
    ) -> None:
        """Refuse a folder for another pipeline, other devices, versions or flags.

        Args:
            weights_on: where the weights of stacked blocks must wait; ``auto`` takes
                what the folder has.
            about: entries of the manifest as they must be.

        Raises:
            ArtifactError: all that differs.
        """
        made = {name: dict(self.manifest).get(name) for name in about}
        found = differences(made, about)
        places = {True: "in the host's memory", False: "on the chip"}
        host = weights_on == WeightsOn.HOST
        if weights_on != WeightsOn.AUTO and host != bool(self.streamed):
            was, wanted = places[not host], places[host]
            found.append(f"weights {was} -> {wanted} (--weights-on)")
        here = [device_fields(mesh, *stages) for stages in _STAGES]
        for entry in self.entries:
            key = entry.key
            fewest = min((replace(key, **n).difference(key) for n in here), key=len)
            found += fewest
        # Keys have as much of Python's version as pickles depend on.
        old, new = (
            {**v, "python": ""} for v in (self.manifest["versions"], versions())
        )
        found += differences(old, new)
        if found:
            raise self.refusal("", found)

    def check_modules(self, components: Mapping[str, Any]) -> None:
        """Refuse a folder for modules of another config.

        Args:
            components: of the pipeline; their weights do not count.

        Raises:
            ArtifactError: all that differs.
        """
        found: list[str] = []
        for key in (entry.key for entry in self.entries):
            if key.component == ARITHMETIC:
                continue
            path = "" if key.program == WHOLE else key.program
            module = components[key.component].get_submodule(path)
            found += replace(key, config=config_of(module)).difference(key)
        if found:
            raise self.refusal("", found)

    @property
    def streamed(self) -> frozenset[str]:
        """Components whose programs take weights from the host's memory."""
        return frozenset(e.key.component for e in self.entries if e.key.streams)

    def find(self, key: ProgramKey) -> Entry | None:
        """The executable of a key; ``None`` if no program is for these arguments.

        Raises:
            ArtifactError: the module was compiled with other weights or another config.
        """
        alike = [e for e in self.entries if e.key.name == key.name]
        for entry in alike:
            if entry.key.digest == key.digest:
                return entry
        differing = [
            replace(
                key, arguments=e.key.arguments, structure=e.key.structure
            ).difference(e.key)
            for e in alike
        ]
        if differing and all(differing):
            raise self.refusal(key.name, min(differing, key=len))
        return None

    def ready(
        self, key: ProgramKey, program: jax.stages.Lowered, mesh: jax.sharding.Mesh
    ) -> tuple[Callable[..., Any], Entry | None]:
        """What runs a program, and the executable if it is one of the folder's.

        Raises:
            ArtifactError: as :meth:`find`, or the file is damaged.
        """
        entry = self.find(key)
        folder = self.folder
        if entry is None:
            self.reporter.say(f"{folder}: {key.name} was not there: compiled")
            self.reporter.compiling(key.component, key.name)
            return program.compile(), None
        try:
            arguments, _ = program.in_avals
            return load(entry, arguments, list(mesh.devices.flat)), entry
        except ArtifactError:
            raise
        except Exception as error:  # what jax raises if the backend refuses it
            self.reporter.say(
                f"{entry.path}: jax cannot load it ({type(error).__name__}: "
                f"{one_line(error)}); going on with jax's own cache"
            )
        self.reporter.compiling(key.component, key.name)
        with persistent_cache(folder / XLA_FOLDER):
            return program.compile(), None

    def refusal(self, name: str, found: Sequence[str]) -> ArtifactError:
        """The error for a folder of another run, with a note for each difference.

        Args:
            name: of the program that differs; empty for the folder.
            found: what differs, in words.
        """
        each = list(dict.fromkeys(found))
        what = f"{self.folder}: {name}" if name else str(self.folder)
        error = ArtifactError(
            f"{what} is not for this run: {plural(len(each), 'difference')} (what it "
            f"was compiled for -> what this run has); {_AGAIN}"
        )
        for words in each:
            error.add_note(f"  {in_one_line(words)}")
        return error


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
        {**one.as_dict(), "seconds": one.seconds, "digest": one.key.digest}
        for one in entries
    ]
    created = datetime.now(UTC).isoformat(timespec="seconds")
    earlier: dict[str, Any] = {"programs": []}
    with contextlib.suppress(ArtifactError):
        earlier = dict(read_manifest(folder))
    here = {entry.key.component for entry in entries}
    others = [p for p in earlier["programs"] if p["component"] not in here]
    # As they come back from a file: tuples are lists there.
    now = json.loads(json.dumps({**about, "versions": versions()}))
    if all(earlier.get(name) == value for name, value in now.items()):
        programs += others
    elif others:
        names = ", ".join(dict.fromkeys(p["component"] for p in others))
        say(f"{folder}: what it held of {names} had other settings: removed")
    content = {**now, "created": created, "programs": programs}
    write_document(folder / MANIFEST, MANIFEST_SCHEMA, content)
    kept = {program["file"] for program in programs}
    for name in {program["file"] for program in earlier["programs"]} - kept:
        if Path(name).name == name:
            (folder / name).unlink(missing_ok=True)
    return content
