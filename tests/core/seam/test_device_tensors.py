"""Tensors that stay on the devices until host code reads them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tpuport.core.seam.device_tensors import DeviceTensor, Value
from tpuport.core.seam.ported import seam_of

NUMBERS = np.arange(12, dtype=np.float32).reshape(3, 4)


def made() -> DeviceTensor:
    return DeviceTensor((3, 4), torch.float32, Value(NUMBERS), read=torch.tensor)


def was_read(tensor: DeviceTensor) -> bool:
    return tensor._host is not None


def test_shape_and_dtype_are_known_without_a_copy() -> None:
    tensor = made()
    assert isinstance(tensor, torch.Tensor)
    assert (tensor.shape, tensor.size(1), tensor.ndim) == ((3, 4), 4, 2)
    assert tensor.dtype == torch.float32
    assert tensor.device.type == "cpu"
    assert not was_read(tensor)
    assert float(tensor.sum()) == NUMBERS.sum()
    assert was_read(tensor)


READS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x.numpy(),
    "array": np.asarray,
    "copied": copy.deepcopy,
    "joined": lambda x: torch.cat([x, x])[:3],
    "kept": lambda x: torch.zeros(3, 4).copy_(x),
    "one by one": lambda x: torch.stack(list(x)),
}


@pytest.mark.parametrize("read", READS)
def test_host_code_reads_the_numbers(read: str) -> None:
    assert np.array_equal(np.asarray(READS[read](made())), NUMBERS)


@pytest.mark.parametrize(
    "write", [lambda x: x.add_(1), lambda x: x[0].zero_(), lambda x: x.fill_(2)]
)
def test_what_host_code_writes_is_no_longer_what_is_on_the_devices(
    write: Callable[[Any], Any],
) -> None:
    tensor = made()
    float(tensor.sum())
    assert tensor.on_devices is NUMBERS
    write(tensor)
    assert tensor.on_devices is None
    assert not np.array_equal(tensor.numpy(), NUMBERS)


class Frames(torch.nn.Module):
    """Convolves a frame and the frame before, as a decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Conv3d(3, 3, (2, 3, 3), padding=(0, 1, 1))

    def forward(self, frame: torch.Tensor, cache: list[Any]) -> torch.Tensor:
        before = torch.zeros_like(frame) if cache[0] is None else cache[0]
        cache[0] = frame * 2
        return self.inner(torch.cat([before, frame], 2))


@torch.no_grad()
@pytest.mark.parametrize(("mesh", "part"), [("sp=8", (24, 4)), ("sp=3", (8, 32))])
def test_a_cache_stays_in_parts_on_the_devices(
    mesh: str, part: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    module = Frames()
    ported = tpuport.port(module, mesh=mesh)
    caches: tuple[list[Any], list[Any]] = ([None], [None])
    for call in range(3):
        frame = torch.randn(1, 3, 1, 24, 32)
        found, expected = (
            one(frame, cache)
            for one, cache in zip((ported, module), caches, strict=True)
        )
        assert float((found - expected).abs().max()) < 1e-5, call
        kept = caches[0][0]
        assert isinstance(kept, DeviceTensor)
        assert not was_read(kept)
        shards = {shard.data.shape[-2:] for shard in kept.on_devices.addressable_shards}
        assert shards == {part}
    (entry,) = seam_of(ported).entries.values()
    assert len(entry.programs) == 2


@pytest.mark.parametrize("asks", ["host", "devices", "nobody"])
def test_numbers_are_had_later_if_somebody_asked(asks: str) -> None:
    """Also after the host wrote to its copy; of what nobody holds, nothing is read."""
    tensor = made()
    later = tensor.later()
    assert not was_read(tensor)
    held = later()
    assert held is not None
    assert torch.equal(held, torch.tensor(NUMBERS))
    if asks == "host":
        tensor.add_(1)
    elif asks == "devices":
        assert tensor.on_devices is NUMBERS
    del tensor
    found = later()
    assert (found is None) == (asks == "nobody")
    assert found is None or torch.equal(found, torch.tensor(NUMBERS))
