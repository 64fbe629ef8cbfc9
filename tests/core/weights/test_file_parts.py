"""Parts of tensors that stay in a store: what is fetched, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from tpuport.core.files import stores
from tpuport.core.files.stores import LeftInStore, StorePath, fetched
from tpuport.core.reports import Reporter
from tpuport.core.weights import file_parts
from tpuport.core.weights.stored_tensors import StoredTensor, read_whole, unread
from tpuport.errors import StoreError, WeightsError

FOLDER = StorePath("memory", "bucket/model")
NAME = "vae/w.safetensors"
SHAPE = (6, 4, 5)


class Requests:
    """What the store was asked for, in bytes from a place to another."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []

    @property
    def bytes(self) -> int:
        return sum(end - start for start, end in self.made)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    monkeypatch.setitem(stores.SCHEMES, "memory", ("fsspec", "none"))
    memory, found = type(fsspec.filesystem("memory")), Requests()
    own = memory.cat_file

    def seen(self: Any, path: str, start: int, end: int) -> bytes:
        found.made.append((start, end))
        data: bytes = own(self, path, start, end)
        return data

    with monkeypatch.context() as watched:
        watched.setattr(memory, "cat_file", seen)
        yield found
    fsspec.filesystem("memory").store.clear()


def left(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The file that stands for an object with these tensors."""
    save_file(tensors, tmp_path / "w.safetensors", {"format": "pt"})
    (FOLDER / NAME).put(tmp_path / "w.safetensors")
    return fetched(FOLDER, ["vae/*"], tmp_path / "cache", Reporter(), 0) / NAME


def numbers(tmp_path: Path, shape: tuple[int, ...] = SHAPE) -> tuple[Any, Any]:
    """A tensor, and the one that stays in the store."""
    count = int(np.prod(shape))
    tensor = torch.arange(count, dtype=torch.float32).reshape(shape)
    with unread("x"):
        found = load_file(left(tmp_path, {"before": torch.ones(3), "w": tensor}))
    assert isinstance(found["w"], StoredTensor)
    return tensor, found["w"].stored


def test_every_part_is_what_it_is_and_nothing_else_is_fetched(
    tmp_path: Path, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_parts, "GAP", 0)
    monkeypatch.setattr(file_parts, "BLOCK", 48)
    monkeypatch.setattr(file_parts, "GROUP", 100)
    tensor, stored = numbers(tmp_path)
    header = requests.bytes
    assert header == len(LeftInStore.by(stored.file).header)  # type: ignore[union-attr]
    bounds = [[slice(0, n), slice(0, 2), slice(1, n), slice(n - 1, n)] for n in SHAPE]
    for index in itertools.product(*bounds):
        before = requests.bytes
        assert torch.equal(stored.read(index), tensor[index]), index
        taken = 4 * tensor[index].numel()
        assert requests.bytes - before == taken, index
    assert stored.bytes_read == requests.bytes - header
    assert max(end - start for start, end in requests.made[2:]) <= 48


def test_short_gaps_are_fetched_with_what_is_around_them(
    tmp_path: Path, requests: Requests
) -> None:
    """A request for each row of a narrow column would take hours."""
    tensor, stored = numbers(tmp_path, (100, 64))
    requests.made.clear()
    index = slice(0, 100), slice(8, 16)
    assert torch.equal(stored.read(index), tensor[index])
    assert len(requests.made) == 1
    assert stored.bytes_read == requests.bytes == 4 * (99 * 64 + 8)


def test_tensors_of_every_kind_are_read(tmp_path: Path, requests: Requests) -> None:
    given = {
        "scalar": torch.tensor(3.5),
        "halves": torch.ones(5, 2, dtype=torch.bfloat16),
        "none": torch.ones(0, 4),
        "other": torch.ones(8, dtype=torch.complex64),  # read by safetensors
    }
    file = left(tmp_path, given)
    with unread("x"):
        found = load_file(file)
    assert isinstance(found["halves"], StoredTensor)
    module = torch.nn.Module()
    for name, tensor in found.items():
        module.register_buffer(name, tensor)
    read_whole(module)
    for name, tensor in given.items():
        assert torch.equal(getattr(module, name), tensor), name


def test_no_other_reader_takes_the_file_for_the_object(
    tmp_path: Path, requests: Requests
) -> None:
    file = left(tmp_path, {"w": torch.ones(4)})
    with pytest.raises(SafetensorError), safe_open(file, framework="pt"):
        pass


@pytest.mark.parametrize("gone", [True, False])
def test_an_object_that_is_another_one_since_is_refused(
    gone: bool, tmp_path: Path, requests: Requests
) -> None:
    _, stored = numbers(tmp_path)
    (FOLDER / NAME).remove()
    if not gone:
        (FOLDER / NAME).write_bytes(bytes(10_000))
    what = "is gone" if gone else "has changed"
    with pytest.raises(StoreError) as caught:
        stored.whole()
    assert str(caught.value) == (
        f"{FOLDER / NAME}: {what} since its header was read; let the folder be as it "
        "is while a run reads it, and run again"
    )


def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, read = tmp_path / "w.safetensors", os.preadv
    save_file({"w": torch.ones(8)}, file)
    with unread("x"):
        stored = load_file(file)["w"].stored
    whole = file.read_bytes()

    def changed(*given: Any) -> int:
        file.write_bytes(whole[:-4] + bytes(4))
        os.utime(file, ns=(0, 0))
        return read(*given)

    monkeypatch.setattr(os, "preadv", changed)
    with pytest.raises(WeightsError, match="has changed since"):
        stored.whole()


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 100, (90).to_bytes(8, "little")],
    ids=["empty", "other", "long"],
)
def test_an_object_that_is_no_safetensors_file_is_refused(
    data: bytes, tmp_path: Path, requests: Requests
) -> None:
    (FOLDER / NAME).write_bytes(data + b"1")
    with pytest.raises(WeightsError, match=r"w.safetensors is truncated or not a safe"):
        fetched(FOLDER, ["*"], tmp_path, Reporter(), 0)


def test_a_cut_object_is_refused_by_its_header(
    tmp_path: Path, requests: Requests
) -> None:
    file = left(tmp_path, {"w": torch.ones(4)})
    whole = file_of(tmp_path)
    (FOLDER / NAME).write_bytes(whole[:-4])
    file = fetched(FOLDER, ["vae/*"], tmp_path / "cache", Reporter(), 0) / NAME
    with pytest.raises(SafetensorError):
        file_parts.opened(file, framework="pt")


def file_of(tmp_path: Path) -> bytes:
    return (tmp_path / "w.safetensors").read_bytes()


def test_a_copy_of_this_machine_is_used_and_one_process_makes_one(
    tmp_path: Path, requests: Requests
) -> None:
    file, cache = left(tmp_path, {"w": torch.ones(4)}), tmp_path / "cache"
    assert LeftInStore.by(file)
    assert json.loads(file.read_bytes())["left"] == [
        FOLDER.scheme,
        f"{FOLDER.key}/{NAME}",
    ]
    for largest in (None, 0):
        fetched(FOLDER, ["vae/*"], cache, Reporter(), largest)
        assert file.read_bytes() == file_of(tmp_path)
    small = fetched(FOLDER, ["vae/*"], tmp_path / "other", Reporter(), 10_000) / NAME
    assert LeftInStore.by(small) is None
