"""The copy of a run in a store: always a whole checkpoint, and the furthest wins."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tpuport.core.drive.run_in_store import RunInStore
from tpuport.core.files import stores
from tpuport.core.files.run_record import TAPE_SCHEMA
from tpuport.core.files.sealed_json import write_document
from tpuport.core.files.stores import StorePath
from tpuport.errors import StoreError

COPY = StorePath("memory", "bucket/runs/fox")


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(stores.SCHEMES, "memory", ("fsspec", "none"))
    yield
    fsspec.filesystem("memory").store.clear()


def write(folder: Path, calls: int) -> None:
    """A tape with so many calls, and the file that it names."""
    video = folder / "video-0"
    video.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text("{}")
    (folder / ".lock").write_text("1")
    for old in video.glob("*.safetensors"):
        old.unlink()
    (video / f"steps-{calls}.safetensors").write_bytes(b"%d" % calls)
    write_document(video / "tape.json", TAPE_SCHEMA, {"calls": [{"times": calls}]})


def names(calls: int) -> list[str]:
    return ["run.json", f"video-0/steps-{calls}.safetensors", "video-0/tape.json"]


def test_a_tape_is_put_after_its_files_and_old_files_go_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)
    run = RunInStore(tmp_path, COPY)
    run.put()
    assert sorted(COPY.files()) == names(1)
    seen: list[str] = []
    put, remove = StorePath.put, StorePath.remove

    def watched_put(self: StorePath, file: Path, **how: Any) -> None:
        seen.append(self.name)
        put(self, file, **how)

    def watched_remove(self: StorePath) -> None:
        seen.append(f"no {self.name}")
        remove(self)

    monkeypatch.setattr(StorePath, "put", watched_put)
    monkeypatch.setattr(StorePath, "remove", watched_remove)
    write(tmp_path, 2)
    (tmp_path / "run.json").touch()
    run.put()
    assert seen[-3:] == ["steps-2.safetensors", "tape.json", "no steps-1.safetensors"]
    seen.clear()
    run.put()
    assert not seen
    run.remove()
    assert seen[0] == "no tape.json"
    assert not COPY.files()


@pytest.mark.parametrize(("here", "there"), [(0, 2), (1, 2), (2, 2), (3, 2)])
def test_what_is_further_is_gone_on_with(here: int, there: int, tmp_path: Path) -> None:
    write(tmp_path / "other", there)
    RunInStore(tmp_path / "other", COPY).put()
    folder = tmp_path / "own/run"
    if here:
        write(folder, here)
        (folder / "own").touch()
    run = RunInStore(folder, COPY)
    run.fetch()
    own = here >= there
    assert (folder / "own").exists() == own
    calls = here if own else there
    assert all((folder / name).is_file() for name in names(calls))
    run.put()
    assert sorted(COPY.files()) == sorted([*names(calls), *["own"] * own])


def test_a_copy_that_is_damaged_or_absent_is_not_taken(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    RunInStore(folder, COPY).fetch()
    assert not folder.exists()
    write(tmp_path / "other", 5)
    RunInStore(tmp_path / "other", COPY).put()
    (COPY / "video-0/tape.json").write_bytes(b'{"calls"')
    run = RunInStore(folder, COPY)
    run.fetch()
    assert not folder.exists()
    write(folder, 1)
    run.put()
    assert sorted(COPY.files()) == names(1)
    shutil.rmtree(folder)
    RunInStore(folder, COPY).fetch()
    assert (folder / "video-0/steps-1.safetensors").read_bytes() == b"1"


def test_what_cannot_be_fetched_leaves_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "other", 5)
    RunInStore(tmp_path / "other", COPY).put()
    folder = tmp_path / "run"
    write(folder, 1)
    get = StorePath.get

    def last_is_lost(self: StorePath, file: Path) -> None:
        if self.name == "tape.json":
            raise StoreError("the store does not answer")
        get(self, file)

    with monkeypatch.context() as broken:
        broken.setattr(StorePath, "get", last_is_lost)
        with pytest.raises(StoreError):
            RunInStore(folder, COPY).fetch()
    assert all((folder / name).is_file() for name in names(1))
    (COPY / "../../evil.txt").write_bytes(b"")
    with pytest.raises(StoreError, match="leaves the folder"):
        RunInStore(folder, COPY).fetch()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other", "run"]
