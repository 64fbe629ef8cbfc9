"""Attention of one padded sequence whose tokens are split over the mesh.

Letters: B batch, H heads, L tokens with padding, D head dim, S devices on the sequence
axis; M and N are L and D, or D and L where features come before tokens.

An all-to-all around the kernel exchanges tokens for heads: every device gets all tokens
of some heads (Ulysses; Jacobs et al. 2023, arXiv:2309.14509). Heads of all batch items
count, and heads that do not divide are padded. If there are fewer heads than devices,
groups of devices share heads: each device keeps its part of the queries, and keys and
values go round the group (``ring.py``).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpuport.core import compat
from tpuport.core.arrays import Array, Float, Int, Shaped
from tpuport.core.layers.ring import (
    GATHERED,
    PASSED,
    AttentionOptions,
    Ring,
    gathered_attention,
    keys_within,
    ring_attention,
    too_short,
)
from tpuport.core.tracing.context import Active, AttentionRecord, OpContext
from tpuport.kernels.attention.attention import attention, attention_feature_major
from tpuport.kernels.attention.chunked import chunked_refusal
from tpuport.kernels.attention.problem import describe
from tpuport.kernels.attention.selection import DEFAULT_CHIP, select
from tpuport.kernels.attention.splash_blocks import default_blocks
from tpuport.kernels.padding import ceil_div, pad_dim, round_up

#: A slice on a TPU is a multiple of this: a lane of a vector register holds a token.
TPU_TOKENS = 128
#: Padding to whole blocks may add this share to the longest sequence.
MOST_PADDING = 1 / 12
#: Padded heads may add this share of work; beyond it devices share heads.
MOST_HEAD_PADDING = 0.1


@dataclass(frozen=True, slots=True)
class Degrees:
    """How S devices split attention: ``ulysses`` ways by heads, ``ring`` by queries.

    The mesh's order of devices (``device_mesh.py``) puts devices that exchange
    near each other.
    """

    ulysses: int
    ring: int

    @property
    def exchanges(self) -> list[list[int]]:
        """Places of the sequence axis that exchange tokens for heads: neighbours."""
        starts = range(0, self.ring * self.ulysses, self.ulysses)
        return [list(range(start, start + self.ulysses)) for start in starts]

    @property
    def rings(self) -> list[list[int]]:
        """Places that share heads, in the order in which keys are passed on."""
        return [list(group) for group in zip(*self.exchanges, strict=True)]


def degrees(heads: int, devices: int) -> Degrees:
    """The split of ``heads`` (of all batch items) over ``devices``.

    Heads are split as far as possible: padded heads may add :data:`MOST_HEAD_PADDING`
    to the least work of any split.
    """
    options = [u for u in range(devices, 0, -1) if devices % u == 0]
    work = {u: ceil_div(heads, u) * u for u in options}
    most = min(work.values()) * (1 + MOST_HEAD_PADDING)
    ulysses = next(u for u in options if work[u] <= most)
    return Degrees(ulysses, devices // ulysses)


def degrees_of(active: Active, batch: int, heads: int) -> Degrees:
    """How attention of ``heads`` of ``batch`` items is split over the sequence axis."""
    *_, local = _placed(active, batch, heads)
    return degrees(
        math.prod(local), active.axis_size(active.context.attention.sequence)
    )


def _placed(
    active: Active, batch: int, heads: int
) -> tuple[str | None, str | None, tuple[int, int]]:
    """The mesh axes of items and heads, and the items and heads of a device."""
    policy = active.context.attention

    def axis(name: str | None, count: int) -> str | None:
        size = active.axis_size(name)
        return name if size > 1 and count % size == 0 else None

    batch_axis, head_axis = axis(policy.batch, batch), axis(policy.heads, heads)
    local = batch // active.axis_size(batch_axis), heads // active.axis_size(head_axis)
    return batch_axis, head_axis, local


def padded_length(
    length: int,
    devices: int,
    *,
    platform: str,
    head_dim: int,
    chip: str | None,
    ring: int = 1,
) -> int:
    """Tokens of a sequence of ``length`` with padding, a multiple of ``devices``.

    On a TPU slices are whole lanes, and the kernel gets whole blocks if that adds less
    than :data:`MOST_PADDING`. Each of ``ring`` devices that share heads has its chunk
    of the queries, and gets keys by the chunk, or all keys if they are gathered.
    """
    if platform != "tpu":
        return round_up(length, devices)

    granule = math.lcm(TPU_TOKENS * devices, 256)
    first = round_up(length, granule)
    most = max(first, int(length * (1 + MOST_PADDING)))
    chip = chip or DEFAULT_CHIP
    for padded in range(first, most + 1, granule):
        queries = keys = padded // ring
        if ring > 1 and too_short(queries, head_dim, 2, chip):
            keys = padded
        blocks = default_blocks(queries, keys, head_dim, chip=chip)
        if queries % blocks.q == 0 and keys % blocks.kv == 0:
            return padded
    return first


def sequence_attention(
    active: Active,
    q: Float[Array, "b h m n"],
    k: Float[Array, "b h m n"],
    v: Float[Array, "b h m n"],
    *,
    kv_len: int,
    kv_lengths: Int[Array, "b"] | None = None,
    scale: float | None = None,
    feature_major: bool,
) -> Float[Array, "b h m n"]:
    """Attention of all tokens on the tokens that count.

    Args:
        active: what is being traced: its mesh, its attention policy and implementation.
        q, k, v: of shape [B, H, L, D], or [B, H, D, L] with ``feature_major``; L is
            a multiple of S. For a key that does not count ``v`` is zero and ``k`` is
            finite.
        kv_len: tokens from this index on do not count.
        kv_lengths: tokens of each item that count, integers [B], at most ``kv_len``.
        scale: factor of the scores; None means 1/sqrt(D).

    Returns:
        of the shape and dtype of ``q``; arbitrary for tokens that do not count.

    Raises:
        AttentionError: the implementation named in the context cannot do this call.
    """
    context = active.context
    has_lengths = kv_lengths is not None
    exchange = _Exchange.of(active, *q.shape[:2], feature_major=feature_major)
    record = _record(
        active, q, kv_len=kv_len, has_lengths=has_lengths, exchange=exchange
    )
    run = functools.partial(
        _kernel, context, kv_len=kv_len, scale=scale, feature_major=feature_major
    )

    def on_device(
        q: Float[Array, "b h m n"],
        k: Float[Array, "b h m n"],
        v: Float[Array, "b h m n"],
        lengths: Int[Array, "b"],
    ) -> Float[Array, "b h m n"]:
        if exchange.axis is None:
            return run(q, k, v, lengths=lengths if has_lengths else None)
        place = jax.lax.axis_index(exchange.axis)
        mine = exchange.lengths(lengths, place) if has_lengths else None
        q, k, v = (exchange.to_heads(x) for x in (q, k, v))
        if exchange.degrees.ring == 1:
            return exchange.to_tokens(run(q, k, v, lengths=mine))
        if not feature_major:
            q, k, v = (x.swapaxes(2, 3) for x in (q, k, v))
        together = ring_attention if record.ring_keys == PASSED else gathered_attention
        ring, options = exchange.ring(place), _options(context, scale)
        out = together(ring, q, k, v, kv_len=kv_len, lengths=mine, options=options)
        return exchange.to_tokens(out if feature_major else out.swapaxes(2, 3))

    mesh = context.mesh
    if mesh is None or mesh.size == 1:
        return run(q, k, v, lengths=kv_lengths)
    if kv_lengths is None:
        kv_lengths = jnp.full(q.shape[:1], kv_len, jnp.int32)
    dims: list[str | None] = [*exchange.split[:2], None, None]
    dims[exchange.tokens] = exchange.axis
    spec = PartitionSpec(*dims)
    lengths_spec = PartitionSpec(dims[0])
    out: Array = compat.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(spec, spec, spec, lengths_spec),
        out_specs=spec,
    )(q, k, v, kv_lengths)
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class _Exchange:
    """How devices of the sequence axis exchange tokens for heads, and back.

    Attributes:
        split: the axes of the mesh that split items, heads, tokens and features.
        degrees: ways by heads, and by queries.
        local: items and heads of a device before the exchange.
        tokens: the dim of tokens.
    """

    split: tuple[str | None, str | None, str | None, None]
    degrees: Degrees
    local: tuple[int, int]
    tokens: int

    @classmethod
    def of(
        cls, active: Active, batch: int, heads: int, *, feature_major: bool
    ) -> _Exchange:
        """The exchange for ``batch`` items of ``heads`` heads."""
        batch_axis, head_axis, local = _placed(active, batch, heads)
        sequence = active.context.attention.sequence
        axis = sequence if active.axis_size(sequence) > 1 else None
        return cls(
            split=(batch_axis, head_axis, axis, None),
            degrees=degrees_of(active, batch, heads),
            local=local,
            tokens=3 if feature_major else 2,
        )

    @property
    def axis(self) -> str | None:
        """The sequence axis of the mesh; ``None`` if tokens are not split."""
        return self.split[2]

    @property
    def count(self) -> int:
        """Heads of all items of a device, before the exchange."""
        return math.prod(self.local)

    @property
    def each(self) -> int:
        """Heads of a device after the exchange, with padded heads."""
        return -(-self.count // self.degrees.ulysses)

    def to_heads(self, x: Float[Array, "b h _ _"]) -> Float[Array, "heads 1 _ _"]:
        """[b, h, ..] with some tokens to [heads, 1, ..] with the group's tokens."""
        x = self._padded(x.reshape(self.count, 1, *x.shape[2:]))
        ways = self.degrees.ulysses
        if ways == 1:
            return x
        parts = self._exchanged(x.reshape(ways, self.each, *x.shape[1:]))
        # Parts lie side by side: whole tiles of memory move, nothing inside a tile.
        return jnp.concatenate(list(parts), self.tokens)

    def to_tokens(self, x: Float[Array, "heads 1 _ _"]) -> Float[Array, "b h _ _"]:
        """[heads, 1, ..] with the group's tokens to [b, h, ..] with some tokens."""
        ways = self.degrees.ulysses
        if ways > 1:
            parts = jnp.stack(jnp.split(x, ways, self.tokens))
            x = self._exchanged(parts).reshape(ways * self.each, 1, *parts.shape[3:])
        return x[: self.count].reshape(*self.local, *x.shape[2:])

    def lengths(
        self, lengths: Int[Array, "b"], place: Int[Array, ""]
    ) -> Int[Array, "heads"]:
        """The key length of each head of the device at ``place``."""
        every = self._padded(jnp.repeat(lengths, self.local[1]))
        start = place % self.degrees.ulysses * self.each
        return jax.lax.dynamic_slice_in_dim(every, start, self.each)

    def ring(self, place: Int[Array, ""]) -> Ring:
        """The devices that share heads with the device at ``place``."""
        assert self.axis is not None
        rank = place // self.degrees.ulysses
        return Ring(axis=self.axis, groups=self.degrees.rings, rank=rank)

    def _padded(self, x: Shaped[Array, "_ *rest"]) -> Shaped[Array, "_ *rest"]:
        return pad_dim(x, 0, self.degrees.ulysses * self.each)

    def _exchanged(
        self, x: Float[Array, "ulysses *rest"]
    ) -> Float[Array, "ulysses *rest"]:
        """Every device of the group gets its row of each device's [ulysses, ...]."""
        groups = self.degrees.exchanges
        return jax.lax.all_to_all(x, self.axis, 0, 0, axis_index_groups=groups)


def _options(context: OpContext, scale: float | None) -> AttentionOptions:
    return AttentionOptions(
        scale=scale,
        platform=context.platform,
        choice=context.implementation,
        chip=context.chip,
    )


def _kernel(
    context: OpContext,
    q: Float[Array, "b h m n"],
    k: Float[Array, "b h m n"],
    v: Float[Array, "b h m n"],
    *,
    kv_len: int,
    lengths: Int[Array, "b"] | None,
    scale: float | None,
    feature_major: bool,
) -> Float[Array, "b h m n"]:
    if feature_major:
        return attention_feature_major(
            q,
            k,
            v,
            kv_len=kv_len,
            kv_lengths=lengths,
            hidden=True,
            scale=scale,
            platform=context.platform,
            implementation=context.implementation,
            chip=context.chip,
        )
    return attention(
        q,
        k[:, :, :kv_len],
        v[:, :, :kv_len],
        scale=scale,
        kv_lengths=lengths,
        platform=context.platform,
        implementation=context.implementation,
        chip=context.chip,
        fall_back=True,
    )


def _record(
    active: Active,
    q: Float[Array, "b h m n"],
    *,
    kv_len: int,
    has_lengths: bool,
    exchange: _Exchange,
) -> AttentionRecord:
    """Note how this call runs."""
    context, degrees = active.context, exchange.degrees
    head_dim, length = q.shape[5 - exchange.tokens], q.shape[exchange.tokens]
    choice = context.implementation
    count, queries = exchange.each, length // degrees.ring
    way = why = None
    keys = length if exchange.tokens == 3 else kv_len
    if degrees.ring > 1:
        way, why = PASSED, _not_passed(context, queries, head_dim, q.dtype)
        keys = queries
        if why is not None:
            way, keys = GATHERED, keys_within(queries, length, choice.window)
    struct = jax.ShapeDtypeStruct
    masked = has_lengths
    if way is not None:
        masked = masked or kv_len < length or choice.window is not None
    problem = describe(
        struct((count, 1, queries, head_dim), q.dtype),
        struct((count, 1, keys, head_dim), q.dtype),
        struct((count, 1, keys, head_dim), q.dtype),
        kv_lengths=struct((count,), "int32") if masked else None,
        window=choice.window,
        platform=context.platform,
    )
    selection = select(problem, choice, chip=context.chip, fall_back=True)
    reason = "; ".join(
        [selection.reason, *(f"not {n}: {text}" for n, text in selection.passed_over)]
        + ([f"keys are gathered: {why}"] if why else [])
    )
    shape = (*q.shape[:2], kv_len, head_dim)
    record = AttentionRecord(
        query=shape,
        key=shape,
        implementation=selection.implementation,
        reason=reason,
        split=exchange.split,
        key_lengths=has_lengths,
        blocks=dict(selection.blocks),
        window=choice.window,
        k_smooth=choice.k_smooth,
        dtype=str(q.dtype),
        padded=length,
        ulysses=degrees.ulysses,
        ring=degrees.ring,
        ring_keys=way,
        notice=selection.notice,
    )
    if record not in context.records:
        context.records.append(record)
    return record


def _not_passed(
    context: OpContext, queries: int, head_dim: int, dtype: Any
) -> str | None:
    """Why keys do not go round a ring; ``None`` if they do."""
    refusal = chunked_refusal(context.implementation)
    if refusal is None and context.chip is not None:
        refusal = too_short(queries, head_dim, dtype.itemsize, context.chip)
    return refusal
