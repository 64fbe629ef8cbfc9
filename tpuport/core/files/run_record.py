"""What is known of the folders of runs, and how often a run is kept in one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tpuport.core.enums import StageName
from tpuport.core.files.sealed_json import read_document
from tpuport.errors import MissingArtifactError, UsageError, quoted

RUN_FILE = "run.json"

#: The stages in the order they run.
STAGES = tuple(StageName)


PIPELINE_SCHEMA = "tpuport.pipeline_run"
TAPE_FILE, TAPE_SCHEMA = "tape.json", "tpuport.tape"


def run_file(folder: Path) -> Path:
    """The ``run.json`` of a run that was begun.

    Raises:
        MissingArtifactError: there is none.
    """
    file = folder / RUN_FILE
    if not file.exists():
        raise MissingArtifactError(
            f"{folder}: no run was begun here; begin one with `tpuport encode` or "
            "`tpuport generate`, and --run-dir"
        )
    return file


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
