"""Attention of a padded sequence whose tokens are split over devices."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.core.layers.sequences import active_on, arrays_of, attend
from tests.kernels.attention.oracle import numpy_attention, worst
from tests.sweeps import sweep
from tests.tolerances import TOLERANCES
from tpuport.core.layers.ring import too_short
from tpuport.core.layers.sequence_parallel import (
    Degrees,
    degrees,
    degrees_of,
    padded_length,
)
from tpuport.kernels.attention.splash_blocks import default_blocks


@pytest.mark.parametrize(
    ("heads", "devices", "expected"),
    [
        (48, 1, Degrees(1, 1)),
        (48, 8, Degrees(8, 1)),
        # 64 in place of 60 is little enough.
        (60, 8, Degrees(8, 1)),
        # 40 in place of 30 is not, two groups of devices share heads.
        (30, 20, Degrees(10, 2)),
        (48, 128, Degrees(16, 8)),
        (4, 3, Degrees(1, 3)),
        (16, 5, Degrees(1, 5)),
    ],
)
def test_degrees(heads: int, devices: int, expected: Degrees) -> None:
    assert degrees(heads, devices) == expected


@pytest.mark.parametrize("length", [226, 17776, 20000, 39826, 113600])
@pytest.mark.parametrize("devices", [1, 3, 4, 5, 8, 16])
def test_padding_for_a_tpu_makes_whole_blocks(length: int, devices: int) -> None:
    padded = padded_length(length, devices, platform="tpu", head_dim=64, chip="v6e")
    assert padded >= length
    assert padded % (128 * devices) == 0
    if length > 10000:
        assert padded <= 1.08 * length
        blocks = default_blocks(padded, padded, 64, chip="v6e")
        assert padded % blocks.kv == 0


@pytest.mark.parametrize("devices", [3, 32, 64, 128])
def test_padding_makes_whole_blocks_of_what_a_ring_meets(devices: int) -> None:
    ring = degrees(16, devices).ring
    assert ring > 1
    length = 113600
    padded = padded_length(
        length, devices, platform="tpu", head_dim=128, chip="v6e", ring=ring
    )
    assert length <= padded <= 1.02 * length
    assert padded % (128 * devices) == 0
    chunk = padded // ring
    blocks = default_blocks(chunk, chunk, 128, chip="v6e")
    assert chunk % blocks.q == chunk % blocks.kv == 0
    assert blocks.kv_compute == 256
    if devices == 32:
        # Whole blocks of all tokens are none of a chunk: 37 of 3072, on two devices.
        assert padded_length(length, 4, platform="tpu", head_dim=128, chip="v6e") % (
            3072 * ring
        )


def test_chunks_too_short_for_a_ring_meet_whole_blocks_of_all_keys() -> None:
    # Of 16 devices with two heads' worth of them, each has 2560 queries.
    padded = padded_length(20480, 8, platform="tpu", head_dim=64, chip="v6e", ring=8)
    assert padded == 20480
    assert too_short(padded // 8, 64, 2, "v6e") is not None
    blocks = default_blocks(padded // 8, padded, 64, chip="v6e")
    assert (blocks.q, padded % blocks.kv) == (2560, 0)
    assert blocks.kv > padded // 8


def test_padding_is_for_the_chunks_of_the_devices_that_share_heads() -> None:
    """What a sequence asks for is what attention then runs on."""
    active = active_on("dp=2,sp=4")
    # Two heads on four devices: pairs share one. With another item they need not.
    assert degrees_of(active, 2, 2) == Degrees(2, 2)
    assert degrees_of(active, 4, 2) == Degrees(4, 1)


def test_padding_elsewhere_makes_equal_parts() -> None:
    assert padded_length(100, 8, platform="cpu", head_dim=64, chip=None) == 104
    assert padded_length(104, 8, platform="cpu", head_dim=64, chip=None) == 104


MESHES = ["dp=1", "sp=2", "sp=8", "dp=2,sp=3", "sp=5", "sp=2,tp=2", "dp=2,sp=2,tp=2"]


@pytest.mark.parametrize(
    ("mesh", "lengths", "feature_major"),
    sweep(
        [
            ("dp=1", (9, 33), False),
            ("dp=1", None, True),
            ("sp=2", (9, 33), True),
            ("sp=8", None, True),
            ("dp=2,sp=3", (9, 33), True),
            ("sp=5", None, False),
            ("sp=2,tp=2", (9, 33), False),
            ("dp=2,sp=2,tp=2", (9, 33), True),
            ("dp=2,sp=2,tp=2", None, False),
        ],
        itertools.product(MESHES, [None, (9, 33)], [False, True]),
    ),
)
def test_equals_attention_on_one_array(
    mesh: str, lengths: Any, feature_major: bool
) -> None:
    active = active_on(mesh)
    sp = active.axis_size("sp")
    kv_len = 37
    padded = -(-kv_len // sp) * sp
    counts = lengths or (kv_len, kv_len)
    arrays = arrays_of(2, 4, padded, counts)
    want = numpy_attention(*arrays, kv_lengths=np.asarray(counts))
    got = attend(
        active, arrays, kv_len=kv_len, lengths=lengths, feature_major=feature_major
    )
    got, want = got[:, :, :kv_len], want[:, :, :kv_len]
    assert worst(got, want) < TOLERANCES["attention float32"]
    (record,) = active.context.records
    assert record.ulysses * record.ring == sp
    assert record.padded == padded
