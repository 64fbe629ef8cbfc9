"""``run.json``: what was asked for, which weights, and one entry per finished stage.

Also what is known of the folders of runs without a plugin, and how often a run is kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, NotRequired

from typing_extensions import TypedDict

from tpuport.core.enums import StageName
from tpuport.core.files.sealed_json import read_document
from tpuport.core.files.typed import checked, read_json
from tpuport.errors import ArtifactError, UsageError, quoted

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


# --- runs of a pipeline without a plugin: core/drive/

PIPELINE_SCHEMA = "tpuport.pipeline_run"
TAPE_FILE, TAPE_SCHEMA = "tape.json", "tpuport.tape"


def is_pipeline_run(folder: Path) -> bool:
    """Whether a folder holds a run of a pipeline without a plugin, usable or not."""
    try:
        found = read_json(folder / RUN_FILE, ArtifactError, "")
    except (OSError, ArtifactError):
        return False
    return isinstance(found, dict) and found.get("schema") == PIPELINE_SCHEMA


def tapes_in(folder: Path) -> list[Path]:
    """The tapes in the folder of such a run, one for each video that was begun."""
    found = folder.glob(f"video-*/{TAPE_FILE}")
    return sorted(found, key=lambda tape: (len(tape.parent.name), tape))


def told_of(tape: Path) -> str:
    """How far a tape is: ``"step 12"``, ``"encode"`` or ``"part of encode"``.

    Raises:
        ArtifactError: it is not usable.
    """
    found = read_document(tape, TAPE_SCHEMA, "begin the run again")
    steps = [one["number"] + 1 for one in found["steps"] if one["scheduler"] == 0]
    if found["stepped"]:  # of a copied scheduler too
        return f"step {max(steps, default=found['stepped'])}"
    return "encode" if found["finished"] else "part of encode"


# --- how often a run is kept on disk

_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m)?")


@dataclass(frozen=True, slots=True)
class CheckpointEvery:
    """After so many steps, or so many seconds.

    Attributes:
        steps: 0 where seconds count.
        seconds: of the clock.
    """

    steps: int = 0
    seconds: float = 60.0

    @classmethod
    def parse(cls, text: object) -> CheckpointEvery:
        """``5`` for steps; ``60s`` or ``2m`` for time.

        Raises:
            UsageError: it is neither.
        """
        if isinstance(text, cls):
            return text
        found = _FORM.fullmatch(str(text).strip())
        number = float(found[1]) if found else 0.0
        if found is None or not number or (found[2] is None and number % 1):
            raise UsageError(
                f"{quoted(text)} is no interval of checkpoints; give a number of steps "
                "such as 5, or a time such as 60s or 2m"
            )
        if found[2] is None:
            return cls(steps=int(number))
        return cls(seconds=number * (60 if found[2] == "m" else 1))

    def due(self, steps: int, seconds: float) -> bool:
        """Whether a checkpoint is due after so many steps and seconds."""
        return steps >= self.steps if self.steps else seconds >= self.seconds

    def __str__(self) -> str:
        return str(self.steps) if self.steps else f"{self.seconds:g}s"
