"""Exact attention block by block: no array has both Lq and Lk.

Letters: B batch, H query heads, Hkv key/value heads, G = H / Hkv, L tokens (Lq
queries, Lk keys), D head dim of queries and keys, Dv head dim of values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from tpuport.kernels.attention.masking import (
    LOWEST,
    allowed_pairs,
    group_mask,
    mask_scores,
)
from tpuport.kernels.attention.problem import Options, Problem, describe
from tpuport.kernels.attention.reference import Sums, matmul_precision, normalised
from tpuport.kernels.padding import ceil_div

# (running maximum [G * q, 1], sum of weights [G * q, 1], weighted sum of values
# [G * q, Dv]), all float32.
State = tuple[jax.Array, jax.Array, jax.Array]

# A tile has the queries of one key/value head, so that its products have two
# dimensions: with three, XLA copies the keys on a CPU. Tiles of 1024 x 1024 (4 MiB)
# stay in the cache. On two cores they take 0.7 of the time of tiles of two heads by
# 512 x 1024, for 16 heads of 768 tokens, 8 of 2000 and 4 of 4096.
MAX_BLOCK_Q = 1024
MAX_BLOCK_KV = 1024
# Scores alive at once.
MAX_TILE_SCORES = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Block sizes of one call.

    If a block does not divide its length, the last block is moved back to end at the
    length. So nothing is padded and no slice runs over an end. A key seen twice is
    masked; a query seen twice gives its result again.
    """

    block_q: int
    block_kv: int

    def __post_init__(self) -> None:
        if min(self.block_q, self.block_kv) < 1:
            raise ValueError(f"block sizes must be at least 1; got {self}")


def default_tiling(problem: Problem) -> Tiling:
    """Blocks of about equal size below the maxima, for lengths of at least 1."""
    block_kv = _even_block(problem.kv_len, MAX_BLOCK_KV)
    rows = max(1, MAX_TILE_SCORES // (block_kv * problem.groups))
    block_q = _even_block(problem.q_len, min(MAX_BLOCK_Q, rows))
    return Tiling(block_q=block_q, block_kv=block_kv)


def blockwise_attention(
    q: Float[Array, "b h lq d"],
    k: Float[Array, "b hkv lk d"],
    v: Float[Array, "b hkv lk dv"],
    *,
    tiling: Tiling | None = None,
    window: tuple[int, int] | None = None,
    **options: Unpack[Options],
) -> Float[Array, "b h lq dv"]:
    """Same contract, arguments and errors as ``reference_attention``.

    The softmax is summed up over key blocks with a running maximum; the result is
    exact up to float32 rounding. Broadcast dims of the mask stay broadcast. Key blocks
    above the causal diagonal, outside the window or beyond ``kv_lengths`` are not
    computed. The loop slices every dimension but D, so a partitioner cannot split it:
    call it inside ``shard_map`` on each device's own heads.

    ``tiling`` None means ``default_tiling``.

    Source: Milakov and Gimelshein 2018 (arXiv:1805.02867), algorithm 3; Rabe and
    Staats 2021 (arXiv:2112.05682).
    """
    _, total, summed = blockwise_sums(q, k, v, tiling=tiling, window=window, **options)
    return normalised(summed, total).astype(q.dtype)


def blockwise_sums(
    q: Float[Array, "b h lq d"],
    k: Float[Array, "b hkv lk d"],
    v: Float[Array, "b hkv lk dv"],
    *,
    tiling: Tiling | None = None,
    window: tuple[int, int] | None = None,
    **options: Unpack[Options],
) -> Sums:
    """What ``blockwise_attention`` divides; same arguments and errors."""
    problem = describe(q, k, v, window=window, **options)
    highest = jnp.full((*q.shape[:3], 1), LOWEST, jnp.float32)
    summed = jnp.zeros((*q.shape[:3], problem.v_dim), jnp.float32)
    sums = (highest, jnp.zeros_like(highest), summed)
    if 0 in summed.shape or problem.kv_len == 0:
        return sums
    tiling = tiling or default_tiling(problem)
    tiling = replace(
        tiling,
        block_q=min(tiling.block_q, problem.q_len),
        block_kv=min(tiling.block_kv, problem.kv_len),
    )
    grouped = (problem.batch, problem.kv_heads, problem.groups, problem.q_len)
    mask = options.get("mask")
    call = _Call(
        problem=problem,
        tiling=tiling,
        q=q.reshape(*grouped, problem.head_dim),
        k=k,
        v=v,
        mask=None if mask is None else group_mask(mask, problem.kv_heads),
        kv_lengths=options.get("kv_lengths"),
    )
    kv_blocks = ceil_div(problem.kv_len, tiling.block_kv)

    def one_tile(sums: State, number: jax.Array) -> tuple[State, None]:
        tile = call.tile(number)
        found, _ = lax.scan(tile.add_block, tile.empty(), jnp.arange(kv_blocks))
        highest, total, summed = (
            lax.dynamic_update_slice(whole, part.reshape(*tile.rows, -1), (*tile.at, 0))
            for whole, part in zip(sums, found, strict=True)
        )
        return (highest, total, summed), None

    highest, total, summed = (x.reshape(*grouped, -1) for x in sums)
    done, _ = lax.scan(one_tile, (highest, total, summed), jnp.arange(call.tiles))
    highest, total, summed = (x.reshape(*q.shape[:3], -1) for x in done)
    return highest, total, summed


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class _Call:
    """A call as its tiles see it: q [B, Hkv, G, Lq, D], a mask of five dims too."""

    problem: Problem
    tiling: Tiling
    q: jax.Array
    k: jax.Array
    v: jax.Array
    mask: jax.Array | None
    kv_lengths: jax.Array | None

    @property
    def counts(self) -> tuple[int, int]:
        """Tiles along the key/value heads of a batch item, and along the queries."""
        queries = ceil_div(self.problem.q_len, self.tiling.block_q)
        return self.problem.kv_heads, queries

    @property
    def tiles(self) -> int:
        heads, queries = self.counts
        return self.problem.batch * heads * queries

    def tile(self, number: jax.Array) -> _Tile:
        problem, tiling = self.problem, self.tiling
        heads, queries = self.counts
        q_block = number % queries
        b = number // (queries * heads)
        h = number // queries % heads
        q_start = jnp.minimum(q_block * tiling.block_q, problem.q_len - tiling.block_q)
        q_ids = q_start + jnp.arange(tiling.block_q)
        lengths = None
        if self.kv_lengths is not None:
            lengths = lax.dynamic_slice(self.kv_lengths, (b,), (1,))
        at = (b, h, 0, q_start)
        rows = (1, 1, problem.groups, tiling.block_q)
        q = lax.dynamic_slice(self.q, (*at, 0), (*rows, problem.head_dim))
        q = q.reshape(-1, problem.head_dim)
        return _Tile(call=self, at=at, rows=rows, q=q, q_ids=q_ids, lengths=lengths)


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class _Tile:
    """Queries of one key/value head, which meet the keys block by block.

    ``at`` is where the tile begins, ``rows`` its sizes: batch, heads, groups, queries.
    ``q`` is [G * queries, D].
    """

    call: _Call
    at: tuple[jax.Array, jax.Array, int, jax.Array]
    rows: tuple[int, int, int, int]
    q: jax.Array
    q_ids: jax.Array
    lengths: jax.Array | None

    def empty(self) -> State:
        """The sums over no key."""
        rows = len(self.q)
        return (
            jnp.full((rows, 1), LOWEST, jnp.float32),
            jnp.zeros((rows, 1), jnp.float32),
            jnp.zeros((rows, self.call.problem.v_dim), jnp.float32),
        )

    def add_block(self, state: State, kv_block: jax.Array) -> tuple[State, None]:
        """The sums with a block of keys more; left out where no query sees any."""
        problem, q_ids = self.call.problem, self.q_ids
        block_kv = self.call.tiling.block_kv
        first = kv_block * block_kv
        conditions = []
        if problem.is_causal:
            conditions.append(first <= q_ids[-1])
        if problem.window is not None:
            left, right = problem.window
            conditions.append(first <= q_ids[-1] + right)
            conditions.append(first + block_kv > q_ids[0] - left)
        if self.lengths is not None:
            conditions.append(first < self.lengths[0])
        if not conditions:
            return self._attend(state, kv_block), None
        needed = functools.reduce(jnp.logical_and, conditions)
        skip = lambda state, _: state  # noqa: E731
        return lax.cond(needed, self._attend, skip, state, kv_block), None

    def _attend(self, state: State, kv_block: jax.Array) -> State:
        call, problem = self.call, self.call.problem
        block_kv = call.tiling.block_kv
        highest, total, summed = state
        first = kv_block * block_kv
        k_start = jnp.minimum(first, problem.kv_len - block_kv)
        k_ids = k_start + jnp.arange(block_kv)
        at, size = (*self.at[:2], k_start, 0), (1, 1, block_kv)
        k = lax.dynamic_slice(call.k, at, (*size, problem.head_dim))[0, 0]
        v = lax.dynamic_slice(call.v, at, (*size, problem.v_dim))[0, 0]
        allowed = allowed_pairs(self.q_ids, k_ids, problem, self.lengths)
        if problem.kv_len % block_kv:
            # The last block was moved back over keys already counted.
            fresh = (k_ids >= first)[None, None, None, None]
            allowed = fresh if allowed is None else allowed & fresh
        mask = None
        if call.mask is not None:
            mask = _slice_mask(call.mask, (*self.at, k_start), (*self.rows, block_kv))
        precision = matmul_precision(call.q.dtype)
        scores = problem.scale * jnp.matmul(
            self.q, k.T, precision=precision, preferred_element_type=jnp.float32
        )
        if mask is not None or allowed is not None:
            apart = scores.reshape(*self.rows, block_kv)
            apart = mask_scores(apart, mask=mask, allowed=allowed)
            scores = apart.reshape(scores.shape)
        new = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - new)
        shrink = jnp.exp(highest - new)
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        summed = summed * shrink + jnp.matmul(
            weights, v.astype(jnp.float32), precision=precision
        )
        return new, total, summed


def _even_block(length: int, largest: int) -> int:
    """The block size of the fewest blocks of at most ``largest`` covering ``length``.

    The smallest such size is taken, so that the last block repeats as little as
    possible.
    """
    return ceil_div(length, ceil_div(length, largest))


def _slice_mask(
    mask: jax.Array, starts: tuple[jax.Array | int, ...], sizes: tuple[int, ...]
) -> jax.Array:
    """The block of a mask; dims of size 1 stay broadcast."""
    pairs = zip(mask.shape, starts, sizes, strict=True)
    at, take = zip(
        *((0, 1) if dim == 1 else (start, size) for dim, start, size in pairs),
        strict=True,
    )
    return lax.dynamic_slice(mask, at, take)
