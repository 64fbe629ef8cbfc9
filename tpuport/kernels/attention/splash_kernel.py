"""The Pallas program of our splash attention, and what it is given.

Letters: B batch, H query heads, Hkv key/value heads, Lq and Lk tokens (whole blocks of
Lk), D head dim of queries and keys, Dv of values, both whole numbers of sublanes.

How it is written
-----------------
All arrays have the head dim before the tokens, as a product of weights and tokens gives
them. Scores are transposed, keys by queries: all values of a query lie along the lanes.
So the second product, values by keys times keys by queries, needs no transpose. Keys
are transposed here, once per tile: the transpose unit is idle.

The values get one more row: 1 for a key that counts, 0 for any other key, whose other
rows are 0 too. The second product then sums the rounded weights as well, in the matrix
unit. Numerator and denominator round alike: a query with one dominant key gets its
value exactly. Keys that do not count need no mask: their weights meet zeros.

Scores wait for their maximum. A round takes ``kv_step`` keys, written out as a sequence
of tiles, and does three things at once. It makes the scores of its own keys and finds
their running maximum. It makes the weights of the round before, whose maximum is known
by then. It adds up the values with these weights. No part waits for another, so matrix
unit, exponentials and the rest run side by side, and the maximum costs next to nothing.
A block of queries begins with a round that only makes scores and ends with one that
only weighs; between them the round that waits lies in VMEM, from one grid step to the
next.

The maximum covers all keys so far, this round's included: no weight exceeds 1, and the
largest is 1 exactly. A key that counts stands in for each key that does not, so that
the latter raise no maximum until their weights meet zeros. If queries see only some
keys, blocks with other keys or none are masked.

Keys may come in chunks, one call each. With ``partial`` the sums are not divided but
handed on in float32: the rows of the values, then ``TOTAL_ROW``, the sum of the
weights, and ``HIGHEST_ROW``, the maximum that was taken off. The next call goes on from
there, so all calls together add what one call on all keys adds.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from tpuport.kernels.attention.masking import LOWEST
from tpuport.kernels.attention.reference import matmul_precision
from tpuport.kernels.attention.splash_blocks import (
    COUNT_ROWS,
    LANES,
    SUBLANES,
    SUM_ROWS,
    SplashBlocks,
)

NAME = "tpuport_splash"
# Rows of a state that come after those of the values. The rows that sum weights are
# all alike: any but the first may hold something else on the way.
TOTAL_ROW = 0
HIGHEST_ROW = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything about a call that is known before it runs.

    ``left`` and ``right`` bound the keys a query sees by their distance, None for no
    bound. ``factor``, above 0, times a score is the exponent of 2. ``has_lengths``: how
    many of the ``kv_len`` keys count is known when the program runs. ``lag``: how many
    tiles a second product stays behind its exponentials. ``partial``: sums come in and
    go out, see above. ``token_major``: q, k, v and the result have tokens before
    features, the kernel turns values in place of keys, and the last block of keys may
    be short; without bounds, lengths and ``partial``. ``parts``: above 1, tokens lie in
    that many arrays of whole blocks, the first dim of q, k, v and the result.
    """

    blocks: SplashBlocks
    groups: int
    factor: float
    left: int | None
    right: int | None
    has_lengths: bool
    kv_len: int
    q_blocks: int
    kv_blocks: int
    lag: int = 0
    partial: bool = False
    token_major: bool = False
    parts: int = 1

    def first_blocks(self) -> np.ndarray:
        """The first key block that each query block may see, int32 [q_blocks]."""
        starts = np.arange(self.q_blocks, dtype=np.int32) * self.blocks.q
        reach = starts[-1] if self.left is None else self.left
        return np.maximum(starts - reach, 0) // self.blocks.kv

    def last_blocks(self) -> np.ndarray:
        """The last key block that each query block may see, int32 [q_blocks]."""
        most = self.kv_blocks * self.blocks.kv - 1
        stops = np.arange(1, self.q_blocks + 1, dtype=np.int32) * self.blocks.q - 1
        reach = most if self.right is None else self.right
        return np.minimum(stops + reach, most) // self.blocks.kv

    @property
    def has_edges(self) -> bool:
        """Whether queries may see only some of the keys that count."""
        return self.left is not None or self.right is not None

    @property
    def may_pad(self) -> bool:
        """Whether a block may hold keys that do not count."""
        return self.has_lengths or self.kv_len != self.kv_blocks * self.blocks.kv

    @property
    def steps(self) -> int:
        """Key blocks that any query block may see, at most."""
        return max(1, int((self.last_blocks() - self.first_blocks()).max()) + 1)


def run(
    plan: Plan,
    lengths: Int32[Array, " b"],
    q: Float[Array, "*p b h _ _"],
    k: Float[Array, "*p b hkv _ _"],
    v: Float[Array, "*p b hkv _ _"],
    *,
    state: Float32[Array, "b h sums lq"] | None = None,
    vmem_limit: int,
    interpret: bool,
) -> Float[Array, "*p b h _ _"]:
    """Attention, transposed.

    Args:
        plan: the static part.
        lengths: keys that count, int32 [B].
        q, k, v: [B, H, D, Lq], [B, Hkv, D, Lk] and [B, Hkv, Dv, Lk], the last two dims
            swapped if ``plan.token_major``, with ``plan.parts`` in front if these are
            several; ``v`` is zero where a key does not count.
        state: float32 [B, H, Dv + SUM_ROWS, Lq] if ``plan.partial``: what the call on
            the keys before gave, or :func:`empty_state`.
        vmem_limit: bytes of VMEM that the program may take.
        interpret: run the program op by op, on any platform.

    Returns:
        [B, H, Dv, Lq], or [B, H, Lq, Dv], in the dtype of ``q``; with ``plan.partial``
        of the shape and dtype of ``state``.
    """
    blocks = plan.blocks
    batch, heads, depth, q_len = q.shape[-4:]
    if plan.token_major:
        depth, q_len = q_len, depth
    rows = v.shape[-1 if plan.token_major else -2]
    first, last = _block_range(plan, lengths)

    def q_map(b: Any, h: Any, i: Any, j: Any, *_: Any) -> tuple[Any, ...]:
        return b, h, 0, i

    kv_map = functools.partial(_kv_map, plan)
    spec = _turned_spec if plan.token_major else _spec
    if plan.parts > 1:
        spec = functools.partial(_parted_spec, q_len)
    out = spec(rows, blocks.q, q_map)
    shape = (*q.shape[:-2], *((q_len, rows) if plan.token_major else (rows, q_len)))
    out_shape = jax.ShapeDtypeStruct(shape, q.dtype)
    operands, aliases, in_state = [lengths, first, last, q, k, v], {}, []
    if plan.partial:
        assert state is not None
        out = pl.BlockSpec((None, None, rows + SUM_ROWS, blocks.q), q_map)
        out_shape = jax.ShapeDtypeStruct(state.shape, state.dtype)
        in_state, aliases = [out], {len(operands): 0}
        operands.append(state)
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(batch, heads, plan.q_blocks, plan.steps),
            in_specs=[
                spec(depth, blocks.q, q_map),
                spec(depth, blocks.kv, kv_map),
                spec(rows, blocks.kv, kv_map),
                *in_state,
            ],
            out_specs=out,
            scratch_shapes=_scratch(plan, depth, rows, k.dtype),
        ),
        out_shape=out_shape,
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit,
            # Whole blocks only, and no semaphore of our own: the checks of every step
            # would find nothing.
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
        ),
        cost_estimate=_cost(plan, q, k, v),
        interpret=interpret,
        name=NAME,
    )(*operands)


def _block_range(plan: Plan, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first and last key block of each query block, int32 [B * q_blocks].

    A step of the grid looks them up, because scalar divisions are slow.
    """
    first = jnp.asarray(plan.first_blocks())
    # -1 where no key counts.
    counted = (lengths - 1)[:, None] // plan.blocks.kv
    last = jnp.minimum(jnp.asarray(plan.last_blocks()), counted)
    first = jnp.clip(first, 0, jnp.maximum(last, 0))
    return first.reshape(-1), last.reshape(-1)


def _spec(features: int, tokens: int, place: Callable[..., Any]) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, features, tokens), place)


def _turned_spec(features: int, tokens: int, place: Callable[..., Any]) -> pl.BlockSpec:
    def turned(*args: Any) -> tuple[Any, ...]:
        b, h, feature, token = place(*args)
        return b, h, token, feature

    return pl.BlockSpec((None, None, tokens, features), turned)


def _parted_spec(
    part: int, features: int, tokens: int, place: Callable[..., Any]
) -> pl.BlockSpec:
    """As ``_spec``, in arrays of ``part`` tokens."""

    def parted(*args: Any) -> tuple[Any, ...]:
        b, h, feature, token = place(*args)
        each = jnp.int32(part // tokens)
        return lax.div(token, each), b, h, feature, lax.rem(token, each)

    return pl.BlockSpec((None, None, None, features, tokens), parted)


def _cost(plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array) -> pl.CostEstimate:
    """What XLA's scheduler is told of a call's work."""
    features = -1 if plan.token_major else -2
    depth, rows = q.shape[features], v.shape[features]
    scores = q.size // depth * plan.steps * plan.blocks.kv
    values = 2 * q.size + (k.size + v.size) * plan.groups * plan.q_blocks
    return pl.CostEstimate(
        flops=2 * scores * (depth + rows + COUNT_ROWS),
        transcendentals=scores,
        bytes_accessed=values * q.dtype.itemsize,
    )


def _kv_map(plan: Plan, *args: Any) -> tuple[Any, ...]:
    """The block of keys that a step of the grid takes."""
    b, h, i, j, _, first, last = args
    head = h if plan.groups == 1 else lax.div(h, jnp.int32(plan.groups))
    at = b * plan.q_blocks + i
    block = j if plan.left is None else first[at] + j
    if plan.has_lengths or plan.left is not None or plan.right is not None:
        # Steps past the last block stay on it: nothing is fetched for them.
        block = jnp.minimum(block, jnp.maximum(last[at], 0))
    return b, head, 0, block


def _scratch(plan: Plan, depth: int, rows: int, dtype: Any) -> list[Any]:
    """VMEM for sums, maxima, scores, turned keys, values with their count, one key.

    In a program on tokens before features the queries, turned, take the last place.
    """
    blocks = plan.blocks
    size = blocks.kv_compute
    parts = blocks.kv_step // size
    tiles = parts * (blocks.q // blocks.q_compute)

    def vmem(count: int, rows: int, columns: int, dtype: Any) -> list[Any]:
        return [pltpu.VMEM((rows, columns), dtype) for _ in range(count)]

    return [
        pltpu.VMEM((rows + SUM_ROWS, blocks.q), jnp.float32),
        vmem(3, SUBLANES, blocks.q, jnp.float32),
        vmem(tiles, size, blocks.q_compute, jnp.float32),
        vmem(parts, size, depth, dtype),
        vmem(parts, rows + COUNT_ROWS, size, dtype),
        *_one_key(plan, depth, dtype),
    ]


def _one_key(plan: Plan, depth: int, dtype: Any) -> list[Any]:
    if plan.token_major:
        return [
            pltpu.VMEM((SUBLANES, depth), dtype),
            pltpu.VMEM((depth, plan.blocks.q), dtype),
        ]
    return [pltpu.VMEM((depth, LANES), dtype)]


def empty_state(
    batch: int, heads: int, rows: int, q_len: int
) -> Float32[Array, "b h sums lq"]:
    """The state before any key, for ``rows`` rows of values."""
    state = jnp.zeros((batch, heads, rows + SUM_ROWS, q_len), jnp.float32)
    return state.at[:, :, rows + HIGHEST_ROW].set(LOWEST)


def divided(
    state: Float32[Array, "b h sums lq"], rows: int
) -> Float32[Array, "b h dv lq"]:
    """What a state amounts to, float32 [B, H, rows, Lq]; 0 where no key counted."""
    total = state[:, :, rows + TOTAL_ROW : rows + TOTAL_ROW + 1]
    return state[:, :, :rows] * _inverse(total)


def _inverse(total: jax.Array) -> jax.Array:
    empty = total == 0
    # No key at all: 0, as in the reference. A NaN stays one.
    return jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))


def _kernel(
    plan: Plan,
    lengths_ref: Any,
    first_ref: Any,
    last_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    *refs_behind: Any,
) -> None:
    """One query block against one key block."""
    state_ref, refs_behind = (
        (refs_behind[0], refs_behind[1:]) if plan.partial else (None, refs_behind)
    )
    out_ref, sums_ref, highest_refs, *scratch = refs_behind
    scores, turned, held, stand_in, *turned_q = scratch
    blocks = plan.blocks
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    at = b * plan.q_blocks + i
    # What is known is not looked up, so that a reader of the program can follow it.
    block = j if plan.left is None else first_ref[at] + j
    edges = _Edges(
        plan=plan,
        first_q=i * blocks.q,
        first_k=block * blocks.kv,
        length=lengths_ref[b] if plan.has_lengths else plan.kv_len,
    )
    highest_ref, candidate_ref, rescale_ref = highest_refs
    if plan.token_major:
        q_rows, (q_ref,) = q_ref, turned_q

        @pl.when(j == 0)
        def _() -> None:
            q_ref[...] = q_rows[...].T

    refs = _Refs(
        q=q_ref,
        k=k_ref,
        v=v_ref,
        sums=sums_ref,
        highest=highest_ref,
        candidate=candidate_ref,
        rescale=rescale_ref,
        scores=scores,
        turned=turned,
        held=held,
        stand_in=stand_in,
        edges=edges,
    )
    rows = sums_ref.shape[0] - SUM_ROWS
    highest_row = rows + HIGHEST_ROW

    @pl.when(j == 0)
    def _() -> None:
        if state_ref is None:
            sums_ref[...] = jnp.zeros_like(sums_ref)
            highest_ref[...] = jnp.full_like(highest_ref, LOWEST)
        else:
            sums_ref[...] = state_ref[...]
            highest = state_ref[highest_row : highest_row + 1]
            highest_ref[...] = jnp.broadcast_to(highest, highest_ref.shape)

    live = []
    if plan.has_lengths:
        live.append(block <= last_ref[at])
    else:
        if plan.right is not None:
            live.append(edges.first_k <= edges.first_q + (blocks.q - 1 + plan.right))
        if plan.left is not None or plan.kv_len <= (plan.kv_blocks - 1) * blocks.kv:
            live.append(edges.first_k < plan.kv_len)
    # The first step of a query block is live unless no key counts at all.
    may_be_empty = plan.has_lengths or plan.kv_len == 0
    any_live = [last_ref[at] >= 0] if may_be_empty else []

    def begin() -> None:
        if plan.may_pad:
            # Every key that does not count is this one, which does.
            one = refs.k[0:1] if plan.token_major else refs.k[:, 0:1]
            stand_in[...] = jnp.broadcast_to(one, stand_in.shape)
        _turn(refs, blocks, 0, 0)
        # Masks are right everywhere, and this round is one of many.
        _round(plan, refs, 0, edges if plan.has_edges else None, weigh=False)

    _when([*live, j == 0], begin)

    def go_on(masked: bool) -> None:
        pl.when(j > 0)(functools.partial(_turn, refs, blocks, 0, 0))

        def body(index: Any, carry: None) -> None:
            start = pl.multiple_of(index * blocks.kv_step, blocks.kv_step)
            go = functools.partial(_round, plan, refs, start, edges if masked else None)
            # The very first one is done.
            pl.when(j + index > 0)(go)

        lax.fori_loop(0, blocks.kv // blocks.kv_step, body, None)

    if plan.has_edges:
        whole = edges.whole()
        _when([*live, whole], functools.partial(go_on, False))
        _when([*live, ~whole], functools.partial(go_on, True))
    else:
        _when(live, functools.partial(go_on, False))

    @functools.partial(_when, [*any_live, j == plan.steps - 1])
    def _() -> None:
        _round(plan, refs, None, None)

    @pl.when(j == plan.steps - 1)
    def _() -> None:
        if plan.partial:
            out_ref[...] = sums_ref[...]
            out_ref[highest_row : highest_row + 1] = highest_ref[:1]
            return
        inverse = _inverse(sums_ref[rows : rows + 1])
        out = (sums_ref[:rows] * inverse).astype(out_ref.dtype)
        out_ref[...] = out.T if plan.token_major else out


@dataclass(frozen=True, kw_only=True, slots=True)
class _Refs:
    """What the rounds of a query block work on.

    ``scores`` are those of the round that waits for its weights, ``held`` its values,
    ``turned`` the keys of the round to come. ``candidate`` is the maximum of the scores
    of the round being made, as far as it has come, for each eighth of the keys;
    ``highest`` that of the rounds before; ``rescale`` what the sums shrink by before
    the waiting round is added. The three have SUBLANES rows, the last two all alike.
    """

    q: Any
    k: Any
    v: Any
    sums: Any
    highest: Any
    candidate: Any
    rescale: Any
    scores: list[Any]
    turned: list[Any]
    held: list[Any]
    stand_in: Any
    edges: _Edges


@dataclass(frozen=True, kw_only=True, slots=True)
class _Edges:
    """Where the keys that a block of queries sees begin and end."""

    plan: Plan
    first_q: Any
    first_k: Any
    length: Any

    def whole(self) -> Any:
        """Whether every pair of this step's blocks is allowed.

        A stand-in for keys that do not count may be one that a query does not see.
        """
        plan, blocks = self.plan, self.plan.blocks
        last_k = self.first_k + (blocks.kv - 1)
        checks = [last_k < self.length] if plan.may_pad else []
        if plan.right is not None:
            checks.append(last_k <= self.first_q + plan.right)
        if plan.left is not None:
            checks.append(self.first_k >= self.first_q + (blocks.q - 1 - plan.left))
        return functools.reduce(operator.and_, checks)

    def counts(self, keys: Any, shape: tuple[int, int], tokens: int = 1) -> Any:
        """Whether keys along the dim ``tokens`` count, bool of ``shape``."""
        k_ids = self.first_k + keys + lax.broadcasted_iota(jnp.int32, shape, tokens)
        return k_ids < self.length

    def allowed(self, keys: Any, queries: int, shape: tuple[int, int]) -> Any:
        """Which pairs of a tile are allowed, bool of ``shape`` (keys, queries)."""
        k_ids = self.first_k + keys + lax.broadcasted_iota(jnp.int32, shape, 0)
        q_ids = self.first_q + queries + lax.broadcasted_iota(jnp.int32, shape, 1)
        allowed = k_ids < self.length
        if self.plan.right is not None:
            allowed &= k_ids <= q_ids + self.plan.right
        if self.plan.left is not None:
            allowed &= k_ids >= q_ids - self.plan.left
        return allowed


def _when(conditions: list[Any], body: Callable[[], None]) -> None:
    """Run ``body`` where all conditions hold; there may be none."""
    if conditions:
        pl.when(functools.reduce(operator.and_, conditions))(body)
    else:
        body()


def _turn(refs: _Refs, blocks: SplashBlocks, start: Any, part: int) -> None:
    """Turn a part of the keys of the round at ``start``, with a stand-in for some."""
    size = blocks.kv_compute
    first = start + part * size
    token_major = refs.edges.plan.token_major
    tokens = 0 if token_major else 1
    keys = refs.k[pl.ds(first, size)] if token_major else refs.k[:, pl.ds(first, size)]
    if refs.edges.plan.may_pad:
        repeats = size // refs.stand_in.shape[tokens]
        stand_in = jnp.concatenate([refs.stand_in[...]] * repeats, tokens)
        keys = _chosen(refs.edges.counts(first, keys.shape, tokens), keys, stand_in)
    refs.turned[part][...] = keys if token_major else keys.T


def _chosen(counts: Any, one: Any, other: Any) -> Any:
    """In registers of 32 bits: not every chip chooses among 16."""
    wide = jnp.where(counts, one.astype(jnp.float32), other.astype(jnp.float32))
    return wide.astype(one.dtype)


def _hold(refs: _Refs, blocks: SplashBlocks, start: Any, part: int) -> None:
    """Values of a part of a round, and the rows that count its keys, for later."""
    size = blocks.kv_compute
    first = start + part * size
    if refs.edges.plan.token_major:
        values = refs.v[pl.ds(first, size)]
        if refs.edges.plan.may_pad:
            # Behind the array there may be anything.
            counts = refs.edges.counts(first, values.shape, 0)
            values = _chosen(counts, values, jnp.zeros_like(values))
        values = values.T
    else:
        values = refs.v[:, pl.ds(first, size)]
    rows = values.shape[0]
    held = refs.held[part]
    held[:rows] = values
    shape = (COUNT_ROWS, size)
    counting = jnp.ones(shape, jnp.float32)
    if refs.edges.plan.may_pad:
        counting = jnp.where(refs.edges.counts(first, shape), counting, 0.0)
    held[rows:] = counting.astype(held.dtype)


def _round(
    plan: Plan, refs: _Refs, start: Any, edges: _Edges | None, *, weigh: bool = True
) -> None:
    """Scores of the keys at ``start``, weights and sums of the round before.

    Args:
        plan: the static part.
        refs: what the query block works on.
        start: the first of the ``kv_step`` keys; None for no scores.
        edges: masks for the scores; None where every pair is allowed.
        weigh: whether a round waits for its weights.
    """
    blocks = plan.blocks
    size, width = blocks.kv_compute, blocks.q_compute
    per_part = blocks.q // width
    parts = blocks.kv_step // size
    precision = matmul_precision(refs.q.dtype)
    dot = functools.partial(
        jnp.dot, precision=precision, preferred_element_type=jnp.float32
    )

    waiting: dict[int, tuple[Any, Any]] = {}

    def slabs(x: Any) -> Any:
        """Rows by whole registers."""
        return x.reshape(x.shape[0] // SUBLANES, SUBLANES, x.shape[1])

    def place(number: int) -> tuple[int, Any]:
        return number // per_part, pl.ds(number % per_part * width, width)

    def score(number: int) -> None:
        part, columns = place(number)
        scores = dot(refs.turned[part][...], refs.q[:, columns])
        if edges is not None:
            query = number % per_part * width
            allowed = edges.allowed(start + part * size, query, scores.shape)
            scores = jnp.where(allowed, scores, -jnp.inf)
        refs.scores[number][...] = scores
        highest = slabs(scores).max(axis=0)
        if part > 0:
            highest = jnp.maximum(highest, refs.candidate[:, columns])
        if part < parts - 1:
            refs.candidate[:, columns] = highest
            return
        # The round is complete for these queries, and its weights may be made.
        for shift in (4, 2, 1):
            highest = jnp.maximum(highest, pltpu.roll(highest, shift, 0))
        old = refs.highest[:, columns]
        highest = jnp.maximum(old, highest)
        refs.highest[:, columns] = highest
        refs.rescale[:, columns] = jnp.exp2((old - highest) * plan.factor)

    def to_weights(number: int) -> None:
        part, columns = place(number)
        below = slabs(refs.scores[number][...]) - refs.highest[:, columns]
        weights = jnp.exp2(below * plan.factor).reshape(size, width)
        # The round being made may overwrite it before it is needed.
        due = refs.rescale[:, columns] if part == 0 else None
        waiting[number] = weights.astype(refs.q.dtype), due

    def add(number: int) -> None:
        part, columns = place(number)
        weights, due = waiting.pop(number)
        old = refs.sums[:, columns]
        summed = dot(refs.held[part][...], weights)[: old.shape[0]]
        if due is not None:
            old = (slabs(old) * due).reshape(old.shape)
        refs.sums[:, columns] = old + summed

    for number in range(parts * per_part + plan.lag):
        inside = number < parts * per_part
        if weigh and inside:
            to_weights(number)
        if start is not None and inside:
            score(number)
            part, first_query = divmod(number, per_part)
            if first_query == 0 and part < parts - 1:
                _turn(refs, blocks, start, part + 1)
            if first_query == per_part - 1 and part == 0:
                # Those of the next round; the last one's are not in this block.
                after = jnp.minimum(start + blocks.kv_step, blocks.kv - blocks.kv_step)
                _turn(refs, blocks, pl.multiple_of(after, size), 0)
        last = number - plan.lag
        if last < 0:
            continue
        if weigh:
            add(last)
        if start is not None and last % per_part == per_part - 1:
            # Nothing needs the values before them any more.
            _hold(refs, blocks, start, last // per_part)
