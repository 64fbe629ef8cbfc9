"""The folder of a run, kept in a store too, so that another machine can go on."""

from __future__ import annotations

import shutil
from pathlib import Path

from tpuport.core.files.atomic import cannot_write, new_folder
from tpuport.core.files.run_record import TAPE_FILE, TAPE_SCHEMA, tapes_in
from tpuport.core.files.sealed_json import read_document
from tpuport.core.files.stores import AnyPath, StorePath, check_within
from tpuport.errors import ArtifactError, StoreError


class RunInStore:
    """A run's folder on this machine, and the copy that a store has.

    A tape is put after the files that it names, and what no tape names any more is
    removed last: the store always has a checkpoint whole.

    Args:
        folder: on this machine.
        path: of the copy; nobody else writes there.
    """

    def __init__(self, folder: Path, path: StorePath) -> None:
        self._folder, self._path = folder, path
        #: What the store has: the time of change of each file here; 0 if unknown.
        self._there: dict[str, int] = {}

    def fetch(self) -> None:
        """Bring the store's copy here, if it is further than the folder.

        Raises:
            StoreError: the store does not answer.
            WriteError: the folder cannot be written.
        """
        self._there = dict.fromkeys(self._path.files(), 0)
        check_within(self._path, self._there)
        names = sorted(self._there, key=_tape_last)
        tapes = [self._path / name for name in names if _is_tape(name)]
        if sum(map(_calls, tapes)) <= sum(map(_calls, tapes_in(self._folder))):
            return
        try:
            with new_folder(self._folder) as fetched:
                for name in names:
                    (fetched / name).parent.mkdir(parents=True, exist_ok=True)
                    (self._path / name).get(fetched / name)
                shutil.rmtree(self._folder, ignore_errors=True)
        except StoreError:
            if any(tape.exists() for tape in tapes):
                raise
            return  # a process whose driver is dead ended the run
        except OSError as error:
            raise cannot_write(self._folder, error) from error
        self._there = self._here()

    def put(self) -> None:
        """Put what is new here.

        Raises:
            StoreError: the store does not answer.
        """
        here = self._here()
        for name in sorted(here, key=_tape_last):
            if self._there.get(name) != here[name]:
                (self._path / name).put(self._folder / name)
                self._there[name] = here[name]
        for name in self._there.keys() - here.keys():
            (self._path / name).remove()
            del self._there[name]

    def remove(self) -> None:
        """Remove the copy, tapes first."""
        for name in sorted(self._there, key=_tape_last, reverse=True):
            (self._path / name).remove()
        self._there = {}

    def _here(self) -> dict[str, int]:
        return {
            file.relative_to(self._folder).as_posix(): file.stat().st_mtime_ns
            for file in self._folder.rglob("*")
            if file.is_file() and not file.name.startswith(".")
        }


def _is_tape(name: str) -> bool:
    return name.rpartition("/")[2] == TAPE_FILE


def _tape_last(name: str) -> tuple[bool, str]:
    return _is_tape(name), name


def _calls(tape: AnyPath) -> int:
    """How many calls of components a tape has; none where it cannot be used."""
    try:
        found = read_document(tape, TAPE_SCHEMA, "")
    except ArtifactError:
        return 0
    return sum(one["times"] for one in found["calls"])
