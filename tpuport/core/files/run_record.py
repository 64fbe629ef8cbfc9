"""``run.json``: what was asked for, which weights, and one entry per finished stage."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, NotRequired

from typing_extensions import TypedDict

from tpuport.core.enums import StageName
from tpuport.core.files.sealed_json import read_document
from tpuport.core.files.typed import checked
from tpuport.errors import ArtifactError

RUN_SCHEMA = "tpuport.run"
RUN_FILE = "run.json"

#: The stages in the order they run, and the file each one leaves for the next.
STAGES = tuple(StageName)
STAGE_FILES: dict[str, str] = {
    StageName.ENCODE: "embeddings.safetensors",
    StageName.DENOISE: "latents.safetensors",
}

START_OVER = "start over in a new folder with `tpuport encode --run-dir NEW_FOLDER`"


class FileEntry(TypedDict):
    """A file of a run; one outside the folder is not checked later."""

    file: str
    sha256: str
    bytes: int
    outside: NotRequired[bool]


class StageEntry(FileEntry):
    """A finished stage: its file, and the sha256 of each file it was made from."""

    tensors: dict[str, Any]
    others: NotRequired[list[FileEntry]]
    inputs: dict[str, str]
    finished: str
    report: dict[str, Any]


class Run(TypedDict):
    """A run.json, without its envelope.

    ``weights`` are fingerprints by component, ``made`` the sha256 of each file of
    tensors that the run has written, also of those that no stage uses any more.
    """

    tpuport_version: str
    created: str
    model: str
    variant: str
    settings: dict[str, Any]
    weights: dict[str, str | None]
    stages: dict[str, StageEntry]
    made: list[str]


def read_run(file: Path) -> Run:
    """The content of a run.json.

    Raises:
        ArtifactError: it is missing, altered, of another schema, or not of the form
            that :class:`~tpuport.core.files.run_directory.RunDirectory` writes.
    """
    run = checked(Run, read_document(file, RUN_SCHEMA, START_OVER), file, START_OVER)
    for stage, entry in run["stages"].items():
        for made in [entry, *entry.get("others", [])]:
            name = PurePosixPath(made["file"])
            # Nothing writes such a name; reading through one could reach any file.
            if name.is_absolute() or ".." in name.parts:
                raise ArtifactError(
                    f"{file}: stages.{stage}.file names a file outside the run "
                    f"directory, {made['file']!r}; {START_OVER}"
                )
    return run


def now() -> str:
    """The time in UTC, such as ``2025-01-31T12:00:00Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
