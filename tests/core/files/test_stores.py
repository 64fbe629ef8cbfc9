"""Addresses of stores, and folders that are fetched once, in fsspec's own memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tpuport.core.files import stores
from tpuport.core.files.stores import StorePath, begun, ended, fetched, place
from tpuport.core.reports import Reporter
from tpuport.errors import MissingStoreError, StoreError, UsageError

FOLDER = StorePath("memory", "bucket/folder")


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(stores.SCHEMES, "memory", ("fsspec", "none"))
    yield
    fsspec.filesystem("memory").store.clear()
    stores._probe.cache_clear()


@pytest.mark.parametrize(
    "text",
    ["gs:/x", "gs:x", "foo://x", "GS://b/x", "gs://", "s3://b//x", "s3://b/../x"],
)
def test_an_address_that_is_none_names_the_known_ones(text: str) -> None:
    with pytest.raises(UsageError, match=r"is no address.*(gs|s3)://bucket/folder"):
        place(text)


def test_other_names_are_of_this_machine() -> None:
    assert place("C:/fox") == Path("C:/fox")
    assert place("gs.mp4") == Path("gs.mp4")


def test_a_missing_package_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UsageError, match=r"pip install 'tpuport\[gcs\]'"):
        StorePath("gs", "bucket").check_writable()


def test_what_may_not_be_replaced_stays(tmp_path: Path) -> None:
    file = tmp_path / "new"
    file.write_text("new")
    (FOLDER / "a").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        (FOLDER / "a").put(file, replace=False)
    assert (FOLDER / "a").read_bytes() == b"old"


def test_a_folder_is_fetched_once_and_follows_the_store(tmp_path: Path) -> None:
    class Fetched(Reporter):
        def __init__(self) -> None:
            self.bytes = 0

        def downloading(
            self, name: str, files: tuple[int, int], size: tuple[int, int]
        ) -> None:
            self.bytes = size[1]

    def fetch() -> int:
        reporter = Fetched()
        folder = fetched(FOLDER, ["*.json", "vae/*"], tmp_path, reporter)
        for name, (size, _) in FOLDER.files().items():
            if name != "other":
                assert (folder / name).read_bytes() == (FOLDER / name).read_bytes()
                assert (folder / name).stat().st_size == size
        assert not (folder / "other").exists()
        return reporter.bytes

    with pytest.raises(MissingStoreError, match="memory://bucket/folder"):
        fetch()
    for name in ("a.json", "vae/w.safetensors", "other"):
        (FOLDER / name).write_bytes(b"12345")
    assert fetch() == 10
    assert fetch() == 0
    (FOLDER / "a.json").write_bytes(b"54321")  # of the same size
    assert fetch() == 5
    (FOLDER / "vae/w.safetensors").remove()
    assert fetch() == 0
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_broken_download_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(self: object, remote: str, local: str) -> None:
        Path(local).write_bytes(b"12")
        raise ConnectionResetError("reset")

    (FOLDER / "a.json").write_bytes(b"12345")
    with monkeypatch.context() as broken:
        broken.setattr(type(fsspec.filesystem("memory")), "get_file", breaks)
        with pytest.raises(
            StoreError, match=r"a.json: cannot be fetched \(Conn.*reset"
        ):
            fetched(FOLDER, ["*"], tmp_path, Reporter())
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
    folder = fetched(FOLDER, ["*"], tmp_path, Reporter())
    assert (folder / "a.json").read_bytes() == b"12345"


def test_what_changed_here_goes_to_the_store(tmp_path: Path) -> None:
    (FOLDER / "same").write_bytes(b"same")
    (FOLDER / "old").write_bytes(b"old")
    mark = FOLDER.files()["same"]
    folder, before = begun(FOLDER, ["*"], tmp_path, Reporter())
    (folder / "old").unlink()
    (folder / "new").write_bytes(b"new")
    ended(FOLDER, folder, before, "new")
    assert sorted(FOLDER.files()) == ["new", "same"]
    assert FOLDER.files()["same"] == mark

    fsspec.filesystem("memory").store.clear()
    folder, before = begun(FOLDER, ["*"], tmp_path, Reporter())
    assert (before, list(folder.rglob("*"))) == ({}, [])
