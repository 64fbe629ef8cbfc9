"""Parts of a tensor of a safetensors file, which is on this machine or in a store."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors
from fsspec.utils import merge_offset_ranges

from tpuport.core.files.stores import LeftInStore
from tpuport.errors import damaged

Index = tuple[slice, ...]
"""A part of a tensor: a start and a stop for each of its dims."""

#: Of an object: bytes between two runs that are fetched with both, of a request, and of
#: the requests that are in flight for a tensor.
GAP, BLOCK, GROUP = 64 << 10, 4 << 20, 32 << 20
#: Tensors of a store that are fetched at a time.
IN_FLIGHT = 8


class Bytes(Protocol):
    """What a safetensors file holds."""

    def head(self, count: int) -> bytes:
        """The first bytes, of the header alone."""

    def part(
        self, start: int, shape: tuple[int, ...], size: int, index: Index
    ) -> tuple[np.ndarray, int]:
        """A part of a tensor, in memory of its own, and the bytes that were read.

        Args:
            start: the first byte of the tensor.
            shape: of the whole tensor.
            size: bytes of an element.

        Returns:
            the part as unsigned integers.

        Raises:
            WeightsError: the file has changed since it was opened.
            StoreError: the same of an object, or the store does not answer.
        """


def opened(file: Path, **how: Any) -> Any:
    """``safetensors.safe_open``, also of a file that stands for an object.

    The header is checked, and that the size is what the header tells. Of an object only
    names and shapes can be asked: the numbers are zeros.
    """
    left = LeftInStore.by(file)
    if left is None:
        return safetensors.safe_open(file, **how)
    with tempfile.NamedTemporaryFile(suffix=file.suffix) as hollow:
        hollow.write(left.header)
        hollow.truncate(left.size)
        hollow.flush()
        return safetensors.safe_open(hollow.name, **how)


def bytes_of(source: str, file: Path) -> Bytes:
    """The content of a file.

    Args:
        source: what the user named, for messages.
    """
    left = LeftInStore.by(file)
    return MappedFile(source, file) if left is None else FileInStore(left)


class MappedFile:
    """A file of this machine."""

    def __init__(self, source: str, file: Path) -> None:
        self._source, self._file = source, file
        self._descriptor = os.open(file, os.O_RDONLY)
        self._mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        self._state = _state(self._descriptor)
        weakref.finalize(self._mapped, os.close, self._descriptor)
        if hasattr(os, "posix_fadvise"):  # the system reads nothing ahead
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def head(self, count: int) -> bytes:
        """See :class:`Bytes`."""
        return self._mapped[:count]

    def part(
        self, start: int, shape: tuple[int, ...], size: int, index: Index
    ) -> tuple[np.ndarray, int]:
        """See :class:`Bytes`."""
        self._check_same()  # pages behind the end of a file that was cut cannot be read
        count = math.prod(shape)
        numbers = np.frombuffer(self._mapped, f"u{size}", count, start)
        given: np.ndarray = np.asarray(numbers.reshape(shape))
        if index:  # an empty one would make a scalar's copy
            given = given[index]
        if given.flags.c_contiguous and given.size:
            part = np.empty(given.shape, given.dtype)
            first, base = (a.__array_interface__["data"][0] for a in (given, numbers))
            self._read_into(part, start + first - base)
        else:
            part = np.array(given)
            # The pages stay in the system's cache; the process need not hold them.
            first = start - start % mmap.PAGESIZE
            end = start + count * size
            self._mapped.madvise(mmap.MADV_DONTNEED, first, end - first)
        self._check_same()
        return part, part.nbytes

    def _check_same(self) -> None:
        if _state(self._descriptor) != self._state:
            raise damaged(
                f"{self._source}: {self._file} has changed since", "the folder"
            )

    def _read_into(self, part: np.ndarray, place: int) -> None:
        """Fill an array with the bytes from a place of the file on, and read no others.

        A fault for each page of a map takes several times as long.
        """
        left = memoryview(part.reshape(-1).view(np.uint8).data)
        while left:
            count = os.preadv(self._descriptor, [left], place)
            if not count:
                raise damaged(
                    f"{self._source}: {self._file} is cut short", "the folder"
                )
            left, place = left[count:], place + count


class FileInStore:
    """An object of a store, of which a part is fetched by its ranges."""

    def __init__(self, left: LeftInStore) -> None:
        self._left = left

    def head(self, count: int) -> bytes:
        """See :class:`Bytes`."""
        return self._left.header[:count]

    def between(self, start: int, end: int) -> bytes:
        """All bytes between two places."""
        return self._left.read([(start, end)])[0] if start < end else b""

    def part(
        self, start: int, shape: tuple[int, ...], size: int, index: Index
    ) -> tuple[np.ndarray, int]:
        """See :class:`Bytes`."""
        bounds = [one.indices(n)[:2] for one, n in zip(index, shape, strict=True)]
        part = np.empty([stop - first for first, stop in bounds], f"u{size}")
        runs = _runs(start, shape, size, bounds)
        into, taken = part.reshape(-1).view(np.uint8), 0
        places = [(a, min(a + BLOCK, z)) for s, z in runs for a in range(s, z, BLOCK)]
        done, at = 0, 0
        for group in _groups(places):
            for (first, _), data in zip(group, self._left.read(group), strict=True):
                taken += len(data)
                end = first + len(data)
                while at < len(places) and places[at][1] <= end:
                    low, high = places[at]
                    piece = data[low - first : high - first]
                    into[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
                    done, at = done + len(piece), at + 1
        return part, taken


def _runs(
    start: int, shape: tuple[int, ...], size: int, bounds: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Where the bytes of a part start and end, in the order of its elements."""
    whole = [pair == (0, n) for pair, n in zip(bounds, shape, strict=True)]
    # The last dim that is not whole, and all after that, are in one piece.
    last = max((dim for dim, all_of in enumerate(whole) if not all_of), default=0)
    offsets = np.array([start], np.int64)
    strides = [size * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for (first, stop), stride in zip(bounds[:last], strides, strict=False):
        steps = np.arange(first, stop, dtype=np.int64) * stride
        offsets = (offsets[:, None] + steps).reshape(-1)
    if not shape:
        return [(start, start + size)]
    first, stop = bounds[last]
    low, high = first * strides[last], stop * strides[last]
    return [(int(one) + low, int(one) + high) for one in offsets]


def _groups(places: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Requests for some places, in groups of up to :data:`GROUP` bytes."""
    starts, ends = ([*each] for each in zip(*places, strict=True))
    same = [""] * len(starts)
    _, starts, ends = merge_offset_ranges(same, starts, ends, GAP, BLOCK)
    found: list[list[tuple[int, int]]] = [[]]
    total = 0
    for start, end in zip(starts, ends, strict=True):
        if found[-1] and total + end - start > GROUP:
            found.append([])
            total = 0
        found[-1].append((start, end))
        total += end - start
    return found


def _state(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns
