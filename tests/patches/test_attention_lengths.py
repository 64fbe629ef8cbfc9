"""Attention by lengths and frames is attention under the mask they stand for.

At the end: what torchax does without the override of attention.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.sharding import NamedSharding, PartitionSpec

from tests.core.layers.test_attention import MESHES, TOLERANCE, context, sizes_in
from tests.patches.tools import by_torchax, model_runtime, traced
from tests.sweeps import sweep
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.layers.exchanged_attention import EXCHANGED_ATTENTION
from tpuport.core.tracing.context import AttentionRecord, OpContext
from tpuport.patches.valid_tokens import length_attention

TOKENS = 12


def tensors(
    batch: int, heads: int = 8, tokens: int = TOKENS, queries: int | None = None
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    counts = (tokens if queries is None else queries, tokens, tokens)
    return [torch.randn(batch, heads, n, 8, generator=generator) for n in counts]


def mask_of(
    batch: int,
    queries: int,
    keys: int,
    lengths: list[int] | None,
    frame_tokens: int | None,
) -> torch.Tensor:
    """The mask they stand for, element by element."""
    mask = torch.zeros(batch, 1, queries, keys, dtype=torch.bool)
    for b in range(batch):
        for i in range(queries):
            for j in range(keys):
                counts = lengths is None or j < lengths[b]
                seen = frame_tokens is None or j // frame_tokens <= i // frame_tokens
                mask[b, 0, i, j] = counts and seen
    return mask


def assert_is_masked(
    lengths: list[int] | None,
    frame_tokens: int | None,
    *,
    on: OpContext | None = None,
    queries: int | None = None,
    scale: float | None = None,
) -> None:
    """The compiled call against torch under the mask."""
    batch = 2 if lengths is None else len(lengths)
    q, k, v = tensors(batch, queries=queries)
    mask = mask_of(batch, q.shape[2], TOKENS, lengths, frame_tokens)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    def call(q: Any, k: Any, v: Any, lengths: Any = None) -> Any:
        return length_attention(
            on or context(), q, k, v, lengths, frame_tokens, scale=scale
        )

    arrays = [jnp.asarray(x.numpy()) for x in (q, k, v)]
    if lengths is not None:
        arrays.append(jnp.asarray(lengths))
    found = to_torch(jax.jit(call)(*arrays))
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


CALLS: dict[str, tuple[list[int] | None, int | None]] = {
    "nothing": (None, None),
    "lengths": ([7, 12], None),
    "one item": ([5], None),
    "no key and too many": ([0, 99], None),
    "frames": (None, 4),
    "frames of one token": (None, 1),
    "one frame": (None, TOKENS),
    "frames and lengths": ([7, 12], 3),
    "frames and no key": ([0, 2], 3),
    "causal and lengths": ([7, 0], 1),
}


@pytest.mark.parametrize(
    ("name", "implementation"),
    sweep(
        [
            *((name, "reference") for name in CALLS),
            ("no key and too many", "blockwise"),
            ("frames and lengths", "blockwise"),
            ("causal and lengths", "blockwise"),
        ],
        itertools.product(CALLS, ["reference", "blockwise"]),
    ),
)
def test_it_is_attention_under_the_mask(name: str, implementation: str) -> None:
    assert_is_masked(*CALLS[name], on=context(implementation=implementation))


@pytest.mark.parametrize(
    ("frame_tokens", "scale"),
    sweep([(None, 0.3), (4, 1.0)], itertools.product([None, 4], [0.3, 1.0])),
)
def test_the_scale_is_honoured(frame_tokens: int | None, scale: float) -> None:
    assert_is_masked([7, 12], frame_tokens, scale=scale)


@pytest.mark.parametrize(
    ("mesh", "name"),
    sweep(
        [
            ((2, 2, 2), "lengths"),
            ((2, 2, 2), "frames"),
            ((2, 2, 2), "frames and lengths"),
            ((1, 8, 1), "frames and lengths"),
            ((2, 1, 4), "lengths"),
            ((1, 1, 8), "frames"),
            ((8, 1, 1), "lengths"),
        ],
        itertools.product(MESHES, ["lengths", "frames", "frames and lengths"]),
    ),
    ids=str,
)
def test_a_mesh_gives_what_one_device_gives(
    mesh: tuple[int, int, int], name: str
) -> None:
    assert_is_masked(*CALLS[name], on=context(mesh))


@pytest.mark.parametrize(
    "mesh", sweep([(1, 8, 1), (2, 2, 2)], MESHES, single=True), ids=str
)
def test_an_odd_number_of_queries_on_a_mesh(mesh: tuple[int, int, int]) -> None:
    assert_is_masked([7, 12], None, queries=13, on=context(mesh))


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8"])
def test_any_integers_are_lengths(dtype: str) -> None:
    arrays = [x.numpy() for x in tensors(2)]
    call = jax.jit(functools.partial(length_attention, context()))
    plain = call(*arrays, np.asarray([3, 8], np.int64))
    found = call(*arrays, np.asarray([3, 8], dtype))
    assert np.array_equal(found, plain)


def test_grouped_heads() -> None:
    q = tensors(2, heads=8)[0]
    k, v = tensors(2, heads=2)[1:]
    lengths = torch.tensor([7, 12])
    mask = mask_of(2, TOKENS, TOKENS, [7, 12], None)
    wide_k, wide_v = (x.repeat_interleave(4, dim=1) for x in (k, v))
    expected = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=mask)
    call = jax.jit(functools.partial(length_attention, context((1, 1, 2))))
    found = to_torch(call(*(x.numpy() for x in (q, k, v, lengths))))
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


# --- records


def test_records_tell_lengths_and_frames() -> None:
    on = context((2, 2, 2))
    arrays = [x.numpy() for x in tensors(2)]
    call = functools.partial(length_attention, on)
    # A call is noted as it is traced.
    for _ in range(2):
        jax.eval_shape(functools.partial(call), *arrays, np.asarray([3, 8]))
        jax.eval_shape(functools.partial(call, frame_tokens=3), *arrays)
    jax.eval_shape(functools.partial(call, frame_tokens=1), *arrays)
    shape = (2, 8, TOKENS, 8)
    reason = (
        "the score matrix is small enough to be built whole; not splash: it is for "
        "TPU; the platform is 'cpu'"
    )
    expected = [
        (True, None, ("dp", "tp", "sp", None)),
        (False, 3, ("dp", "tp", "sp", None)),
        (False, 1, ("dp", "tp", None, None)),
    ]
    assert on.records == [
        AttentionRecord(
            query=shape,
            key=shape,
            implementation="reference",
            reason=reason,
            split=split,
            key_lengths=key_lengths,
            frame_tokens=frame_tokens,
            causal=frame_tokens == 1,
        )
        for key_lengths, frame_tokens, split in expected
    ]


def test_one_frame_at_a_time_decides_the_implementation() -> None:
    """600 x 600 scores would be too many, 60 x 600 are not."""
    on = context()
    x = np.zeros((1, 1, 600, 8), np.float32)
    call = functools.partial(length_attention, on)
    jax.eval_shape(call, x, x, x)
    jax.eval_shape(functools.partial(call, frame_tokens=60), x, x, x)
    assert [r.implementation for r in on.records] == ["blockwise", "reference"]


# --- refusals


def refusals() -> dict[str, tuple[list[tuple[int, ...]], dict[str, Any], str]]:
    square: list[tuple[int, ...]] = [(2, 4, 6, 8)] * 3
    return {
        "rank": ([(4, 6, 8)] * 3, {}, r"takes \[B, H, L, D\]; got query \[4, 6, 8\]"),
        "float lengths": (
            square,
            {"key_lengths": np.ones(2, np.float32)},
            r"integers of shape \[2\]; got .*float32",
        ),
        "bool lengths": (square, {"key_lengths": np.ones(2, bool)}, "got .*bool"),
        "too few lengths": (
            square,
            {"key_lengths": np.ones(1, np.int32)},
            r"of shape \[1\]",
        ),
        "lengths of tokens": (
            square,
            {"key_lengths": np.ones((2, 6), np.int32)},
            r"of shape \[2, 6\]",
        ),
        "frames of nothing": (square, {"frame_tokens": 0}, "frame_tokens=0"),
        "part of a frame": (square, {"frame_tokens": 4}, "frame_tokens=4"),
        "frames of others": (
            [(2, 4, 3, 8), (2, 4, 6, 8), (2, 4, 6, 8)],
            {"frame_tokens": 3},
            r"frame_tokens=3 needs as many queries as keys",
        ),
    }


@pytest.mark.parametrize("name", refusals())
def test_what_does_not_fit_is_refused(name: str) -> None:
    shapes, options, message = refusals()[name]
    arrays = [jnp.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        length_attention(context(), *arrays, **options)


# --- memory


@pytest.mark.parametrize("mesh", [None, (1, 8, 1)], ids=str)
@pytest.mark.parametrize("frame_tokens", [None, 1000])
def test_long_sequences_make_no_array_of_queries_by_keys(
    frame_tokens: int | None, mesh: tuple[int, int, int] | None
) -> None:
    length, on = 20_000, context(mesh)
    array = jax.ShapeDtypeStruct((2, 4, length, 16), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)

    def call(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return length_attention(on, q, k, v, lengths, frame_tokens)

    traced = jax.make_jaxpr(call)(array, array, array, lengths)
    assert [aval.shape for aval in traced.out_avals] == [array.shape]
    sizes = sizes_in(traced.jaxpr)
    assert max(sizes) >= array.size  # the walk sees something
    assert max(sizes) < length * length / 8
    assert on.records[0].implementation == "blockwise"


@pytest.mark.parametrize("frame_tokens", [None, 128])
def test_a_call_that_nothing_splits_lowers_for_a_mesh_of_tpus(
    frame_tokens: int | None,
) -> None:
    """No compiler can partition a TPU kernel: it has to be told that none is split."""
    on = dataclasses.replace(context((2, 1, 4)), platform="tpu")
    whole = NamedSharding(on.mesh, PartitionSpec())
    array = jax.ShapeDtypeStruct((1, 1, 256, 64), jnp.bfloat16, sharding=whole)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=whole)

    def call(q: Any, lengths: Any) -> Any:
        return length_attention(on, q, q, q, lengths, frame_tokens)

    traced = jax.jit(call).trace(array, lengths)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text
    assert on.records[0].split == (None, None, None, None)
    assert on.records[0].implementation == "splash"


# --- what torchax does without the override


def operator(target: str) -> Callable[..., torch.Tensor]:
    """A torch function by the name that an override claims."""
    found: Callable[..., torch.Tensor] = resolve_name(target)
    return found


@pytest.mark.parametrize("target", EXCHANGED_ATTENTION.targets)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_row_without_a_key_is_zero_as_in_torch_and_nan_by_torchax(
    batch: int, kind: str, target: str
) -> None:
    """When the last line fails, torchax is mended: the override is for speed alone."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, 2, 5, 8, generator=generator) for _ in range(3))
    mask = torch.rand(5, 5, generator=generator) < 0.7
    mask[2] = False
    if kind == "float":
        mask = torch.zeros(5, 5).masked_fill(~mask, -torch.inf)
    sdpa = operator(target)
    expected = sdpa(q, k, v, mask)
    assert torch.equal(expected[:, :, 2], torch.zeros(batch, 2, 8))

    runtime = model_runtime(mesh=None, platform="cpu")
    arrays = [to_numpy(x) for x in (q, k, v, mask)]
    found = to_torch(jax.jit(traced(runtime, sdpa))(*arrays))
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)

    # Outside of the block torchax's own is back, with its fault.
    found = to_torch(jax.jit(by_torchax(runtime, sdpa))(*arrays))
    rows = [0, 1, 3, 4]
    torch.testing.assert_close(
        found[:, :, rows], expected[:, :, rows], rtol=0, atol=TOLERANCE
    )
    assert found[:, :, 2].isnan().all()
