"""The folder of a run of a pipeline: what was asked for, and a tape for each video.

``run.json`` says what the run is of; ``video-0``, ``video-1`` and so on hold the tapes.
The folder can be copied to another machine between two stages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from tpuport.core.drive.tape_folder import TapeFolder
from tpuport.core.enums import StageName
from tpuport.core.files.atomic import cannot_write
from tpuport.core.files.run_record import (
    PIPELINE_SCHEMA,
    RUN_FILE,
    STAGES,
    run_file,
)
from tpuport.core.files.sealed_json import read_document, write_document
from tpuport.core.files.settings_diff import differences
from tpuport.core.files.typed import checked
from tpuport.errors import ArtifactError

_REMEDY = "begin the run again in another folder"
#: Differences that a message names: it is one line.
_NAMED = 3


class Record(TypedDict):
    """The content of ``run.json``.

    ``source`` is where the weights were, ``weights`` are fingerprints by component,
    ``inputs`` digests of images and videos by file, ``out`` where the videos go; empty
    for the run's folder.
    """

    pipeline: str
    source: str
    weights: dict[str, str]
    asked: dict[str, Any]
    inputs: dict[str, str]
    versions: dict[str, str | None]
    videos: int
    out: str


class PipelineRun:
    """A run's folder, whose ``run.json`` has been read.

    Use :meth:`open` or :meth:`open_or_begin`.
    """

    def __init__(self, path: Path, record: Record) -> None:
        self.path, self.record = path, record
        self.tapes = [
            TapeFolder(path / f"video-{number}") for number in range(record["videos"])
        ]

    @classmethod
    def open(cls, path: Path) -> PipelineRun:
        """A run that was begun.

        Raises:
            MissingArtifactError: there is none.
            ArtifactError: ``run.json`` is not usable.
        """
        file = run_file(path)
        found = read_document(file, PIPELINE_SCHEMA, _REMEDY)
        return cls(path, checked(Record, found, file, _REMEDY))

    @classmethod
    def open_or_begin(cls, path: Path, record: Record) -> PipelineRun:
        """The run in a folder, which is made where it is not there.

        Raises:
            ArtifactError: the folder's run is another one, or is not usable.
            WriteError: the folder cannot be written.
        """
        if (path / RUN_FILE).exists():
            run = cls.open(path)
            run.check(record)
            return run
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(path, error) from error
        run = cls(path, record)
        run._write()
        return run

    def check(self, record: Record) -> None:
        """Refuse to go on with other weights, settings, files or versions.

        Weights that are not here are not compared. Weights that were not there when the
        run was begun are recorded.

        Raises:
            ArtifactError: what differs.
        """
        found: dict[str, Any] = dict(self.record)
        now: dict[str, Any] = {**record, "source": found["source"], "out": found["out"]}
        weights = {**now["weights"], **found["weights"]}
        found["weights"], now["weights"] = weights, {**weights, **now["weights"]}
        different = differences(found, now)
        if different:
            if left := len(different[_NAMED:]):
                different = [*different[:_NAMED], f"{left} more"]
            raise ArtifactError(
                f"{self.path / RUN_FILE}: is of another run: {'; '.join(different)}; "
                "ask for what the run was begun with, or use another folder"
            )
        if found["weights"] != self.record["weights"]:
            self.record["weights"] = found["weights"]
            self._write()

    def _write(self) -> None:
        write_document(self.path / RUN_FILE, PIPELINE_SCHEMA, self.record)

    @property
    def how(self) -> dict[str, Any]:
        """How the stage under way is run; empty where none was begun."""
        found: dict[str, Any] = {}
        for tape in self.tapes:
            if tape.read().finished != StageName.DENOISE:
                found |= tape.how
        return found

    @property
    def begun(self) -> bool:
        """Whether there is something to go on from."""
        return any(tape.file.exists() for tape in self.tapes)

    def finished(self, stage: StageName) -> bool:
        """Whether a stage of every video is over.

        Raises:
            ArtifactError: a tape is not usable.
        """
        over = [tape.read().finished for tape in self.tapes]
        return all(one and STAGES.index(one) >= STAGES.index(stage) for one in over)

    def check_finished(self, stage: StageName) -> None:
        """Refuse a stage whose stage before is not finished.

        Raises:
            ArtifactError: what to run first.
        """
        if self.finished(stage):
            return
        raise ArtifactError(
            f"{self.path}: the stage {stage} is not finished; run `tpuport {stage} "
            f"--run-dir {self.path}` first"
        )
