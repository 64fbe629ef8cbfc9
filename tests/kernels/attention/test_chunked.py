"""Keys in chunks: the sums of all of them are those of one call on all keys."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.attention.oracle import Case, inputs, numpy_attention, worst
from tests.tolerances import TOLERANCES
from tpuport.errors import AttentionError
from tpuport.kernels.attention.chunked import chunked_attention
from tpuport.kernels.attention.splash import splash_feature_major

IMPLEMENTATIONS = ("splash", "reference", "blockwise")
# Small blocks, so that a chunk is several of them and its last one short.
SPLASH = "splash:block_q=128;block_kv=256;block_kv_compute=128"
CHUNK = 300


def in_chunks(
    arrays: Sequence[jax.Array],
    *,
    implementation: str,
    kv_lengths: Any = None,
    order: Sequence[int] | None = None,
    **options: Any,
) -> jax.Array:
    """[B, H, Lq, Dv] of keys that are taken ``CHUNK`` at a time, in an order."""
    name = SPLASH if implementation == "splash" else implementation
    q, k, v = (x.swapaxes(2, 3) for x in arrays)
    count = k.shape[3] // CHUNK
    parts = [
        tuple(x[..., n * CHUNK : (n + 1) * CHUNK] for x in (k, v)) for n in range(count)
    ]
    attention = chunked_attention(
        q,
        *parts[0],
        has_lengths=kv_lengths is not None,
        platform="cpu",
        implementation=options.pop("choice", name),
        interpret=True,
        **options,
    )
    sums = attention.start()
    for n in order or range(count):
        lengths = None
        if kv_lengths is not None:
            lengths = jnp.clip(jnp.asarray(kv_lengths) - n * CHUNK, 0, CHUNK)
        sums = attention.add(sums, *attention.keys(*parts[n]), lengths)
    return attention.divide(sums).swapaxes(2, 3)


CASES = [
    Case(q_len=129, kv_len=900, batch=1),
    Case(q_len=127, kv_len=600, head_dim=40, v_dim=24),
    Case(q_len=129, kv_len=600, head_dim=128, heads=4),
    # The second chunk of the first item has one key, its third and all of the last
    # item's have none.
    Case(q_len=129, kv_len=900, lengths=(301, 900, 0), batch=3),
    Case(q_len=129, kv_len=600, scale=-0.3),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_formula_in_float64(case: Case, implementation: str) -> None:
    arrays, options = inputs(case)
    options.pop("is_causal")
    want = numpy_attention(*arrays, **options)
    if case.lengths:
        dead = jnp.arange(case.kv_len) >= jnp.asarray(case.lengths)[:, None]
        q, k, v = arrays
        dead = dead[:, None, :, None]
        arrays = [q, jnp.where(dead, 3.0, k), jnp.where(dead, 0.0, v)]
    call = jax.jit(
        functools.partial(in_chunks, implementation=implementation, **options)
    )
    got = call(arrays)
    assert got.dtype == jnp.float32
    assert worst(got, want) < TOLERANCES["attention float32"]
    if case.lengths:
        np.testing.assert_array_equal(got[2], 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16(implementation: str) -> None:
    arrays, _ = inputs(Case(q_len=129, kv_len=900, dtype="bfloat16"))
    got = in_chunks(arrays, implementation=implementation)
    assert got.dtype == jnp.bfloat16
    assert worst(got, numpy_attention(*arrays)) < TOLERANCES["attention bfloat16"]


def test_the_kernel_adds_what_one_call_adds() -> None:
    # Whole blocks, so that both meet the same tiles in the same order: to the bit, but
    # for products and sums that a compiler rounds together in one of them.
    (q, k, v), _ = inputs(Case(q_len=256, kv_len=1024, dtype="bfloat16"))
    q, k, v = (x.swapaxes(2, 3) for x in (q, k, v))
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
    got = np.asarray(attention.divide(sums), np.float32)
    assert np.mean(got != np.asarray(want, np.float32)) < 1e-4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_large_norms_in_any_order(implementation: str, order: Sequence[int]) -> None:
    # Scores of several hundred, of which one chunk has the largest by far.
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=900), size=8.0)
    k = k.at[:, :, 600:].mul(2)
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
    q = jnp.zeros_like(q).at[..., 0].set(8)
    k = jnp.zeros_like(k).at[..., 0].set(-20 * size).at[:, :, at, 0].set(20 * size)
    got = in_chunks([q, k, v], implementation=implementation)
    assert worst(got, jnp.broadcast_to(v[:, :, at : at + 1], got.shape)) <= 1e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_chunks_without_keys_take_no_weight(implementation: str) -> None:
    # Scores of about -500: sums over no key, at whatever exponent, must not win.
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=900))
    q, k = jnp.abs(q) + 7, -jnp.abs(k) - 7
    lengths = np.asarray([299, 600])
    dead = (jnp.arange(900) >= jnp.asarray(lengths)[:, None])[:, None, :, None]
    v = jnp.where(dead, 0, v)
    want = numpy_attention(q, k, v, kv_lengths=lengths)
    for order in ((0, 1, 2), (2, 1, 0)):
        got = in_chunks(
            [q, k, v], implementation=implementation, kv_lengths=lengths, order=order
        )
        assert worst(got, want) < TOLERANCES["attention float32 large scores"]


def test_a_nan_is_not_hidden() -> None:
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=600))
    for implementation in IMPLEMENTATIONS:
        broken = [q.at[0, 0, 3, 0].set(jnp.nan), k, v]
        got = in_chunks(broken, implementation=implementation)
        assert bool(jnp.isnan(got[0, 0, 3]).all())
        assert not bool(jnp.isnan(got[1]).any())


def test_a_window_cannot_be_taken_in_chunks() -> None:
    arrays, _ = inputs(Case(q_len=128, kv_len=600, head_dim=128))
    with pytest.raises(AttentionError, match="chunks: a window needs to know"):
        in_chunks(arrays, implementation="splash", choice="auto:window=10,10")
