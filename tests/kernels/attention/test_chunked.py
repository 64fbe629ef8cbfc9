"""Keys in chunks: the sums of all of them are those of one call on all keys."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.attention.oracle import (
    Case,
    compiled,
    inputs,
    numpy_attention,
    worst,
)
from tests.tolerances import TOLERANCES
from tpuport.errors import AttentionError
from tpuport.kernels.attention.choice import AttentionChoice
from tpuport.kernels.attention.chunked import chunked_attention
from tpuport.kernels.attention.splash import splash_feature_major

IMPLEMENTATIONS = ("splash", "reference", "blockwise")
# Small blocks, so that a chunk is several of them and its last one short.
SPLASH = AttentionChoice.parse("splash:block_q=128;block_kv=256;block_kv_compute=128")
CHUNK = 300


def chunk_by_chunk(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    implementation: str,
    kv_lengths: Any = None,
    **options: Any,
) -> jax.Array:
    """Of feature-major arrays; ``kv_lengths`` [chunks, B] are those of each chunk."""
    count = k.shape[3] // CHUNK
    parts = [
        tuple(x[..., n * CHUNK : (n + 1) * CHUNK] for x in (k, v)) for n in range(count)
    ]
    attention = chunked_attention(
        q,
        *parts[0],
        has_lengths=kv_lengths is not None,
        platform="cpu",
        implementation=implementation,
        interpret=True,
        **options,
    )
    sums = attention.start()
    for n in range(count):
        lengths = None if kv_lengths is None else kv_lengths[n]
        sums = attention.add(sums, *attention.keys(*parts[n]), lengths)
    return attention.divide(sums)


def in_chunks(
    arrays: Sequence[np.ndarray],
    *,
    implementation: str,
    kv_lengths: Any = None,
    order: Sequence[int] | None = None,
    call: Callable[..., Any] = compiled,
    **options: Any,
) -> np.ndarray:
    """[B, H, Lq, Dv] of keys that are taken ``CHUNK`` at a time, in an order."""
    q, k, v = (x.swapaxes(2, 3) for x in arrays)
    order = order or range(k.shape[3] // CHUNK)
    k, v = (
        jnp.concatenate([x[..., n * CHUNK : (n + 1) * CHUNK] for n in order], 3)
        for x in (k, v)
    )
    if kv_lengths is not None:
        starts = CHUNK * np.asarray(order)[:, None]
        kv_lengths = np.clip(np.asarray(kv_lengths) - starts, 0, CHUNK)
    got = call(
        chunk_by_chunk,
        q,
        k,
        v,
        implementation=SPLASH if implementation == "splash" else implementation,
        kv_lengths=kv_lengths,
        **options,
    )
    return np.asarray(got).swapaxes(2, 3)


CASES = [
    Case(q_len=129, kv_len=900),
    Case(q_len=127, kv_len=600, head_dim=40, v_dim=24, scale=-0.3),
    Case(q_len=129, kv_len=600, head_dim=128, heads=4),
    # The second chunk of the first item has one key, its third and all of the last
    # item's have none.
    Case(q_len=129, kv_len=900, lengths=(301, 900, 0), batch=3),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_formula_in_float64(case: Case, implementation: str) -> None:
    arrays, options = inputs(case)
    options.pop("is_causal")
    want = numpy_attention(*arrays, **options)
    if case.lengths:
        dead = np.arange(case.kv_len) >= np.asarray(case.lengths)[:, None]
        q, k, v = arrays
        dead = dead[:, None, :, None]
        arrays = [q, np.where(dead, np.float32(3), k), np.where(dead, 0 * v, v)]
    got = in_chunks(arrays, implementation=implementation, **options)
    assert got.dtype == jnp.float32
    assert worst(got, want) < TOLERANCES["attention float32"]
    if case.lengths:
        np.testing.assert_array_equal(got[2], 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16(implementation: str) -> None:
    arrays, _ = inputs(Case(q_len=129, kv_len=900, dtype="bfloat16"))
    # Op by op where a product is of bfloat16 in float32, which the compiler for CPUs
    # has not.
    call = operator.call if implementation == "reference" else compiled
    placed = [jnp.asarray(x) for x in arrays]
    got = in_chunks(placed, implementation=implementation, call=call)
    assert got.dtype == jnp.bfloat16
    assert worst(got, numpy_attention(*arrays)) < TOLERANCES["attention bfloat16"]


def test_the_kernel_adds_what_one_call_adds() -> None:
    # Whole blocks, so that both meet the same tiles in the same order: to the bit, but
    # for products and sums that a compiler rounds together in one of them.
    arrays, _ = inputs(Case(q_len=256, kv_len=1024, dtype="bfloat16"))

    def halves_and_whole(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array]:
        halves = [tuple(jnp.split(x, 2, 3)[n] for x in (k, v)) for n in range(2)]
        attention = chunked_attention(
            q,
            *halves[0],
            has_lengths=False,
            platform="cpu",
            implementation=SPLASH,
            interpret=True,
        )
        sums = attention.start()
        for half in halves:
            sums = attention.add(sums, *attention.keys(*half), None)
        want = splash_feature_major(
            q,
            k,
            v,
            blocks=attention.plan.blocks,  # type: ignore[attr-defined]
            interpret=True,
        )
        return attention.divide(sums), want

    found = compiled(halves_and_whole, *(x.swapaxes(2, 3) for x in arrays))
    got, want = (np.asarray(x, np.float32) for x in found)
    assert np.mean(got != want) < 1e-4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_large_norms_in_any_order(implementation: str, order: Sequence[int]) -> None:
    # Scores of several hundred, of which one chunk has the largest by far.
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=900), size=8.0)
    k[:, :, 600:] *= 2
    got = in_chunks([q, k, v], implementation=implementation, order=order)
    want = numpy_attention(q, k, v)
    assert worst(got, want) < TOLERANCES["attention float32 large scores"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("at", [3, 450])
@pytest.mark.parametrize("size", [1.0, 20.0])
def test_one_dominant_key_gives_its_value(
    implementation: str, at: int, size: float
) -> None:
    # Its score is 20 x size, that of the others -20 x size.
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=900))
    q, k = np.zeros_like(q), np.zeros_like(k)
    q[..., 0], k[..., 0], k[:, :, at, 0] = 8, -20 * size, 20 * size
    got = in_chunks([q, k, v], implementation=implementation)
    assert worst(got, np.broadcast_to(v[:, :, at : at + 1], got.shape)) <= 1e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_chunks_without_keys_take_no_weight(implementation: str) -> None:
    # Scores of about -500: sums over no key, at whatever exponent, must not win.
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=900, batch=3))
    q, k = np.abs(q) + 7, -np.abs(k) - 7
    lengths = np.asarray([299, 600, 900])
    dead = (np.arange(900) >= lengths[:, None])[:, None, :, None]
    v = np.where(dead, np.float32(0), v)
    want = numpy_attention(q, k, v, kv_lengths=lengths)
    for order in ((0, 1, 2), (2, 1, 0)):
        got = in_chunks(
            [q, k, v], implementation=implementation, kv_lengths=lengths, order=order
        )
        assert worst(got, want) < TOLERANCES["attention float32 large scores"]


def test_a_nan_is_not_hidden() -> None:
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=900))
    q[0, 0, 3, 0] = np.nan
    for implementation in IMPLEMENTATIONS:
        got = in_chunks([q, k, v], implementation=implementation)
        assert np.isnan(got[0, 0, 3]).all()
        assert not np.isnan(got[1]).any()


def test_a_window_cannot_be_taken_in_chunks() -> None:
    arrays, _ = inputs(Case(q_len=128, kv_len=600, head_dim=128))
    choice = AttentionChoice.parse("auto:window=10,10")
    with pytest.raises(AttentionError, match="chunks: a window needs to know"):
        in_chunks(arrays, implementation=choice)
