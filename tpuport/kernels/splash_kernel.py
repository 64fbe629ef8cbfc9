"""The Pallas program of our splash attention, and what it is given.

Letters: B batch, H query heads, Hkv key/value heads, Lq and Lk tokens (whole blocks of
Lk), D head dim of queries and keys, Dv of values, both whole numbers of sublanes.

How it is written
-----------------
All arrays have the head dim before the tokens, as a product of weights and tokens gives
them. Scores are transposed, keys by queries, so that what belongs to a query lies along
the lanes and the second product, values by keys times keys by queries, needs no
transpose. Keys are turned here, once per tile of them: the unit for it is idle.

The values get a row more, 1 for a key that counts and 0 for one that does not, whose
other rows are 0 too. The second product then sums the weights as well, in the matrix
unit and as they are after rounding, so that numerator and denominator round alike: a
query with one dominant key gets its value exactly. And keys that do not count need no
mask: their weights meet zeros.

A grid step is written out as a sequence of tiles. The matrix unit takes its products
in the order of the program, so the second product of a tile stands ``lag`` tiles after
the first one: the exponentials between them run meanwhile. Tiles go through VMEM on
the way, which keeps them out of the registers.

Without a maximum, a weight is 2^(score - ``SHIFT``). Where a query block's scores are
not bounded (``flags``), the program takes the exact running maximum instead.

Keys that come in chunks, a call each: with ``partial`` the sums are not divided but
handed on, float32 with the rows of the values first, then ``TOTAL_ROW``, the sum of the
weights, and ``HIGHEST_ROW``, the maximum that was taken off. The next call goes on from
them, so that all calls together add what one call on all keys would. The flags must be
the same in all of them.
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

from tpuport.kernels.masking import LOWEST
from tpuport.kernels.reference import matmul_precision
from tpuport.kernels.splash_blocks import (
    COUNT_ROWS,
    MOST_WRITTEN_OUT,
    SUM_ROWS,
    SplashBlocks,
)

NAME = "tpuport_splash"
# Scores near 0 are the most common ones, and 2^score near 1 is where rounding to
# bfloat16 turns twice as coarse. A shift brings them to the fine side; the softmax does
# not change. It costs one bundle in 1400: the matrix unit is busy meanwhile.
SHIFT = 0.125
# Rows of a state that come after those of the values. The rows that sum weights are
# all alike: any but the first may hold something else on the way.
TOTAL_ROW = 0
HIGHEST_ROW = 1
# The program with the running maximum is for few calls or none: a shorter one will do.
MOST_EXACT_WRITTEN_OUT = MOST_WRITTEN_OUT // 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything about a call that is known before it runs.

    ``left`` and ``right`` bound the keys a query sees by their distance, None for no
    bound. ``factor`` times a score is the exponent of 2. ``running_max`` None leaves
    it to the flags. ``has_lengths``: how many of the ``kv_len`` keys count is known
    when the program runs. ``partial``: sums come in and go out, see above.
    """

    blocks: SplashBlocks
    groups: int
    factor: float
    left: int | None
    right: int | None
    running_max: bool | None
    has_lengths: bool
    kv_len: int
    q_blocks: int
    kv_blocks: int
    partial: bool = False

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
    def steps(self) -> int:
        """Key blocks that any query block may see, at most."""
        return max(1, int((self.last_blocks() - self.first_blocks()).max()) + 1)


def run(
    plan: Plan,
    lengths: jax.Array,
    flags: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    state: jax.Array | None = None,
    vmem_limit: int,
    interpret: bool,
) -> jax.Array:
    """Attention, transposed.

    Args:
        plan: the static part.
        lengths: keys that count, int32 of shape [B].
        flags: whether a query block needs the running maximum, int32 of shape
            [B H q_blocks].
        q: of shape [B, H, D, Lq].
        k: of shape [B, Hkv, D, Lk]; finite where a key does not count.
        v: of shape [B, Hkv, Dv, Lk]; zeros where a key does not count.
        state: float32 [B, H, Dv + SUM_ROWS, Lq] if ``plan.partial``: what the call on
            the keys before gave, or :func:`empty_state`.
        vmem_limit: bytes of VMEM that the program may take.
        interpret: run the program op by op, on any platform.

    Returns:
        of shape [B, H, Dv, Lq], in the dtype of ``q``; with ``plan.partial`` of the
        shape and dtype of ``state``.
    """
    blocks = plan.blocks
    batch, heads, depth, q_len = q.shape
    rows = v.shape[2]
    # What a step asks of its place is looked up: scalar divisions are slow.
    first = jnp.asarray(plan.first_blocks())
    counted = jnp.maximum(lengths - 1, 0)[:, None] // blocks.kv
    last = jnp.minimum(jnp.asarray(plan.last_blocks()), counted)
    first = jnp.minimum(first, last).reshape(-1)
    last = last.reshape(-1)

    def q_map(b: Any, h: Any, i: Any, j: Any, *_: Any) -> tuple[Any, ...]:
        return b, h, 0, i

    def kv_map(*args: Any) -> tuple[Any, ...]:
        b, h, i, j, _, _, first, last = args
        head = h if plan.groups == 1 else lax.div(h, jnp.int32(plan.groups))
        at = b * plan.q_blocks + i
        block = j if plan.left is None else first[at] + j
        if plan.has_lengths or plan.left is not None or plan.right is not None:
            # Steps past the last block stay on it: nothing is fetched for them.
            block = jnp.minimum(block, last[at])
        return b, head, 0, block

    def tile(dtype: Any, rows: int) -> list[Any]:
        shape = (rows, blocks.q_compute)
        count = blocks.lag + 1 + (plan.running_max is not False)
        return [pltpu.VMEM(shape, dtype) for _ in range(count)]

    scores = batch * heads * q_len * plan.steps * blocks.kv
    out = pl.BlockSpec((None, None, rows, blocks.q), q_map)
    out_shape = jax.ShapeDtypeStruct((batch, heads, rows, q_len), q.dtype)
    operands, aliases = [lengths, flags, first, last, q, k, v], {}
    in_state = []
    if plan.partial:
        assert state is not None
        out = pl.BlockSpec((None, None, rows + SUM_ROWS, blocks.q), q_map)
        out_shape = jax.ShapeDtypeStruct(state.shape, state.dtype)
        in_state, aliases = [out], {len(operands): 0}
        operands.append(state)
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, heads, plan.q_blocks, plan.steps),
            in_specs=[
                pl.BlockSpec((None, None, depth, blocks.q), q_map),
                pl.BlockSpec((None, None, depth, blocks.kv), kv_map),
                pl.BlockSpec((None, None, rows, blocks.kv), kv_map),
                *in_state,
            ],
            out_specs=out,
            scratch_shapes=[
                pltpu.VMEM((rows + SUM_ROWS, blocks.q), jnp.float32),
                pltpu.VMEM((1, blocks.q), jnp.float32),
                tile(q.dtype, blocks.kv_compute),
                tile(jnp.float32, 1),
                [pltpu.VMEM((blocks.kv_compute, depth), k.dtype) for _ in range(2)],
            ],
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
        cost_estimate=pl.CostEstimate(
            flops=2 * scores * (depth + rows + COUNT_ROWS),
            transcendentals=scores,
            bytes_accessed=(
                2 * q.size + (k.size + v.size) * plan.groups * plan.q_blocks
            )
            * q.dtype.itemsize,
        ),
        interpret=interpret,
        name=NAME,
    )(*operands)


def empty_state(batch: int, heads: int, rows: int, q_len: int) -> jax.Array:
    """The state before any key, for ``rows`` rows of values."""
    state = jnp.zeros((batch, heads, rows + SUM_ROWS, q_len), jnp.float32)
    return state.at[:, :, rows + HIGHEST_ROW].set(LOWEST)


def divided(state: jax.Array, rows: int) -> jax.Array:
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
    flags_ref: Any,
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
    out_ref, sums_ref, highest_ref, weights_refs, rescale_refs, turned_refs = (
        refs_behind
    )
    blocks = plan.blocks
    b, h, i, j = (pl.program_id(dim) for dim in range(4))
    at = b * plan.q_blocks + i
    # What is known is not looked up, so that a reader of the program can follow it.
    block = j if plan.left is None else first_ref[at] + j
    edges = _Edges(
        plan=plan,
        first_q=i * blocks.q,
        first_k=block * blocks.kv,
        length=lengths_ref[b] if plan.has_lengths else plan.kv_len,
    )
    refs = _Refs(
        q=q_ref,
        k=k_ref,
        v=v_ref,
        state=state_ref,
        sums=sums_ref,
        highest=highest_ref,
        weights=weights_refs,
        rescales=rescale_refs,
        turned=turned_refs,
        fresh=j == 0,
        edges=edges,
    )

    # Every query block has a first step that is live, also where it sees no key.
    live = []
    if plan.has_lengths:
        live.append(block <= last_ref[at])
    else:
        if plan.right is not None:
            live.append(edges.first_k <= edges.first_q + (blocks.q - 1 + plan.right))
        if plan.left is not None:
            live.append(block < plan.kv_blocks)
    if plan.running_max is None:
        exact = flags_ref[(b * pl.num_programs(1) + h) * plan.q_blocks + i] != 0
        ways = [(False, [*live, ~exact]), (True, [*live, exact])]
    else:
        ways = [(plan.running_max, live)]
    for use_max, runs in ways:
        whole = edges.whole(use_max)
        tiles = functools.partial(_tiles, plan, refs, use_max)
        if whole is None:
            _when(runs, functools.partial(tiles, None))
        else:
            _when([*runs, whole], functools.partial(tiles, None))
            _when([*runs, ~whole], functools.partial(tiles, edges))

    @pl.when(j == plan.steps - 1)
    def _() -> None:
        if plan.partial:
            row = out_ref.shape[0] - SUM_ROWS + HIGHEST_ROW
            out_ref[...] = sums_ref[...]
            # Without a maximum nothing reads it.
            out_ref[row : row + 1] = highest_ref[...]
            return
        rows = out_ref.shape[0]
        inverse = _inverse(sums_ref[rows : rows + 1])
        out_ref[...] = (sums_ref[:rows] * inverse).astype(out_ref.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Refs:
    q: Any
    k: Any
    v: Any
    state: Any
    sums: Any
    highest: Any
    weights: list[Any]
    rescales: list[Any]
    turned: list[Any]
    fresh: Any
    edges: _Edges


@dataclass(frozen=True, kw_only=True, slots=True)
class _Edges:
    """Where the keys that a block of queries sees begin and end."""

    plan: Plan
    first_q: Any
    first_k: Any
    length: Any

    def whole(self, use_max: bool) -> Any:
        """Whether every pair of this step's blocks is allowed; None: always."""
        plan, blocks = self.plan, self.plan.blocks
        last_k = self.first_k + (blocks.kv - 1)
        checks = []
        if use_max and (plan.has_lengths or plan.kv_len % blocks.kv):
            checks.append(last_k < self.length)
        if plan.right is not None:
            checks.append(last_k <= self.first_q + plan.right)
        if plan.left is not None:
            checks.append(self.first_k >= self.first_q + (blocks.q - 1 - plan.left))
        return functools.reduce(operator.and_, checks) if checks else None

    def counting(self, keys: Any, dtype: Any) -> Any:
        """The rows that count the keys of a tile, [COUNT_ROWS, kv_compute]."""
        shape = (COUNT_ROWS, self.plan.blocks.kv_compute)
        if not self.plan.has_lengths and self.plan.kv_len % self.plan.blocks.kv == 0:
            return jnp.ones(shape, dtype)
        k_ids = self.first_k + keys + lax.broadcasted_iota(jnp.int32, shape, 1)
        return jnp.where(k_ids < self.length, 1.0, 0.0).astype(dtype)

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


def _tiles(plan: Plan, refs: _Refs, use_max: bool, edges: _Edges | None) -> None:
    """All tiles of a step; ``edges`` None where every pair is allowed."""
    blocks = plan.blocks
    if edges is not None:
        step = blocks.kv_compute
    elif use_max:
        step = blocks.keys_written_out(MOST_EXACT_WRITTEN_OUT)
    else:
        step = blocks.kv_step

    def rounds(index: Any, carry: None) -> None:
        start = pl.multiple_of(index * step, step)
        tiles = [
            (start + key, query)
            for key in range(0, step, blocks.kv_compute)
            for query in range(0, blocks.q, blocks.q_compute)
        ]
        fresh = refs.fresh & (index == 0)
        _pipeline(
            plan, refs, tiles, blocks.q // blocks.q_compute, fresh, edges, use_max
        )

    lax.fori_loop(0, blocks.kv // step, rounds, None, unroll=blocks.kv == step)


def _pipeline(
    plan: Plan,
    refs: _Refs,
    tiles: list[tuple[Any, int]],
    starts: int,
    fresh: Any,
    edges: _Edges | None,
    use_max: bool,
) -> None:
    """Tiles (first key, first query) in order, second products ``lag`` tiles late.

    The first ``starts`` of them start their sums anew if ``fresh``.
    """
    blocks = plan.blocks
    precision = matmul_precision(refs.q.dtype)
    dot = functools.partial(
        jnp.dot, precision=precision, preferred_element_type=jnp.float32
    )
    kept = refs.sums.shape[0]
    count = len(refs.weights)
    # A tile with a maximum is longer under way.
    lag = blocks.lag + use_max

    def before(ref: Any, number: int, start: float, row: int | None = None) -> Any:
        columns = pl.ds(tiles[number][1], blocks.q_compute)
        held = ref[:, columns]
        if number >= starts:
            return held
        first: Any = start
        if refs.state is not None:
            rows = slice(None) if row is None else slice(row, row + 1)
            first = refs.state[rows, columns]
        return jnp.where(fresh, first, held)

    def weigh(number: int) -> None:
        key, query = tiles[number]
        columns = pl.ds(query, blocks.q_compute)
        turned = refs.turned[number // starts % len(refs.turned)]
        if query == 0:
            turned[...] = refs.k[:, pl.ds(key, blocks.kv_compute)].T
        scores = dot(turned[...], refs.q[:, columns])
        scores = scores * plan.factor - (0.0 if use_max else SHIFT)
        if edges is not None:
            allowed = edges.allowed(key, query, scores.shape)
            scores = jnp.where(allowed, scores, -jnp.inf)
        if use_max:
            old = before(refs.highest, number, LOWEST, kept - SUM_ROWS + HIGHEST_ROW)
            highest = jnp.maximum(old, jnp.max(scores, axis=0, keepdims=True))
            refs.highest[:, columns] = highest
            refs.rescales[number % count][...] = jnp.exp2(old - highest)
            scores = scores - highest
        weights = jnp.exp2(scores).astype(refs.q.dtype)
        refs.weights[number % count][...] = weights

    def add(number: int) -> None:
        key, query = tiles[number]
        columns = pl.ds(query, blocks.q_compute)
        weights = refs.weights[number % count][...]
        values = refs.v[:, pl.ds(key, blocks.kv_compute)]
        counting = refs.edges.counting(key, refs.v.dtype)
        summed = dot(jnp.concatenate([values, counting]), weights)[:kept]
        old = before(refs.sums, number, 0.0)
        if use_max:
            old = old * refs.rescales[number % count][...]
        refs.sums[:, columns] = old + summed

    for number in range(len(tiles)):
        weigh(number)
        if number >= lag:
            add(number - lag)
    for number in range(max(len(tiles) - lag, 0), len(tiles)):
        add(number)
