"""A tape on disk: ``tape.json``, and the tensors that it names in safetensors files.

A file is named by ``tape.json`` once it is whole, and ``tape.json`` is replaced whole:
after a kill the folder holds the tape before or the tape after.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from typing_extensions import TypedDict

from tpuport.core.arrays import dtype_name, torch_dtype
from tpuport.core.drive.kept_values import Kept, kept
from tpuport.core.drive.tape import Call, Recorded, Step
from tpuport.core.enums import StageName
from tpuport.core.files.atomic import cannot_write, one_line, replacing
from tpuport.core.files.run_record import TAPE_FILE, TAPE_SCHEMA
from tpuport.core.files.sealed_json import read_document, write_document
from tpuport.core.files.typed import checked
from tpuport.errors import ArtifactError, WriteError

_REMEDY = "begin the run again in another folder"


class _Kept(TypedDict):
    """A value: each tensor by its file and name, or by its shape alone."""

    plain: Any
    tensors: list[list[Any]]


class _Call(TypedDict):
    name: str
    answer: _Kept | None
    given: int
    random: _Kept | None


class _Calls(TypedDict):
    """Calls in a row that are alike, as those of a guided step are."""

    call: _Call
    times: int


class _Step(TypedDict):
    scheduler: int
    number: int
    result: _Kept
    state: _Kept
    random: _Kept


class _File(TypedDict):
    sha256: str
    bytes: int


class _Tape(TypedDict):
    """The content of ``tape.json``."""

    how: dict[str, Any]
    finished: StageName | None
    stepped: int
    calls: list[_Calls]
    steps: list[_Step]
    histories: _Kept
    files: dict[str, _File]


class TapeFolder:
    """The tape of one video of a run.

    Args:
        path: made when the tape is first written.

    Attributes:
        how: how the stage under way is run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.how: dict[str, Any] = {}
        self._files: dict[str, _File] = {}
        # Calls are written once; the steps of a tape take the place of those before.
        self._calls: list[_Call] = []

    @property
    def file(self) -> Path:
        return self.path / TAPE_FILE

    def read(self) -> Recorded:
        """What was recorded; nothing where there is no tape.

        Raises:
            ArtifactError: a file is missing, torn, altered, or of another version.
        """
        if not self.file.exists():
            return Recorded()
        found = read_document(self.file, TAPE_SCHEMA, _REMEDY)
        tape = checked(_Tape, found, self.file, _REMEDY)
        tensors = {
            name: self._tensors(name, tape["files"][name]) for name in tape["files"]
        }
        self.how = tape["how"]
        calls = [one["call"] for one in tape["calls"] for _ in range(one["times"])]
        self._files, self._calls = dict(tape["files"]), calls
        try:
            histories = _given(tape["histories"], tensors).value()
            if not isinstance(histories, dict):
                raise TypeError("the histories are no dictionary")
            return Recorded(
                tuple(_read(Call, one, tensors) for one in calls),
                tuple(_read(Step, one, tensors) for one in tape["steps"]),
                tape["stepped"],
                tape["finished"],
                histories,
            )
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ArtifactError(
                f"{self.file}: names what is not there ({one_line(error)}); {_REMEDY}"
            ) from error

    def begin(self, how: Mapping[str, Any], recorded: Recorded) -> None:
        """Go on in a way, which within denoise is the way that it was begun in.

        Args:
            how: settings that change the bytes of a result.
            recorded: from :meth:`read`.

        Raises:
            ArtifactError: what differs.
        """
        encoded = recorded.stepped == 0 and recorded.finished == StageName.ENCODE
        denoised = recorded.finished == StageName.DENOISE
        between = encoded or denoised or not recorded.calls
        for name, value in how.items():
            if not between and self.how.get(name) != value:
                raise ArtifactError(
                    f"{self.file}: was made with {name} {self.how.get(name)}, now "
                    f"{value}; go on as the run was begun, or {_REMEDY}"
                )
        self.how = dict(how)

    def write(self, recorded: Recorded) -> None:
        """Put a tape in the place of the one before.

        Raises:
            WriteError: a file cannot be written; the tape before is still there.
        """
        files, calls = dict(self._files), list(self._calls)
        new = recorded.calls[len(calls) :]
        named = _Tensors(f"calls-{len(calls):05}.safetensors")
        calls += [named.record(one, at) for at, one in enumerate(new, len(calls))]
        last = _Tensors(f"steps-{recorded.stepped:05}.safetensors")
        steps = [last.record(one, at) for at, one in enumerate(recorded.steps)]
        histories = last.take(kept(dict(recorded.histories), always=True), "histories")
        old = [name for name in files if name.startswith("steps-")]
        for name in old:
            del files[name]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for part in (named, last):
                if part.found:
                    files[part.file] = self._save(part)
            content: _Tape = {
                "how": self.how,
                "finished": recorded.finished,
                "stepped": recorded.stepped,
                "calls": [
                    {"call": one, "times": len(list(alike))}
                    for one, alike in itertools.groupby(calls)
                ],
                "steps": steps,
                "histories": histories,
                "files": files,
            }
            write_document(self.file, TAPE_SCHEMA, content)
        except (OSError, WriteError) as error:
            self._remove_others()
            if isinstance(error, WriteError):
                raise
            raise cannot_write(self.path, error) from error
        self._files, self._calls = files, calls
        self._remove_others()

    def _remove_others(self) -> None:
        for one in self.path.glob("*.safetensors"):
            if one.name not in self._files:
                with contextlib.suppress(OSError):  # the next tape removes it
                    one.unlink()

    def _save(self, part: _Tensors) -> _File:
        data = save(part.found)
        with replacing(self.path / part.file) as temporary:
            temporary.write_bytes(data)
        return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}

    def _tensors(self, name: str, wanted: _File) -> dict[str, torch.Tensor]:
        path = self.path / name
        if path.name != name:
            raise ArtifactError(
                f"{self.file}: names {name!r}, no file of it; {_REMEDY}"
            )
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise ArtifactError(f"{path}: is missing; {_REMEDY}") from None
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != wanted["sha256"]:
            what = "is torn" if len(data) != wanted["bytes"] else "was altered"
            raise ArtifactError(
                f"{path}: {what}: {TAPE_FILE} records another file; {_REMEDY}"
            )
        try:
            return load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise ArtifactError(
                f"{path}: is no safetensors file ({one_line(error)}); {_REMEDY}"
            ) from error


class _Tensors:
    """The tensors of one file, by name."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: dict[str, torch.Tensor] = {}

    def take(self, value: Kept, name: str) -> _Kept:
        listed: list[list[Any]] = []
        for number, tensor in enumerate(value.settled().tensors):
            if tensor.is_meta:
                listed.append([dtype_name(tensor.dtype), list(tensor.shape)])
                continue
            self.found[f"{name}.{number}"] = tensor
            listed.append([self.file, f"{name}.{number}"])
        return {"plain": value.plain, "tensors": listed}

    def record(self, one: Call | Step, number: int) -> Any:
        """A call or a step; ``number`` is part of the names of its tensors."""
        return {
            name: self.take(v, f"{number}.{name}") if isinstance(v, Kept) else v
            for name, v in ((f.name, getattr(one, f.name)) for f in fields(one))
        }


_Read = Mapping[str, Mapping[str, torch.Tensor]]


def _given(value: Any, files: _Read) -> Kept:
    found = []
    for where, what in value["tensors"]:
        if isinstance(what, str):
            found.append(files[where][what])
        else:
            found.append(torch.empty(what, dtype=torch_dtype(where), device="meta"))
    return Kept(value["plain"], tuple(found))


def _read(kind: Any, found: Mapping[str, Any], files: _Read) -> Any:
    """A call or a step; what is a dict in a file is a value there."""
    return kind(
        **{k: _given(v, files) if isinstance(v, dict) else v for k, v in found.items()}
    )
