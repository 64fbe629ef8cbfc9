"""``run.json``: what was asked for, which weights, and one entry per finished stage."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from tpuport.core.enums import StageName
from tpuport.core.files.sealed_json import read_document, write_document
from tpuport.errors import ArtifactError

RUN_SCHEMA = "tpuport.run"
RUN_FILE = "run.json"

#: The stages in the order they run, and the file each one leaves for the next.
STAGES = tuple(StageName)
STAGE_FILES: dict[str, str] = {
    StageName.ENCODE: "embeddings.safetensors",
    StageName.DENOISE: "latents.safetensors",
}

_START_OVER = "start over in a new folder with `tpuport encode --run-dir NEW_FOLDER`"


def read_run(file: Path) -> dict[str, Any]:
    """The content of a run.json.

    Raises:
        ArtifactError: it is missing, altered, of another schema, or not of the form
            that :class:`~tpuport.core.files.run_directory.RunDirectory` writes.
    """
    run = read_document(file, RUN_SCHEMA, _START_OVER)
    if problem := _malformed(run):
        raise ArtifactError(f"{file}: {problem}; {_START_OVER}")
    return run


def write_run(file: Path, content: Mapping[str, Any]) -> None:
    """Write a run.json.

    Raises:
        ArtifactError: it cannot be written.
    """
    write_document(file, RUN_SCHEMA, content)


def _malformed(run: Mapping[str, Any]) -> str:
    """What a run.json with a good checksum lacks, or ""."""
    top: dict[str, type] = {"model": str, "variant": str, "settings": dict}
    for key, kind in {**top, "weights": dict, "stages": dict}.items():
        if not isinstance(run.get(key), kind):
            return f"has no usable {key}"
    kinds: dict[str, type] = {"file": str, "sha256": str, "bytes": int}
    kinds |= {"inputs": dict, "report": dict}
    for stage, entry in run["stages"].items():
        if not isinstance(entry, dict):
            return f"has no usable entry for the stage {stage}"
        for key, kind in kinds.items():
            if not isinstance(entry.get(key), kind):
                return f"has no usable {key} for the stage {stage}"
        for file in [entry, *entry.get("others", [])]:
            name = PurePosixPath(file["file"])
            # Nothing writes such a name; reading through one could reach any file.
            if name.is_absolute() or ".." in name.parts:
                return f"names a file outside the run directory, {file['file']!r}"
    return ""


def now() -> str:
    """The time in UTC, such as ``2025-01-31T12:00:00Z``."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
