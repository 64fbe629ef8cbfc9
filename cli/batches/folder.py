"""The folder of a batch: its videos, what is done, and what failed.

A video counts as done when its sidecar lies beside it, is of the request, and has the
sha256 of the video. So no other file need be right for a batch to go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tpuport.cli.batches.requests import ERRORS, RESULTS, RUNS, Request
from tpuport.core.files.atomic import atomic_write_bytes, cannot_write, remove_empty
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.folders import check_own_folder
from tpuport.core.files.run_lock import LOCK_FILE, holder, working_in
from tpuport.core.files.sealed_json import read_sidecar, sidecar_path
from tpuport.errors import ArtifactError, UsageError


class BatchFolder:
    """Where a batch writes; one process does so at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results, self.errors = path / RESULTS, path / ERRORS

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder, made where it is not there.

        Raises:
            UsageError: there is something else than a batch.
            ArtifactError: another process works in it.
        """
        ours = self.results.exists()
        what = "is of no batch"
        check_own_folder(
            "--out", self.path, lambda p: ours or p.name == LOCK_FILE, what
        )
        with working_in(self.path):
            self._append(self.results, [])
            yield
            self._sweep()
            remove_empty([self.path / RUNS])

    def _sweep(self) -> None:
        """Remove the run directories of packs that nobody goes on with."""
        for path in (self.path / RUNS).glob("+*"):
            if holder(path) is None:
                shutil.rmtree(path, ignore_errors=True)

    def run_dir(self, request: Request) -> Path:
        """The run directory of a request; on a disk that all replicas see."""
        return self.path / RUNS / request.key

    def finished(self, request: Request) -> list[dict[str, Any]] | None:
        """The records of a request whose videos are all there; else ``None``."""
        found = [self._record(request, path) for path in request.paths]
        return None if None in found else found  # type: ignore[return-value]

    def _record(self, request: Request, path: Path) -> dict[str, Any] | None:
        try:
            data = read_sidecar(sidecar_path(path))
            if data.get("batch") != request.digest:
                return None
            if hash_output(path)[0] != data["output"]["sha256"]:
                return None
        except (ArtifactError, OSError):
            return None
        return {
            "line": request.line,
            "key": request.key,
            "file": str(path.relative_to(self.path)),
            "seed": data["request"]["seeds"][0][data["video"]],
            "seconds": data["summary"]["total_seconds"],
            "sha256": data["output"]["sha256"],
            "frames_sha256": data["frames_sha256"],
        }

    def clear(self, request: Request, *, overwrite: bool) -> None:
        """Make room for the videos of a request that is not finished.

        A video without its sidecar is what a killed process left.

        Raises:
            UsageError: a video of something else is there.
        """
        for path in request.paths:
            other = None
            with contextlib.suppress(ArtifactError):
                other = read_sidecar(sidecar_path(path)).get("batch")
            own = other == request.digest or not sidecar_path(path).exists()
            if os.path.lexists(path) and not (own or overwrite):
                raise UsageError(
                    f"{path.name} is there, and of another request; give another id, "
                    "or --overwrite"
                )
            if path.is_dir() and all(p.match("frame-*.png") for p in path.iterdir()):
                sidecar_path(path).unlink(missing_ok=True)
                shutil.rmtree(path)

    def begin(self, done: Sequence[dict[str, Any]], unfinished: set[str]) -> None:
        """Let both files say what is so: the results of videos that are there.

        Args:
            done: the records of finished requests.
            unfinished: the names of videos that are not there yet.
        """
        records = {record["file"]: record for record in self._kept()}
        records = {n: r for n, r in records.items() if n not in unfinished}
        records |= {record["file"]: record for record in done}
        text = "".join(_line(record) for record in records.values())
        if text.encode() != self.results.read_bytes():
            atomic_write_bytes(self.results, text.encode())
        self.errors.unlink(missing_ok=True)

    def _kept(self) -> Iterator[dict[str, Any]]:
        """The records of before; what a kill left of a line is no record."""
        for line in self.results.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("file"), str):
                    yield record

    def done(self, records: Sequence[dict[str, Any]]) -> None:
        """Note the videos of a request."""
        self._append(self.results, records)

    def failed(self, line: int, key: str | None, error: str, tries: int = 1) -> None:
        """Note a request that has no videos, and why."""
        record = {"line": line, "key": key, "error": error, "tries": tries}
        self._append(self.errors, [record])

    def _append(self, file: Path, records: Sequence[dict[str, Any]]) -> None:
        """Add lines in one write, on disk when it returns."""
        try:
            how = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            descriptor = os.open(file, how, 0o666)
            try:
                if records:
                    os.write(descriptor, "".join(map(_line, records)).encode())
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise cannot_write(file, error) from error


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
