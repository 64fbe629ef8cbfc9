"""Compiled programs as files, under the key of everything they depend on.

A file is a zip of a header (JSON: the key, and the seconds that it took) and the
executable as jax serialises it. A file is used only when it is whole, and only under an
equal key. Loading a file runs what is in it, as with jax's own cache: trust a folder of
executables like the code itself.

Sources: ``jax.experimental.serialize_executable`` at jax 0.10.2.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from typing_extensions import TypedDict

from tpuport.core.files.atomic import cannot_write, one_line, replacing
from tpuport.core.files.sealed_json import canonical
from tpuport.core.files.typed import checked
from tpuport.core.programs.folder_place import SUFFIX
from tpuport.core.programs.program_key import ProgramKey
from tpuport.errors import ArtifactError

#: Of the key's digest, in a file's name.
_DIGITS = 32

#: What a file holds.
_HEADER, _PROGRAM = "header.json", "program"
#: No header is near this.
_HEADER_LIMIT = 16 << 20


#: Calls into libraries that jax hands to XLA only while it traces a program that uses
#: them: an executable with one ends a process that loads it (jax issue 28908).
_UNSAFE_ON_CPU = (b"lapack_", b"tridiagonal_solve_perturbed_ffi")


class Header(TypedDict):
    """What a file begins with, as JSON."""

    key: dict[str, Any]
    seconds: float


class NotSerialisable(Exception):
    """jax cannot write this executable, or it could not be loaded safely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file.

    Attributes:
        path: of it.
        key: of the program.
        seconds: what tracing and compiling took.
        size: bytes of the executable.
    """

    path: Path
    key: ProgramKey
    seconds: float
    size: int

    def as_dict(self) -> dict[str, Any]:
        """What people are told of it, JSON-ready."""
        return {
            "component": self.key.component,
            "program": self.key.program,
            "file": self.path.name,
            "bytes": self.size,
        }


class ExecutableStore:
    """The executables in a folder, which is made when the first one is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: ProgramKey) -> Path:
        name = re.sub(r"[^A-Za-z0-9_.]", "_", f"{key.component}-{key.program}")
        return self.folder / f"{name}-{key.digest[:_DIGITS]}{SUFFIX}"

    def find(self, key: ProgramKey) -> Entry | None:
        """The entry of a key.

        Raises:
            ArtifactError: its file is damaged, or of another key.
        """
        path = self.path(key)
        if not path.is_file():
            return None
        entry = read_entry(path)
        if entry.key.digest != key.digest:
            raise ArtifactError(f"{path}: is of another program than its name says")
        return entry

    def write(self, key: ProgramKey, payload: bytes, *, seconds: float = 0.0) -> Entry:
        """Keep an executable; whole or not at all, whoever else writes it.

        Args:
            payload: from :func:`serialise`.
            seconds: as :class:`Entry` has them.

        Raises:
            ArtifactError: the folder cannot be written.
        """
        header = {"key": key.as_dict(), "seconds": seconds}
        path = self.path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary, zipfile.ZipFile(temporary, "w") as file:
                file.writestr(_HEADER, canonical(header))
                file.writestr(_PROGRAM, payload)
        except OSError as error:
            raise cannot_write(path, error) from error
        return read_entry(path)


def read_entry(path: Path) -> Entry:
    """The header of a file.

    Raises:
        ArtifactError: it is missing, no executable, damaged or cut short.
    """
    return _read(path, whole=False)[0]


def _read(path: Path, *, whole: bool) -> tuple[Entry, bytes]:
    """The header of a file, and the executable where the whole is asked for."""
    try:
        with zipfile.ZipFile(path) as file:
            if file.getinfo(_HEADER).file_size > _HEADER_LIMIT:
                raise ValueError("its header has no end")
            data = json.loads(file.read(_HEADER))
            header = checked(Header, data, path, "compile again")
            entry = Entry(
                path=path,
                key=ProgramKey.from_dict(header["key"], path),
                seconds=header["seconds"],
                size=file.getinfo(_PROGRAM).file_size,
            )
            return entry, file.read(_PROGRAM) if whole else b""
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    except ArtifactError:
        raise
    except Exception as error:  # a damaged file has no one kind
        raise ArtifactError(
            f"{path}: is no executable of this tpuport, or is damaged "
            f"({one_line(error)})"
        ) from error


def serialise(compiled: jax.stages.Compiled, platform: str) -> bytes:
    """An executable as bytes.

    Args:
        compiled: by the compiler, in this process: one that jax read from its own
            cache loses functions when it is written again on a CPU.

    Raises:
        NotSerialisable: the backend cannot, or it could not be loaded safely.
    """
    try:
        executable, _, out_tree = serialize_executable.serialize(compiled)
    except Exception as error:
        # jax raises what it has: ValueError, NotImplementedError, JaxRuntimeError.
        raise NotSerialisable(one_line(error)) from error
    if platform == "cpu":
        unsafe = [name.decode() for name in _UNSAFE_ON_CPU if name in executable]
        if unsafe:
            raise NotSerialisable(f"it calls {unsafe[0]}..., which jax cannot reload")
    return pickle.dumps((executable, out_tree))


def load(entry: Entry, arguments: Any, devices: Sequence[Any]) -> jax.stages.Compiled:
    """The program of an entry, ready to be called; nothing is traced or compiled.

    Args:
        arguments: of the program, which tell how they nest.
        devices: the devices of its mesh, in order.

    Raises:
        ArtifactError: the file is damaged.
        Exception: whatever jax raises for an executable that the backend refuses.
    """
    # The header anew: another process may have put another file of the key there.
    now, payload = _read(entry.path, whole=True)
    if now.key.digest != entry.key.digest:
        raise ArtifactError(f"{entry.path}: is of another program now")
    executable, out_tree = pickle.loads(payload)
    compiled: jax.stages.Compiled = serialize_executable.deserialize_and_load(
        executable,
        jax.tree.structure((tuple(arguments), {})),
        out_tree,
        backend=devices[0].client,
        execution_devices=list(devices),
    )
    return compiled
