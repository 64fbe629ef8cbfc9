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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp

from tpuport.core.arrays import Array, Float, Int, Shaped
from tpuport.core.layers.attention import note_attention
from tpuport.core.layers.ring import (
    GATHERED,
    PASSED,
    Ring,
    gathered_attention,
    keys_within,
    ring_attention,
    too_short,
)
from tpuport.core.tracing.context import (
    BATCH,
    HEADS,
    TOKENS,
    Active,
    AttentionRecord,
    OpContext,
)
from tpuport.core.tracing.ported_module import on_devices
from tpuport.kernels.attention.attention import attention, attention_feature_major
from tpuport.kernels.attention.choice import AUTO
from tpuport.kernels.attention.chunked import chunked_refusal
from tpuport.kernels.attention.problem import describe
from tpuport.kernels.attention.selection import DEFAULT_CHIP, select
from tpuport.kernels.attention.splash import splash_in_parts
from tpuport.kernels.attention.splash_blocks import (
    SplashBlocks,
    default_blocks,
    part_blocks,
)
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
    return _Exchange.of(active, batch, heads, feature_major=True).degrees


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
    v: Float[Array, "b h _ _"],
    *,
    kv_len: int,
    kv_lengths: Int[Array, "b"] | None = None,
    scale: float | None = None,
    feature_major: bool,
) -> Float[Array, "b h _ _"]:
    """Attention of all tokens on the tokens that count.

    Args:
        active: what is being traced: its mesh and its attention.
        q, k, v: of shape [B, H, L, D], or [B, H, D, L] with ``feature_major``; L is
            a multiple of S. ``v`` may have another D. For a key that does not count
            ``v`` is zero and ``k`` is finite.
        kv_len: tokens from this index on do not count.
        kv_lengths: tokens of each item that count, integers [B], at most ``kv_len``.
        scale: factor of the scores; None means 1/sqrt(D).

    Returns:
        of the shape and dtype of ``q``, with the D of ``v``; arbitrary for tokens that
        do not count.

    Raises:
        AttentionError: the implementation named in the context cannot do this call.
    """
    context = active.context
    exchange = _Exchange.of(active, *q.shape[:2], feature_major=feature_major)
    record = _record(
        active, q, kv_len=kv_len, has_lengths=kv_lengths is not None, exchange=exchange
    )
    blocks = exchange.part_blocks(active, q) if q.shape == v.shape else None
    options: dict[str, Any] = {
        "kv_len": kv_len,
        "scale": scale,
        "platform": context.platform,
        "implementation": context.implementation,
        "chip": context.chip,
    }
    kernel: Callable[..., Array] = _kernel
    run = functools.partial(kernel, feature_major=feature_major, **options)

    def on_device(
        q: Float[Array, "b h m n"],
        k: Float[Array, "b h m n"],
        v: Float[Array, "b h _ _"],
        lengths: Int[Array, "b"] | None,
    ) -> Float[Array, "b h _ _"]:
        if exchange.axis is None:
            return run(q, k, v, lengths)
        place = jax.lax.axis_index(exchange.axis)
        mine = None if lengths is None else exchange.lengths(lengths, place)
        if blocks is not None:
            given = {"kv_len": kv_len, "kv_lengths": mine, "scale": scale}
            return _in_parts(exchange, context, (q, k, v), blocks, **given)
        q, k, v = (exchange.to_heads(x) for x in (q, k, v))
        if exchange.degrees.ring == 1:
            return exchange.to_tokens(run(q, k, v, mine))
        if not feature_major:
            q, k, v = (x.swapaxes(2, 3) for x in (q, k, v))
        together = ring_attention if record.ring_keys == PASSED else gathered_attention
        out = together(exchange.ring(place), q, k, v, lengths=mine, **options)
        return exchange.to_tokens(out if feature_major else out.swapaxes(2, 3))

    dims: list[str | None] = [*exchange.split[:2], None, None]
    dims[exchange.tokens] = exchange.axis
    axes = tuple(dims)
    arrays = (q, k, v, kv_lengths)
    return on_devices(
        context.mesh, on_device, arrays, (axes, axes, axes, axes[:1]), axes
    )


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
        context = active.context
        batch_axis = context.axis(BATCH, batch)
        head_axis = context.axis(HEADS, heads)
        each = heads // context.axis_size(head_axis)
        local = batch // context.axis_size(batch_axis), each
        return cls(
            split=(batch_axis, head_axis, context.axis(TOKENS), None),
            degrees=degrees(math.prod(local), context.axis_size(TOKENS)),
            local=local,
            tokens=3 if feature_major else 2,
        )

    @property
    def axis(self) -> str | None:
        """The sequence axis of the mesh; ``None`` if tokens are not split."""
        return self.split[2]

    @property
    def heads_first(self) -> bool:
        """Whether items of a head lie together, not heads of an item.

        Heads that were slices of lanes lie so (``patches/pairs.py``).
        """
        return self.tokens == 2

    @property
    def count(self) -> int:
        """Heads of all items of a device, before the exchange."""
        return math.prod(self.local)

    @property
    def each(self) -> int:
        """Heads of a device after the exchange, with padded heads."""
        return -(-self.count // self.degrees.ulysses)

    def part_blocks(
        self, active: Active, q: Float[Array, "b h m n"]
    ) -> SplashBlocks | None:
        """Tiles of the kernel on parts as they come; ``None`` to join the parts."""
        context, choice = active.context, active.context.implementation
        ways = self.degrees.ulysses
        if self.heads_first or self.degrees.ring > 1 or ways == 1:
            return None
        named = choice.blocks or choice.window is not None or choice.k_smooth
        if named or choice.name not in (AUTO, "splash") or context.platform != "tpu":
            return None
        return part_blocks(
            q.shape[3] // ways,
            ways,
            q.shape[2],
            chip=context.chip or DEFAULT_CHIP,
            itemsize=q.dtype.itemsize,
        )

    def to_parts(self, x: Float[Array, "b h _ _"]) -> Float[Array, "p heads 1 _ _"]:
        """[b, h, ..] with some tokens to [p, heads, 1, ..] with those of p devices."""
        if self.heads_first:
            x = x.swapaxes(0, 1)
        x = self._padded(x.reshape(self.count, 1, *x.shape[2:]))
        parts = x.reshape(self.degrees.ulysses, self.each, *x.shape[1:])
        return parts if self.degrees.ulysses == 1 else self._exchanged(parts)

    def from_parts(self, x: Float[Array, "p heads 1 _ _"]) -> Float[Array, "b h _ _"]:
        """[p, heads, 1, ..] with tokens of p devices to [b, h, ..] with some tokens."""
        if self.degrees.ulysses > 1:
            x = self._exchanged(x)
        x = x.reshape(-1, *x.shape[2:])[: self.count]
        if self.heads_first:
            return x.reshape(*self.local[::-1], *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(*self.local, *x.shape[2:])

    def to_heads(self, x: Float[Array, "b h _ _"]) -> Float[Array, "heads 1 _ _"]:
        """[b, h, ..] with some tokens to [heads, 1, ..] with the group's tokens."""
        # Parts lie side by side: whole tiles of memory move, nothing inside a tile.
        parts = list(self.to_parts(x))
        return jnp.concatenate(parts, self.tokens) if len(parts) > 1 else parts[0]

    def to_tokens(self, x: Float[Array, "heads 1 _ _"]) -> Float[Array, "b h _ _"]:
        """[heads, 1, ..] with the group's tokens to [b, h, ..] with some tokens."""
        ways = self.degrees.ulysses
        return self.from_parts(jnp.stack(jnp.split(x, ways, self.tokens)))

    def lengths(
        self, lengths: Int[Array, "b"], place: Int[Array, ""]
    ) -> Int[Array, "heads"]:
        """The key length of each head of the device at ``place``."""
        each = self.local[1]
        of_heads = jnp.tile(lengths, each) if self.heads_first else lengths.repeat(each)
        every = self._padded(of_heads)
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
        swap = functools.partial(
            jax.lax.all_to_all, axis_name=self.axis, split_axis=0, concat_axis=0
        )
        if self.degrees.ring == 1:
            return swap(x)
        groups = self.degrees.exchanges
        return _batched(functools.partial(swap, axis_index_groups=groups))(x)


def _in_parts(
    exchange: _Exchange,
    context: OpContext,
    arrays: tuple[Array, Array, Array],
    blocks: SplashBlocks,
    **options: Any,
) -> Float[Array, "b h d l"]:
    """Attention on parts as devices exchange them, which nobody joins."""
    q, k, v = arrays
    # One after the other, as the links take them: an exchange runs beside the products
    # that give what the next one takes.
    q = exchange.to_parts(q)
    k = exchange.to_parts(_after(k, q))
    v = exchange.to_parts(_after(v, k))
    out = splash_in_parts(
        q,
        k,
        v,
        blocks=blocks,
        chip=context.chip or DEFAULT_CHIP,
        platform=context.platform,
        hidden=True,
        **options,
    )
    return exchange.from_parts(out)


def _after(
    x: Float[Array, "*dims"], first: Float[Array, "*others"]
) -> Float[Array, "*dims"]:
    """``x`` once ``first`` is there."""
    after: Array = jax.lax.optimization_barrier((x, first))[0]
    return after


def _batched(swap: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """``swap`` of the first dim for ``jax.vmap``: JAX batches no swap in groups."""

    @jax.custom_batching.custom_vmap
    def swapped(x: Shaped[Array, "ulysses *rest"]) -> Shaped[Array, "ulysses *rest"]:
        return swap(x)

    @swapped.def_vmap
    def _(size: int, batched: Sequence[bool], x: Array) -> tuple[Array, bool]:
        return jnp.moveaxis(swapped(jnp.moveaxis(x, 0, 1)), 1, 0), True

    return swapped


def _kernel(
    q: Float[Array, "b h m n"],
    k: Float[Array, "b h m n"],
    v: Float[Array, "b h _ _"],
    lengths: Int[Array, "b"] | None,
    *,
    kv_len: int,
    feature_major: bool,
    **options: Any,
) -> Float[Array, "b h _ _"]:
    if feature_major:
        return attention_feature_major(
            q, k, v, kv_len=kv_len, kv_lengths=lengths, hidden=True, **options
        )
    k, v = k[:, :, :kv_len], v[:, :, :kv_len]
    return attention(q, k, v, kv_lengths=lengths, **options)


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
    selection = select(problem, choice, chip=context.chip)
    shape = (*q.shape[:2], kv_len, head_dim)
    return note_attention(
        context,
        choice,
        selection,
        f"keys are gathered: {why}" if why else "",
        query=shape,
        key=shape,
        split=exchange.split,
        key_lengths=has_lengths,
        dtype=str(q.dtype),
        padded=length,
        ulysses=degrees.ulysses,
        ring=degrees.ring,
        ring_keys=way,
    )


def _not_passed(
    context: OpContext, queries: int, head_dim: int, dtype: Any
) -> str | None:
    """Why keys do not go round a ring; ``None`` if they do."""
    refusal = chunked_refusal(context.implementation)
    if refusal is None and context.chip is not None:
        refusal = too_short(queries, head_dim, dtype.itemsize, context.chip)
    return refusal
