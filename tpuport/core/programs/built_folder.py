"""The folder that ``tpuport compile`` writes and ``generate --executables`` reads.

The folder holds the executables of a run, their manifest, and in ``xla`` the entries of
jax's own compile cache for these programs. jax may refuse to load an executable that
was built without the chip. The entries then spare the compile, if jax computes an equal
key on the machine with the chips.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from tpuport.core.enums import Tiling
from tpuport.core.files.sealed_json import read_document, write_document
from tpuport.core.files.typed import checked
from tpuport.core.programs.components import Components
from tpuport.core.programs.executable_files import (
    Entry,
    read_entry,
    read_payload,
)
from tpuport.core.programs.folder_place import MANIFEST, MANIFEST_SCHEMA
from tpuport.core.programs.key_differences import request_differences
from tpuport.core.programs.program_key import (
    ProgramKey,
    cache_method,
    context_of,
    session_fields,
    settings_fields,
)
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.spec.request import Request
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.spec.tiling import Tiled, TilingDecision
from tpuport.errors import ArtifactError, MissingArtifactError

#: Differences that a message names: it is one line.
_NAMED = 3

#: What a manifest says of single stages.
_TILING = "tiling"

_REMEDY = "make the folder with `tpuport compile`"
_AGAIN = "compile again with `tpuport compile`, or leave --executables out"


class ProgramEntry(TypedDict):
    """An executable of a folder."""

    stage: str
    program: str
    file: str
    bytes: int
    seconds: float
    digest: str


class Manifest(TypedDict):
    """What is read of a manifest; the rest is for people."""

    stages: list[str]
    programs: list[ProgramEntry]
    tiling: NotRequired[dict[str, Tiled]]


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
    def open(cls, folder: Path, *, whole: bool = True) -> BuiltFolder:
        """Read the manifest and the header of every executable in it.

        Args:
            whole: also find every executable undamaged.

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
            entry = read_entry(path)
            if whole:
                read_payload(entry)  # its checksum, before an hour is spent on a stage
            entries.append(entry)
        return cls(folder=folder, manifest=manifest, entries=tuple(entries))

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages whose programs are all here."""
        return tuple(self.manifest["stages"])

    def check(self, components: Components) -> None:
        """Refuse a session that the folder is not for; before anything is loaded.

        Shapes are not known yet: :meth:`check_request` and :meth:`find` check them.

        Raises:
            ArtifactError: what differs, by name, with both values.
        """
        self._compare(
            components.port,
            lambda key: session_fields(components, key.stage, key.component),
        )

    def check_settings(self, port: ModelPort, settings: RunSettings) -> None:
        """What :meth:`check` can refuse before a checkpoint or a device is looked for.

        Args:
            port: the form of the model, with its blocks and implementations in place.
            settings: how to run.

        Raises:
            ArtifactError: as :meth:`check`.
        """
        self._compare(port, lambda key: settings_fields(port, key.component, settings))

    def _compare(
        self, port: ModelPort, known: Callable[[ProgramKey], dict[str, Any]]
    ) -> None:
        """Refuse a folder with a key whose known fields are others now."""
        for entry in self.entries:
            if entry.key.component not in port.components:
                words = f"model {entry.key.model} -> {port.name}"
                raise self.refusal(entry.key.name, (words,))
            now = known(entry.key)
            options = {**entry.key.options, **now.pop("options")}
            found = replace(entry.key, **now, options=options).difference(entry.key)
            if found:
                raise self.refusal(entry.key.name, found)

    def check_request(
        self,
        request: Request,
        port: ModelPort,
        stages: Collection[str],
        tilings: Sequence[TilingDecision] = (),
    ) -> None:
        """Refuse a request of other sizes, guidance, steps or tiles than it is for.

        The programs' own shapes say it too, each when its stage comes; this says it
        before the first one.

        Args:
            port: the model.
            stages: names of those that will run; what others need does not count.
            tilings: how stages will run that have a choice.

        Raises:
            ArtifactError: what differs.
        """
        now = context_of(request, port)
        method = cache_method(request)
        methods: dict[str, ProgramKey] = {}
        for key in (e.key for e in self.entries if e.key.stage in stages):
            before = {**now, **key.context}
            if port.stage(key.stage).batch_rows is None:
                before["guided"] = now["guided"]  # nothing it would see
            else:  # other stages have no steps that could be spared
                methods.setdefault(str(key.options.get("step_cache", "none")), key)
            if found := request_differences(before, now):
                raise self.refusal(key.name, found)
        if methods and method not in methods:
            known = ", ".join(sorted(methods))
            key = next(iter(methods.values()))
            raise self.refusal(key.name, [f"step cache {known} -> {method}"])
        for tiling in tilings:
            setting = self.tiling(tiling.stage)
            if tiling.stage not in self.stages or setting in (None, tiling.setting):
                continue
            words = "untiled -> tiled" if tiling.tiled else "tiled -> untiled"
            raise ArtifactError(
                f"{self.folder}: {tiling.stage} is not for this run (what it was "
                f"compiled for -> what this run has): {words}; use "
                f"--vae-tiling {setting}, {_AGAIN}"
            )

    def tiling(self, stage: str) -> Tiling | None:
        """``"on"`` or ``"off"``: how the programs of a stage here run.

        ``None`` where there are none, or the stage has no such choice.
        """
        built = self.manifest.get("tiling", {}).get(stage)
        if built is None:
            return None
        return Tiling.ON if built["tiled"] else Tiling.OFF

    def find(self, key: ProgramKey) -> Entry | None:
        """The executable of a key; ``None`` where its stage was not compiled.

        Raises:
            ArtifactError: the stage was compiled, for another run; what differs.
        """
        if key.stage not in self.stages:
            return None
        for entry in self.entries:
            if entry.key.digest == key.digest:
                return entry
        alike = [entry for entry in self.entries if entry.key.name == key.name]
        if not alike:
            names = ", ".join(sorted({entry.key.name for entry in self.entries}))
            raise ArtifactError(
                f"{self.folder}: holds no {key.name}, which this run needs; it holds "
                f"{names}; {_AGAIN}"
            )
        differences = [key.difference(entry.key) for entry in alike]
        raise self.refusal(key.name, min(differences, key=len))

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
    stages: Sequence[str],
    about: Mapping[str, Any],
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write the manifest of a folder; returns what it says.

    Other stages of an earlier manifest stay in it where it is of the same model,
    topology and settings; executables that are no longer in it are removed.

    Args:
        stages: whose programs are all among the entries.
        about: model, topology and settings, for people.
        say: told what is removed of other stages.
    """
    programs = [
        {
            "stage": entry.key.stage,
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
        "stages": list(stages),
        "programs": programs,
    }
    earlier: dict[str, Any] = {"programs": [], "stages": []}
    with contextlib.suppress(ArtifactError):
        earlier = dict(_manifest(folder))
    others = [stage for stage in earlier["stages"] if stage not in stages]
    # As they come back from a file: tuples are lists there.
    now = json.loads(json.dumps({k: v for k, v in about.items() if k != _TILING}))
    if others and all(earlier.get(name) == value for name, value in now.items()):
        content["stages"] = [*others, *stages]
        programs += [p for p in earlier["programs"] if p["stage"] in others]
        if _TILING in about:
            content[_TILING] = {**earlier.get(_TILING, {}), **about[_TILING]}
    elif others:
        say(
            f"{folder}: what it held of {', '.join(others)} had other settings: removed"
        )
    write_document(folder / MANIFEST, MANIFEST_SCHEMA, content)
    kept = {program["file"] for program in programs}
    for name in {program["file"] for program in earlier["programs"]} - kept:
        if Path(name).name == name:
            (folder / name).unlink(missing_ok=True)
    return content
