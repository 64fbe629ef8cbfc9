"""Exact attention block by block: no array has both Lq and Lk.

Letters: B batch, H query heads, Hkv key/value heads, G = H / Hkv, L tokens (Lq
queries, Lk keys), D head dim of queries and keys, Dv head dim of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from tpuport.kernels.attention.masking import (
    LOWEST,
    allowed_pairs,
    group_mask,
    mask_scores,
)
from tpuport.kernels.attention.problem import Problem, describe, resolve_scale
from tpuport.kernels.attention.reference import Sums, matmul_precision, normalised
from tpuport.kernels.padding import ceil_div

# (running maximum [1, h, G, q, 1], sum of weights [1, h, G, q, 1], weighted sum of
# values [1, h, G, q, Dv]), all float32.
State = tuple[jax.Array, jax.Array, jax.Array]

MAX_BLOCK_Q = 512
MAX_BLOCK_KV = 1024
# Scores alive at once. On a CPU a tile should stay in the last-level cache: with 48
# heads of 2000 tokens, tiles of 2 heads (4 MiB) take 0.6 of the time of all heads
# at once (96 MiB).
MAX_TILE_SCORES = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Block sizes of one call; ``heads`` counts key/value heads and divides Hkv.

    A length that its block does not divide is covered by blocks of one size of which
    the last is moved back to end at the length. So nothing is padded and no slice
    runs over an end; a key seen twice is masked, a query seen twice gives its result
    again.
    """

    heads: int
    block_q: int
    block_kv: int

    def __post_init__(self) -> None:
        if min(self.heads, self.block_q, self.block_kv) < 1:
            raise ValueError(f"block sizes must be at least 1; got {self}")


def default_tiling(problem: Problem) -> Tiling:
    """Blocks of about equal size below the maxima, for lengths of at least 1."""
    block_kv = _even_block(problem.kv_len, MAX_BLOCK_KV)
    rows = max(1, MAX_TILE_SCORES // (block_kv * problem.groups))
    block_q = _even_block(problem.q_len, min(MAX_BLOCK_Q, rows))
    fitting = max(1, MAX_TILE_SCORES // (block_q * block_kv * problem.groups))
    heads = max(
        n
        for n in range(1, problem.kv_heads + 1)
        if problem.kv_heads % n == 0 and n <= fitting
    )
    return Tiling(heads=heads, block_q=block_q, block_kv=block_kv)


def blockwise_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    kv_lengths: jax.Array | None = None,
    window: tuple[int, int] | None = None,
    tiling: Tiling | None = None,
) -> jax.Array:
    """Same contract, arguments and errors as ``reference_attention``.

    The softmax is summed up over key blocks with a running maximum; the result is
    exact up to float32 rounding. Broadcast dims of the mask stay broadcast. Key
    blocks above the causal diagonal, outside the window or beyond ``kv_lengths`` are
    not computed. The
    loop slices every dimension but D, so a partitioner cannot split it: call it
    inside ``shard_map`` on each device's own heads.

    Args:
        tiling: block sizes; None means ``default_tiling``.

    Raises:
        ValueError: shapes, dtypes or a tiling that do not fit together.

    Source: Milakov and Gimelshein 2018 (arXiv:1805.02867), algorithm 3; Rabe and
    Staats 2021 (arXiv:2112.05682).
    """
    problem = describe(
        q,
        k,
        v,
        mask=mask,
        is_causal=is_causal,
        kv_lengths=kv_lengths,
        window=window,
    )

    def finish(state: State) -> tuple[jax.Array]:
        _, total, summed = state
        return (normalised(summed, total).astype(q.dtype),)

    out = jnp.zeros((*q.shape[:3], problem.v_dim), q.dtype)
    (out,) = _run(
        problem,
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        kv_lengths=kv_lengths,
        tiling=tiling,
        outs=(out,),
        finish=finish,
    )
    return out


def blockwise_sums(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    kv_lengths: jax.Array | None = None,
    tiling: Tiling | None = None,
) -> Sums:
    """What ``blockwise_attention`` divides; same arguments and errors."""
    problem = describe(q, k, v, kv_lengths=kv_lengths)
    highest = jnp.full((*q.shape[:3], 1), LOWEST, jnp.float32)
    summed = jnp.zeros((*q.shape[:3], problem.v_dim), jnp.float32)
    highest, total, summed = _run(
        problem,
        q,
        k,
        v,
        mask=None,
        scale=scale,
        kv_lengths=kv_lengths,
        tiling=tiling,
        outs=(highest, jnp.zeros_like(highest), summed),
        finish=lambda state: state,
    )
    return highest, total, summed


def _run(
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None,
    scale: float | None,
    kv_lengths: jax.Array | None,
    tiling: Tiling | None,
    outs: tuple[jax.Array, ...],
    finish: Callable[[State], tuple[jax.Array, ...]],
) -> tuple[jax.Array, ...]:
    """``outs`` [B, H, Lq, ..] with what ``finish`` makes of each tile's sums."""
    is_causal, window = problem.is_causal, problem.window
    shapes = [out.shape for out in outs]
    if 0 in shapes[-1] or problem.kv_len == 0:
        return outs
    tiling = tiling or default_tiling(problem)
    if problem.kv_heads % tiling.heads:
        raise ValueError(
            f"a tile of {tiling.heads} heads does not divide {problem.kv_heads}"
        )
    block_q = min(tiling.block_q, problem.q_len)
    block_kv = min(tiling.block_kv, problem.kv_len)
    head_tiles = problem.kv_heads // tiling.heads
    q_blocks = ceil_div(problem.q_len, block_q)
    kv_blocks = ceil_div(problem.kv_len, block_kv)
    precision = matmul_precision(q.dtype)
    factor = resolve_scale(scale, problem.head_dim)

    heads, groups, rows = tiling.heads, problem.groups, block_q
    grouped_shape = (problem.batch, problem.kv_heads, groups, problem.q_len)
    q = q.reshape(*grouped_shape, problem.head_dim)
    outs = tuple(out.reshape(*grouped_shape, out.shape[-1]) for out in outs)
    if mask is not None:
        mask = group_mask(mask, problem.kv_heads)

    def one_tile(
        outs: tuple[jax.Array, ...], tile: jax.Array
    ) -> tuple[tuple[jax.Array, ...], None]:
        q_block = tile % q_blocks
        b = tile // (q_blocks * head_tiles)
        h = tile // q_blocks % head_tiles * heads
        q_start = jnp.minimum(q_block * block_q, problem.q_len - block_q)
        q_ids = q_start + jnp.arange(rows)
        lengths = (
            None if kv_lengths is None else lax.dynamic_slice(kv_lengths, (b,), (1,))
        )
        q_tile = lax.dynamic_slice(
            q, (b, h, 0, q_start, 0), (1, heads, groups, rows, problem.head_dim)
        )

        def attend(state: State, kv_block: jax.Array) -> State:
            highest, total, summed = state
            first = kv_block * block_kv
            k_start = jnp.minimum(first, problem.kv_len - block_kv)
            k_ids = k_start + jnp.arange(block_kv)
            k_tile = lax.dynamic_slice(
                k, (b, h, k_start, 0), (1, heads, block_kv, problem.head_dim)
            )
            v_tile = lax.dynamic_slice(
                v, (b, h, k_start, 0), (1, heads, block_kv, problem.v_dim)
            )
            allowed = allowed_pairs(
                q_ids, k_ids, is_causal=is_causal, kv_lengths=lengths, window=window
            )
            if problem.kv_len % block_kv:
                # The last block was moved back over keys already counted.
                fresh = (k_ids >= first)[None, None, None, None]
                allowed = fresh if allowed is None else allowed & fresh
            mask_tile = None
            if mask is not None:
                mask_tile = _slice_mask(
                    mask,
                    (b, h, 0, q_start, k_start),
                    (1, heads, groups, rows, block_kv),
                )
            scores = jnp.einsum(
                "bhgqd,bhkd->bhgqk",
                q_tile,
                k_tile,
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            scores = mask_scores(scores * factor, mask=mask_tile, allowed=allowed)
            new = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.exp(scores - new)
            shrink = jnp.exp(highest - new)
            total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
            summed = summed * shrink + jnp.einsum(
                "bhgqk,bhkd->bhgqd",
                weights,
                v_tile.astype(jnp.float32),
                precision=precision,
            )
            return new, total, summed

        def one_block(state: State, kv_block: jax.Array) -> tuple[State, None]:
            first = kv_block * block_kv
            conditions = []
            if is_causal:
                conditions.append(first <= q_ids[-1])
            if window is not None:
                conditions.append(first <= q_ids[-1] + window[1])
                conditions.append(first + block_kv > q_ids[0] - window[0])
            if lengths is not None:
                conditions.append(first < lengths[0])
            if not conditions:
                return attend(state, kv_block), None
            needed = functools.reduce(jnp.logical_and, conditions)
            skip = lambda state, _: state  # noqa: E731
            return lax.cond(needed, attend, skip, state, kv_block), None

        shape = (1, heads, groups, rows)
        empty: State = (
            jnp.full((*shape, 1), LOWEST, jnp.float32),
            jnp.zeros((*shape, 1), jnp.float32),
            jnp.zeros((*shape, problem.v_dim), jnp.float32),
        )
        state, _ = lax.scan(one_block, empty, jnp.arange(kv_blocks))
        at = (b, h, 0, q_start, 0)
        return tuple(
            lax.dynamic_update_slice(out, done, at)
            for out, done in zip(outs, finish(state), strict=True)
        ), None

    tiles = jnp.arange(problem.batch * head_tiles * q_blocks)
    outs, _ = lax.scan(one_tile, outs, tiles)
    return tuple(x.reshape(shape) for x, shape in zip(outs, shapes, strict=True))


def _even_block(length: int, largest: int) -> int:
    """The block size of the fewest blocks of at most ``largest`` covering ``length``.

    Of those the smallest, so that the last block repeats as little as possible.
    """
    return ceil_div(length, ceil_div(length, largest))


def _slice_mask(
    mask: jax.Array, starts: tuple[jax.Array | int, ...], sizes: tuple[int, ...]
) -> jax.Array:
    """The block of a mask, of whose dims the ones of size 1 are left broadcast."""
    pairs = zip(mask.shape, starts, sizes, strict=True)
    at, take = zip(
        *((0, 1) if dim == 1 else (start, size) for dim, start, size in pairs),
        strict=True,
    )
    return lax.dynamic_slice(mask, at, take)
