"""Devices that share heads: keys go round a ring, and no device holds all of them."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.core.layers.sequences import active_on, arrays_of, attend
from tests.kernels.attention.oracle import numpy_attention, worst
from tests.sweeps import sweep
from tests.tolerances import TOLERANCES
from tpuport.core import compat
from tpuport.core.layers import ring
from tpuport.core.layers.ring import (
    Ring,
    ring_attention,
    too_short,
)
from tpuport.core.layers.sequence_parallel import sequence_attention
from tpuport.kernels.attention.choice import AttentionChoice

SPLASH = AttentionChoice.parse("splash:block_q=128;block_kv=128;block_kv_compute=128")


# Keys of the items that count; none of the second one.
SOME = (33, 0)


@pytest.mark.parametrize(
    ("devices", "heads", "lengths"),
    sweep(
        # Rings of two, three and eight; of five, in a loop; none; and rings of devices
        # that exchange tokens for heads too: two by two, two by four, four by two.
        [
            (2, 1, None),
            (3, 2, None),
            (8, 3, None),
            (5, 6, SOME),
            (3, 6, SOME),
            (4, 2, None),
            (4, 3, SOME),
            (8, 1, SOME),
            (8, 6, SOME),
        ],
        itertools.product([2, 3, 4, 5, 8], [1, 2, 3, 6], [None, SOME]),
    ),
)
def test_every_degree(devices: int, heads: int, lengths: Any) -> None:
    active = active_on(f"sp={devices}")
    kv_len = 41
    padded = -(-kv_len // devices) * devices
    batch = len(lengths) if lengths else 1
    counts = lengths or (kv_len,) * batch
    arrays = arrays_of(batch, heads, padded, counts)
    want = numpy_attention(*arrays, kv_lengths=np.asarray(counts))
    got = attend(active, arrays, kv_len=kv_len, lengths=lengths)
    got, want = got[:, :, :kv_len], want[:, :, :kv_len]
    assert worst(got, want) < TOLERANCES["attention float32"]
    for item, count in enumerate(counts):
        if count == 0:
            np.testing.assert_array_equal(got[item], 0)
    (record,) = active.context.records
    assert record.ulysses * record.ring == devices
    assert record.ring_keys == ("passed" if record.ring > 1 else None)


@pytest.mark.parametrize(
    ("heads", "lengths"),
    sweep([(1, None), (2, SOME)], itertools.product([1, 2, 4], [None, SOME])),
)
def test_devices_of_any_order_hold_the_tokens_of_their_places(
    heads: int, lengths: Any
) -> None:
    """As on a slice whose places are not in the order of its device numbers."""
    devices = [jax.devices()[i] for i in (3, 6, 0, 5, 1, 7, 4, 2)]
    active = active_on("sp=8", devices=devices)
    assert active.context.mesh is not None
    assert list(active.context.mesh.devices.flat) == devices
    counts = lengths or (41,)
    arrays = arrays_of(len(counts), heads, 48, counts)
    want = numpy_attention(*arrays, kv_lengths=np.asarray(counts))
    got = attend(active, arrays, kv_len=41, lengths=lengths)
    assert worst(got[:, :, :41], want[:, :, :41]) < (TOLERANCES["attention float32"])
    assert active.context.records[0].ring == 8 // (heads * len(counts))


def test_bfloat16_is_rounded_once() -> None:
    active = active_on("sp=8")
    arrays = arrays_of(1, 1, 48, (41,), dtype="bfloat16")
    got = attend(active, arrays, kv_len=41)
    assert got.dtype == jnp.bfloat16
    want = numpy_attention(*arrays, kv_lengths=np.asarray([41]))
    assert worst(got, want) < TOLERANCES["attention bfloat16"]
    assert active.context.records[0].ring == 8


@pytest.mark.parametrize("written_out", [2, 8])
def test_rounds_in_a_loop_and_written_out(
    written_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "MOST_WRITTEN_OUT", written_out)
    arrays = arrays_of(2, 1, 48, (41, 7))
    got = attend(active_on("sp=6"), arrays, kv_len=41, lengths=(41, 7))
    want = numpy_attention(*arrays, kv_lengths=np.asarray([41, 7]))
    assert worst(got, want) < TOLERANCES["attention float32"]


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_the_mean_of_all_keys_is_subtracted_from_every_chunk(
    implementation: str,
) -> None:
    # Keys far from the origin, more so from chunk to chunk: were each chunk to lose its
    # own mean, the softmax would be another one.
    q, k, v = arrays_of(1, 1, 48, (41,))
    k = k + jnp.linspace(0, 8, 48)[:, None]
    active = active_on("sp=4", f"{implementation}:k_smooth=on")
    got = attend(active, [q, k, v], kv_len=41)
    want = numpy_attention(q, k, v, kv_lengths=np.asarray([41]))
    assert worst(got, want) < TOLERANCES["attention float32"]
    (record,) = active.context.records
    assert (record.k_smooth, record.ring_keys) == (True, "passed")


@pytest.mark.parametrize(
    ("devices", "lengths", "window"),
    sweep(
        [
            (8, None, (0, 0)),
            (8, (41, 19), (3, 5)),
            (3, None, (15, 0)),
            (8, None, (0, 30)),
            (3, (41, 19), (60, 60)),
        ],
        itertools.product(
            [3, 8],
            [None, (41, 19)],
            [(0, 0), (3, 5), (15, 0), (0, 30), (60, 60)],
        ),
    ),
)
def test_a_window_is_met_by_gathered_keys(
    devices: int, lengths: Any, window: tuple[int, int]
) -> None:
    left, right = window
    active = active_on(f"sp={devices}", f"auto:window={left},{right};k_smooth=on")
    counts = lengths or (41,)
    arrays = arrays_of(len(counts), 1, 48, counts)
    distance = np.arange(48) - np.arange(48)[:, None]
    mask = (-left <= distance) & (distance <= right)
    want = numpy_attention(*arrays, mask=mask, kv_lengths=np.asarray(counts))
    got = attend(active, arrays, kv_len=41, lengths=lengths)
    (record,) = active.context.records
    if record.ring > 1:
        assert record.ring_keys == "gathered"
        assert "window" in record.reason
    assert worst(got[:, :, :41], want[:, :, :41]) < TOLERANCES["attention float32"]


def compiled(devices: int, padded: int, implementation: str) -> Any:
    active = active_on(f"sp={devices}", implementation)
    assert active.context.mesh is not None
    split = NamedSharding(active.context.mesh, PartitionSpec(None, None, "sp", None))
    struct = jax.ShapeDtypeStruct((1, 1, padded, 8), jnp.float32, sharding=split)

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return sequence_attention(active, q, k, v, kv_len=padded, feature_major=False)

    return jax.jit(call).lower(struct, struct, struct).compile()


def test_no_device_ever_holds_all_keys() -> None:
    # 8 devices, 16384 tokens of 8 floats: all keys and values are 1 MiB, a chunk of
    # both an eighth.
    program = compiled(8, 16384, "blockwise:block_q=64;block_kv=64")
    text = program.as_text()
    assert "collective-permute" in text
    assert "all-gather" not in text
    widest = [
        np.prod([int(n) for n in dims.split(",") if n])
        for dims in re.findall(r"f32\[([\d,]+)\]", text)
    ]
    assert max(widest) < 16384 * 8
    held = program.memory_analysis().temp_size_in_bytes
    assert held < 1 << 20
    # What gathers them does hold them, and is seen to.
    gathered = compiled(8, 16384, "blockwise:window=16384,16384")
    assert "all-gather" in gathered.as_text()
    assert gathered.memory_analysis().temp_size_in_bytes > 1 << 20


@pytest.mark.parametrize(
    ("ring_size", "groups"), [(2, [[0, 2], [1, 3]]), (4, [[0, 1, 2, 3]])]
)
def test_our_kernel_in_a_ring(ring_size: int, groups: list[list[int]]) -> None:
    """Interpreted, in chunks of 160 tokens, of which one may have the largest keys."""
    active = active_on(f"sp={sum(map(len, groups))}")
    chunk = 160
    tokens = chunk * ring_size
    rng = np.random.default_rng(5)
    shape = (len(groups), 1, 16, tokens)
    q, k, v = (rng.standard_normal(shape, np.float32) for _ in range(3))
    lengths = np.asarray([tokens - 37] * len(groups), np.int32)
    v[..., tokens - 37 :] = 0

    def spread(x: np.ndarray) -> np.ndarray:
        """Tokens of each group in the order of the places of its devices."""
        out = np.zeros((1, 1, 16, chunk * sum(map(len, groups))), np.float32)
        for group, row in zip(groups, x, strict=True):
            for index, place in enumerate(group):
                part = row[None, :, :, index * chunk : (index + 1) * chunk]
                out[..., place * chunk : (place + 1) * chunk] = part
        return out

    def on_device(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        place = jax.lax.axis_index("sp")
        return ring_attention(
            Ring(axis="sp", groups=groups, rank=place // len(groups)),
            q,
            k,
            v,
            kv_len=tokens,
            lengths=jnp.asarray(lengths[:1]),
            implementation=SPLASH,
            platform="cpu",
            interpret=True,
        )

    spec = PartitionSpec(None, None, None, "sp")
    call = jax.jit(
        compat.shard_map(
            on_device, mesh=active.context.mesh, in_specs=(spec,) * 3, out_specs=spec
        )
    )
    for size in (1, 12):
        k[..., chunk:] *= size
        got = call(*(spread(x) for x in (q, k, v)))
        turned = (x.swapaxes(2, 3) for x in (q, k, v))
        want = numpy_attention(*turned, kv_lengths=lengths).swapaxes(2, 3)
        wanted = "attention float32" + (" large scores" if size > 1 else "")
        assert worst(got, spread(want)) < TOLERANCES[wanted], size


def test_short_chunks_are_gathered_on_a_tpu() -> None:
    # Time with work grows with the square of a chunk, on the way with the chunk.
    assert too_short(10240, 64, 2, "v6e") is None
    why = too_short(2560, 64, 2, "v6e")
    assert why is not None
    assert "0.50 of the time" in why
    # Twice the bytes, and the same time in the matrix unit.
    assert too_short(8192, 64, 2, "v6e") is None
    assert too_short(8192, 64, 4, "v6e") is not None
    assert too_short(8192, 128, 2, "v6e") is not None
