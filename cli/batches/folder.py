"""The folder of a batch: its videos, what is done, and what failed.

A video counts as done when its sidecar lies beside it, is of the request, and has the
sha256 of the video, in a store its size. So no other file need be right for a batch to
go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpuport.cli.batches.lease import Lease, leased
from tpuport.cli.batches.requests import ERRORS, RESULTS, RUNS, Request
from tpuport.core.files.atomic import (
    TEMPORARY,
    atomic_write_bytes,
    cannot_write,
    remove_empty,
)
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.folders import check_own_folder
from tpuport.core.files.run_lock import LOCK_FILE, holder, working_in
from tpuport.core.files.sealed_json import read_sidecar, sidecar_path
from tpuport.core.files.stores import AnyPath, StorePath
from tpuport.errors import ArtifactError, AtWorkError, StoreError, UsageError

#: Seconds between two puts of a file of lines.
_SECONDS = 5.0


class BatchFolder:
    """Where a batch writes; one driver does so at a time.

    An object of a store is put whole, and the last one is the sidecar. So a video of
    the right size is the right one. Nothing can be added to an object: both files of
    lines are put anew, every :data:`_SECONDS` seconds and at the end. ``results.jsonl``
    makes the folder a batch's, and is put before anything else is.

    Args:
        path: for the videos.
        local: for runs under way, if the path is in a store.
    """

    def __init__(self, path: AnyPath, local: Path | None = None) -> None:
        self.path = path
        assert isinstance(path, Path) or local is not None
        self._local: Path = local or path  # type: ignore[assignment]
        self.results, self.errors = path / RESULTS, path / ERRORS
        #: Of a store: what the files hold, those not put yet, when some were, and
        #: whether the results are there.
        self._lines: dict[AnyPath, str] = {self.results: "", self.errors: ""}
        self._late: set[AnyPath] = set()
        self._put = time.monotonic()
        self._known = True
        self._lease: Lease | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder, made where it is not there.

        Raises:
            UsageError: there is something else than a batch.
            ArtifactError: another driver works in it.
            StoreError: the store cannot be written.
        """
        self._check_own()
        with contextlib.ExitStack() as holding:
            if isinstance(self.path, StorePath):
                self._lease = holding.enter_context(leased(self.path))
            holding.enter_context(working_in(self._local))
            new = not self.results.exists()
            if isinstance(self.results, Path):
                self._append(self.results, [])
            self._known = self.results.exists()
            try:
                yield
                self._sweep()
            except BaseException:
                # The first error is told.
                with contextlib.suppress(StoreError, AtWorkError):
                    self._put_late()
                remove_empty([self._local / RUNS])
                if new and isinstance(self.results, Path):
                    self._remove_if_empty(self.results)
                raise
            self._put_late()
            remove_empty([self._local / RUNS])

    def _remove_if_empty(self, results: Path) -> None:
        """Remove the file that makes a folder a batch's, if that is all there is."""
        with contextlib.suppress(OSError):
            there = {p.name for p in results.parent.iterdir()} - {LOCK_FILE}
            if there == {RESULTS} and not results.read_bytes():
                results.unlink()

    def check(self) -> None:
        """End where another driver has taken a folder of a store over.

        Raises:
            AtWorkError: so it is.
        """
        if self._lease is not None:
            self._lease.check()

    def used(self) -> None:
        """Make a folder of a store a batch's: videos are about to come."""
        if not self._known:
            self._late.add(self.results)
            self._put_late()

    def _check_own(self) -> None:
        ours, what = self.results.exists(), "is of no batch"
        if isinstance(self.path, Path):
            check_own_folder(
                "--out", self.path, lambda p: ours or p.name == LOCK_FILE, what
            )
            return
        self.path.check_writable()
        for name in () if ours else self.path.files():
            if not name.startswith(TEMPORARY) and name != LOCK_FILE:
                raise UsageError(
                    f"--out {self.path}: holds {name}, which {what}; name another "
                    "folder"
                )

    def _sweep(self) -> None:
        """Remove the run directories that nobody goes on with: those of packs, and in a
        store those of finished requests."""
        self.check()
        for path in (self._local / RUNS).glob("+*"):
            if holder(path) is None:
                shutil.rmtree(path, ignore_errors=True)
        if isinstance(self.path, StorePath):
            lines = self._lines[self.results].split("\n")
            done = {json.loads(line)["key"] for line in lines if line}
            for name in (self.path / RUNS).files():
                key = name.partition("/")[0]
                if key.startswith("+") or key in done:
                    (self.path / RUNS / name).remove()

    def run_dir(self, request: Request) -> Path:
        """The run directory of a request; on a disk that all replicas see."""
        return self._local / RUNS / request.key

    def name_of(self, path: AnyPath) -> str:
        """A video within the folder."""
        return str(path)[len(str(self.path)) + 1 :]

    def finished(self, request: Request) -> list[dict[str, Any]] | None:
        """The records of a request whose videos are all there; else ``None``.

        Raises:
            StoreError: the store does not answer.
        """
        found = [self._record(request, path) for path in request.paths]
        return None if None in found else found  # type: ignore[return-value]

    def _record(self, request: Request, path: AnyPath) -> dict[str, Any] | None:
        try:
            data = read_sidecar(sidecar_path(path))
            if data.get("batch") != request.digest or not _is(path, data["output"]):
                return None
        except (ArtifactError, OSError):
            return None
        return {
            "line": request.line,
            "key": request.key,
            "file": self.name_of(path),
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
            if _there(path) and not (own or overwrite):
                raise UsageError(
                    f"{path.name} is there, and of another request; give another id, "
                    "or --overwrite"
                )
            if isinstance(path, StorePath):
                continue  # a frame takes the place of a frame
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
        if isinstance(self.results, Path):
            assert isinstance(self.errors, Path)
            if text.encode() != self.results.read_bytes():
                atomic_write_bytes(self.results, text.encode())
            self.errors.unlink(missing_ok=True)
            return
        assert isinstance(self.errors, StorePath)
        self._lines[self.results] = text
        if text.encode() != self._read():
            self._late.add(self.results)
            self._put_late()
        self.errors.remove()

    def _read(self) -> bytes:
        """The results as they are; empty where a store has none yet."""
        return self.results.read_bytes() if self._known else b""

    def _kept(self) -> Iterator[dict[str, Any]]:
        """The records of before; what a kill left of a line is no record."""
        for line in self._read().split(b"\n"):
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

    def _append(self, file: AnyPath, records: Sequence[dict[str, Any]]) -> None:
        """Add lines, on disk when it returns; into a store somewhat later.

        Raises:
            AtWorkError: another driver has taken the folder over.
        """
        if isinstance(file, StorePath):
            self.check()
            self._lines[file] += "".join(map(_line, records))
            self._late.add(file)
            if time.monotonic() > self._put + _SECONDS:
                self._put_late()
            return
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

    def _put_late(self) -> None:
        """Put the files of lines into the store, as they are now.

        Raises:
            AtWorkError: another driver has taken the folder over.
        """
        self.check()
        if self._late and not self._known:
            self._late.add(self.results)
        for file in [f for f in self._lines if f in self._late]:  # the results first
            assert isinstance(file, StorePath)
            file.write_bytes(self._lines[file].encode())
            self._late.remove(file)
            self._known = True
        self._put = time.monotonic()


def _is(path: AnyPath, output: Mapping[str, Any]) -> bool:
    """Whether a video is the one of its sidecar."""
    if isinstance(path, Path):
        return bool(hash_output(path)[0] == output["sha256"])
    if output["kind"] == "png":
        return sum(size for size, _ in path.files().values()) == output["bytes"]
    return bool(path.size() == output["bytes"])


def _there(path: AnyPath) -> bool:
    if isinstance(path, Path):
        return os.path.lexists(path)
    return path.exists() or bool(path.files())


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
