"""Fingerprints are of names and contents, wherever the files lie."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file as save

from tpuport.core.files import fingerprint, stores
from tpuport.core.files.fingerprint import fingerprint_files
from tpuport.core.files.stores import LeftInStore, StorePath, fetched
from tpuport.core.reports import Reporter
from tpuport.errors import UsageError, WeightsError


def test_a_fingerprint_is_of_names_and_contents_wherever_they_lie(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    (one / "sub").mkdir(parents=True)
    (one / "a").write_bytes(b"a")
    (one / "sub" / "b").write_bytes(b"b")
    shutil.copytree(one, two)
    expected = fingerprint_files(one, [one / "a", one / "sub" / "b"])
    assert re.fullmatch("[0-9a-f]{64}", expected)
    assert fingerprint_files(two, [two / "sub" / "b", two / "a"]) == expected
    (two / "link").symlink_to(two / "a")
    (two / "a").rename(two / "blob")
    (two / "a").symlink_to(two / "blob")
    assert fingerprint_files(two, [two / "a", two / "sub" / "b"]) == expected

    (two / "sub" / "b").write_bytes(b"c")
    assert fingerprint_files(two, [two / "a", two / "sub" / "b"]) != expected
    (one / "a").rename(one / "c")
    assert fingerprint_files(one, [one / "c", one / "sub" / "b"]) != expected


def test_a_large_file_is_sampled_to_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "FINGERPRINT_WHOLE_BYTES", 8 << 20)
    path, size = tmp_path / "big", (12 << 20) + 5
    with path.open("wb") as file:
        file.truncate(size)
    seen = {fingerprint_files(tmp_path, [path])}
    for offset in (0, (1 << 20) - 1, size - (1 << 20), size - 1, 1 << 20):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"x")
        seen.add(fingerprint_files(tmp_path, [path]))
    with path.open("r+b") as file:
        file.truncate(size + 1)
    seen.add(fingerprint_files(tmp_path, [path]))
    assert len(seen) == 7


def test_a_file_in_a_store_has_the_fingerprint_of_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples alone are fetched."""
    monkeypatch.setitem(stores.SCHEMES, "memory", ("fsspec", "none"))
    monkeypatch.setattr(fingerprint, "FINGERPRINT_WHOLE_BYTES", 8 << 20)
    file, name = tmp_path / "w.safetensors", "w.safetensors"
    save({"w": np.arange(12 << 20, dtype=np.uint8)}, file)
    folder = StorePath("memory", "bucket/weights")
    (folder / name).put(file)
    left = fetched(folder, ["*"], tmp_path / "cache", Reporter(), 8 << 20)
    assert LeftInStore.by(left / name)
    expected = fingerprint_files(tmp_path, [file])
    assert fingerprint_files(left, [left / name]) == expected
    fsspec.filesystem("memory").store.clear()


def test_a_fingerprint_of_nothing_or_of_a_missing_file_is_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match="no files to fingerprint"):
        fingerprint_files(tmp_path, [])
    with pytest.raises(WeightsError, match=r"gone\.bin: cannot be read: No such file"):
        fingerprint_files(tmp_path, [tmp_path / "gone.bin"])
