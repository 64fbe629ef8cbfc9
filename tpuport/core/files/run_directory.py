"""The run directory that the stages ``encode``, ``denoise`` and ``decode`` share.

A run directory holds one versioned ``run.json`` (what was asked for, which weights, and
one entry per finished stage), the tensors a stage hands to the next one, and the video.
It can be copied to another machine between two stages: nothing in it depends on where
it lies.

A file is used only after it has been found to be the one that ``run.json`` records;
anything else is refused by name with :class:`~tpuport.errors.ArtifactError`, in one
line.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tpuport.core.arrays import dtype_name
from tpuport.core.files.atomic import cannot_write, one_line
from tpuport.core.files.fingerprint import hash_output, settled, version
from tpuport.core.files.run_record import (
    RUN_FILE,
    RUN_SCHEMA,
    STAGE_FILES,
    STAGES,
    FileEntry,
    Run,
    StageEntry,
    now,
    read_run,
)
from tpuport.core.files.sealed_json import as_json, write_document
from tpuport.core.files.settings_diff import differences, flatten
from tpuport.core.files.stage_tensors import TensorSpec, check_tensors, save_tensors
from tpuport.errors import ArtifactError, MissingArtifactError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

#: Differences that a message names: it is one line.
_NAMED = 3


class RunDirectory:
    """A run directory whose ``run.json`` has been read and found intact.

    Every method looks whether ``run.json`` has changed, because another process may
    finish a stage in between. No file that stays as it is is parsed or hashed twice.
    Writing is for one process at a time.
    """

    def __init__(self, path: Path) -> None:
        """Use :meth:`open` or :meth:`open_or_create` instead."""
        self.path = path
        # What this object has read or written, by file name: the inputs of the next
        # stage. Not looked up when that stage is written, because by then another
        # process may have replaced the file.
        self._seen: dict[str, tuple[str, str]] = {}
        # Of each file that was looked into: what it had by then, and what was found.
        self._known: dict[Path, tuple[tuple[int, ...], Any]] = {}

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """A run directory that exists.

        Raises:
            MissingArtifactError: the folder or its run.json is not there.
            ArtifactError: run.json is not JSON, truncated, altered, or of another
                schema or version.
        """
        run = cls(Path(path))
        if not run.path.is_dir():
            what = "is not a folder" if run.path.exists() else "does not exist"
            raise MissingArtifactError(
                f"{run.path}: the run directory {what}; {run._rerun('encode')} first"
            )
        run._read()
        return run

    @classmethod
    def open_or_create(
        cls,
        path: Path,
        *,
        model: str,
        variant: str,
        settings: Mapping[str, Any],
        weights: Mapping[str, str | None],
    ) -> RunDirectory:
        """The run directory of a request: one that exists, or a new one.

        The folder and its parents are made where needed.

        Args:
            settings: what was asked for, as JSON; stages run later must ask the same.
            weights: component name to the fingerprint of its files, None if unknown.

        Raises:
            UsageError: ``settings`` or ``weights`` is not JSON.
            ArtifactError: the run is not usable, or of another request or of other
                weights; or the folder holds tensors that no run.json accounts for, or
                cannot be written.
        """
        run = cls(Path(path))
        if run.file.exists():
            run.check_request(model=model, variant=variant, settings=settings)
            for component, fingerprint in weights.items():
                run.check_weights(component, fingerprint)
            return run
        content: Run = {
            "tpuport_version": version("tpuport") or "unknown",
            "created": now(),
            "model": model,
            "variant": variant,
            "settings": as_json(dict(settings), "settings"),
            "weights": as_json(dict(weights), "weights"),
            "stages": {},
            "made": [],
        }
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise ArtifactError(
                f"{run.path}: cannot be made a run directory: is not a folder"
            ) from None
        except OSError as error:
            raise cannot_write(run.path, error) from error
        # A checkpoint folder given by mistake, or a run whose run.json was lost: the
        # stages would overwrite what is there.
        if strays := sorted(run.path.glob("*.safetensors")):
            raise ArtifactError(
                f"{strays[0]}: is there without a {RUN_FILE} to account for it; choose"
                " another run directory, or move the file away"
            )
        run._write(content)
        return run

    # --- what the run is

    @property
    def file(self) -> Path:
        """The path of ``run.json``."""
        return self.path / RUN_FILE

    @property
    def model(self) -> str:
        """The model the run is of."""
        return self._read()["model"]

    @property
    def variant(self) -> str:
        """The variant of the model."""
        return self._read()["variant"]

    @property
    def settings(self) -> dict[str, Any]:
        """What was asked for when the run was created; a copy."""
        return self._read()["settings"]

    @property
    def weights(self) -> dict[str, str | None]:
        """Component name to fingerprint, None where unknown; a copy."""
        return self._read()["weights"]

    @property
    def recorded(self) -> tuple[str, ...]:
        """The stages in run.json; :meth:`finished` looks at their files too."""
        return tuple(self._read()["stages"])

    def report(self, stage: str) -> dict[str, Any]:
        """The report recorded with a stage.

        Raises:
            ArtifactError: the stage is not finished.
        """
        return self._entry(self._read(), stage)["report"]

    def check_request(
        self,
        *,
        model: str | None = None,
        variant: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Check that a request is the one this run was created for.

        What is None is not compared. A setting missing on either side is a difference.

        Raises:
            UsageError: ``settings`` is not JSON.
            ArtifactError: they differ; the message lists every difference.
        """
        run = self._read()
        found: dict[str, Any] = {"model": run["model"], "variant": run["variant"]}
        named = {"model": model, "variant": variant}
        asked: dict[str, Any] = {k: v for k, v in named.items() if v is not None}
        found = {name: found[name] for name in asked}
        if settings is not None:
            asked |= flatten(as_json(dict(settings), "settings"))
            found |= flatten(run["settings"])
        if found_all := differences(found, asked):
            if left := len(found_all[_NAMED:]):
                found_all = [*found_all[:_NAMED], f"{left} more"]
            raise ArtifactError(
                f"{self.file}: is of another request: {'; '.join(found_all)}; ask for"
                " what the run was created with, or use another run directory"
            )

    def check_weights(self, component: str, fingerprint: str | None) -> None:
        """Check a component's weights against the recorded fingerprint.

        Records the fingerprint when none was recorded. None says nothing and passes.

        Raises:
            ArtifactError: another fingerprint is recorded.
        """
        if fingerprint is None:
            return
        run = self._read()
        recorded = run["weights"].get(component)
        if recorded is None:
            run["weights"][component] = fingerprint
            self._write(run)
        elif recorded != fingerprint:
            raise ArtifactError(
                f"{self.file}: was made with other weights for {component}: recorded"
                f" {recorded[:16]}, given {fingerprint[:16]}; give the same checkpoint,"
                " or use another run directory"
            )

    # --- stages

    def check_place(self, stage: str) -> None:
        """Refuse a stage whose file is there, and was not made by this run.

        A finished stage may replace a file that is no whole safetensors file: the
        stage is run again to mend a damaged file.

        Raises:
            ArtifactError: the file, and what to do.
        """
        run, path = self._read(), self.path / STAGE_FILES[stage]
        if not os.path.lexists(path) or (stage in run["stages"] and not _whole(path)):
            return
        if self._describe(path)["sha256"] not in run["made"]:
            raise ArtifactError(
                f"{path}: is there and was not made by this run; move the file away, "
                f"or use another run directory for {stage}"
            )

    def write_stage(
        self,
        stage: str,
        tensors: Mapping[str, torch.Tensor],
        specs: Sequence[TensorSpec],
        report: Mapping[str, Any],
    ) -> None:
        """Write a stage's tensors, then its entry in run.json.

        The entry records as the stage's inputs the files of earlier stages that this
        object has read or written. When anything fails, the stage is what it was.

        Raises:
            UsageError: ``report`` is not JSON.
            ArtifactError: the tensors are not those of ``specs``, a file cannot be
                written, or another file is in its place: see :meth:`check_place`.
        """
        self.check_place(stage)
        run = self._read()
        filename = STAGE_FILES[stage]
        clean_report = as_json(dict(report), f"the report of {stage}")

        def made(sha256: str) -> None:
            # Before the file is there: after a kill, the next run knows whose it is.
            if sha256 not in run["made"]:
                run["made"].append(sha256)
                self._write(run)

        sha256, size = save_tensors(self.path / filename, tensors, specs, made)
        listing = _listing(tensors)
        self._record(
            run,
            stage,
            {"file": filename, "sha256": sha256, "bytes": size, "tensors": listing},
            clean_report,
        )
        self._seen[filename] = (stage, sha256)

    def read_stage(
        self,
        stage: str,
        specs: Sequence[TensorSpec],
        sizes: Mapping[str, int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """The tensors of a finished stage, on the CPU, dtypes as written.

        Optional tensors that the file lacks are left out.

        Args:
            sizes: named sizes of ``specs`` that are known.

        Raises:
            ArtifactError: the stage is not finished; its file is missing, truncated,
                altered or unreadable; its tensors are not those of ``specs``; or it was
                made from inputs that have since been replaced.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        run = self._read()
        entry = self._entry(run, stage)
        self._check_inputs(run, stage)
        path = self.path / entry["file"]
        # One read for both: the bytes that were checked are the bytes that are used.
        data = self._verified(path, entry, stage)
        try:
            tensors = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise ArtifactError(
                f"{path}: is not a safetensors file ({one_line(error)});"
                f" {self._rerun(stage)} again"
            ) from error
        check_tensors(path, tensors, specs, sizes)
        if (found := _listing(tensors)) != entry["tensors"]:
            names = sorted(found.keys() | entry["tensors"].keys())
            name = next(n for n in names if found.get(n) != entry["tensors"].get(n))
            raise ArtifactError(
                f"{path}: {name} is {found.get(name)}, run.json records "
                f"{entry['tensors'].get(name)}; {self._rerun(stage)} again"
            )
        self._seen[entry["file"]] = (stage, entry["sha256"])
        return {spec.name: tensors[spec.name] for spec in specs if spec.name in tensors}

    def record_output(
        self, stage: str, paths: Sequence[Path], report: Mapping[str, Any]
    ) -> None:
        """Record the videos that a stage wrote, each a file or a folder of PNGs.

        A path inside the run directory is recorded relative to it. Of one outside only
        the name is, since the run directory may move; such a file is not checked later.

        Raises:
            UsageError: ``report`` is not JSON.
            ArtifactError: a path is missing, or run.json cannot be written.
        """
        run = self._read()
        clean_report = as_json(dict(report), f"the report of {stage}")
        first, *others = [self._describe(output) for output in paths]
        entry: dict[str, Any] = {**first, "tensors": {}}
        if others:
            entry["others"] = others
        self._record(run, stage, entry, clean_report)

    def finished(self, stage: str) -> bool:
        """Whether a stage's result is there, intact, and made from current inputs.

        Raises:
            ArtifactError: run.json itself is not usable.
        """
        run = self._read()
        if stage not in run["stages"]:
            return False
        entry = run["stages"][stage]
        try:
            self._check_inputs(run, stage)
        except ArtifactError:
            return False
        return all(
            self._intact(file)
            for file in [entry, *entry.get("others", [])]
            if not file.get("outside")
        )

    def invalidate_after(self, stage: str) -> tuple[str, ...]:
        """Forget the stages after ``stage``; returns those forgotten.

        Their files stay where they are and are no longer used.

        Raises:
            ArtifactError: run.json is not usable or cannot be written.
        """
        run = self._read()
        later = STAGES[STAGES.index(stage) + 1 :]
        dropped = tuple(name for name in later if name in run["stages"])
        for name in dropped:
            del run["stages"][name]
        if dropped:
            self._write(run)
        return dropped

    # --- inside

    def _rerun(self, stage: str) -> str:
        return f"run `tpuport {stage} --run-dir {shlex.quote(str(self.path))}`"

    def _read(self) -> Run:
        return copy.deepcopy(self._once(self.file, read_run))

    def _once(self, path: Path, look: Callable[[Path], T]) -> T:
        """What is found in a file, looked for once as long as it stays as it is."""
        now = None
        with contextlib.suppress(OSError):
            now = settled(path.stat())
        known = self._known.get(path)
        if known is not None and known[0] == now:
            found: T = known[1]
            return found
        found = look(path)
        if now is not None:
            self._known[path] = now, found
        return found

    def _write(self, content: Run) -> None:
        write_document(self.file, RUN_SCHEMA, content)

    def _record(
        self,
        run: Run,
        stage: str,
        entry: Mapping[str, Any],
        report: dict[str, Any],
    ) -> None:
        earlier = STAGES[: STAGES.index(stage)]
        inputs = {
            name: sha256
            for name, (made_by, sha256) in sorted(self._seen.items())
            if made_by in earlier
        }
        about = {"inputs": inputs, "finished": now(), "report": report}
        run["stages"][stage] = cast(StageEntry, {**entry, **about})
        self._write(run)

    def _entry(self, run: Run, stage: str) -> StageEntry:
        if stage not in run["stages"]:
            name = STAGE_FILES.get(stage, RUN_FILE)
            raise ArtifactError(
                f"{self.path / name}: the stage {stage} is not finished;"
                f" {self._rerun(stage)} first"
            )
        return run["stages"][stage]

    def _check_inputs(self, run: Run, stage: str) -> None:
        """Check that the files a stage was made from are still the recorded ones."""
        current = {entry["file"]: name for name, entry in run["stages"].items()}
        todo, checked = [stage], {stage}
        while todo:
            name = todo.pop()
            entry = run["stages"][name]
            for file, sha256 in entry["inputs"].items():
                source = current.get(file)
                if source is None or run["stages"][source]["sha256"] != sha256:
                    raise ArtifactError(
                        f"{self.path / entry['file']}: was made from another {file}"
                        f" than {RUN_FILE} records now; {self._rerun(name)} again"
                    )
                if source not in checked:
                    checked.add(source)
                    todo.append(source)

    def _verified(self, path: Path, entry: FileEntry, stage: str) -> bytes:
        """The bytes of a stage's file, found to be the recorded ones."""
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                data = file.read() if size == entry["bytes"] else b""
                now = settled(os.fstat(file.fileno()))
        except FileNotFoundError:
            raise ArtifactError(
                f"{path}: is missing; {self._rerun(stage)} first"
            ) from None
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
        if size != entry["bytes"]:
            what = "is cut short" if size < entry["bytes"] else "has grown"
            raise ArtifactError(
                f"{path}: {what}: {size} bytes, {RUN_FILE} records"
                f" {entry['bytes']}; copy it again, or {self._rerun(stage)} again"
            )
        as_recorded = entry["sha256"], entry["bytes"]
        if self._known.get(path) == (now, as_recorded):
            return data
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ArtifactError(
                f"{path}: is not the file {RUN_FILE} records (its sha256 differs); copy"
                f" it again, or move it away and {self._rerun(stage)} again"
            )
        if now is not None:
            self._known[path] = now, as_recorded
        return data

    def _describe(self, path: Path) -> FileEntry:
        try:
            sha256, size = hash_output(path)
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
        entry: FileEntry = {"file": path.name, "sha256": sha256, "bytes": size}
        inside, real = self.path.resolve(), path.resolve()
        if real.is_relative_to(inside):
            entry["file"] = real.relative_to(inside).as_posix()
        else:
            entry["outside"] = True
        return entry

    def _intact(self, entry: FileEntry) -> bool:
        path = self.path / entry["file"]
        try:
            # A folder does not tell when a file in it is written to.
            look = hash_output(path) if path.is_dir() else self._once(path, hash_output)
        except OSError:
            return False
        return look == (entry["sha256"], entry["bytes"])


def _whole(path: Path) -> bool:
    """Whether a file is a safetensors file of the length that its header tells."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            return True
    except (SafetensorError, OSError):
        return False


def _listing(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What run.json records of tensors."""
    return {
        name: {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}
        for name, tensor in tensors.items()
    }
