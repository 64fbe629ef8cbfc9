"""Attention of devices that share heads: each has its own queries and keys.

Letters: H heads of a device, one batch item each, L tokens of all devices of a group, R
devices of a group, C = L / R tokens of a device, D head dim.

Keys and values go round a ring (Liu et al. 2023, arXiv:2310.01889): each device sends
its chunk on while its queries attend to the chunk. After R chunks the sums are over all
keys. No device holds more than two chunks. The keys of the group are gathered instead
if a ring is not possible, or if a chunk takes much longer to come than to attend to: a
gather uses links in both directions.

Everything here runs inside ``shard_map``; tokens are last, as our kernel has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.arrays import Array, Float, Int
from tpuport.core.mesh.chips import chip as chip_named
from tpuport.kernels.attention.attention import attention_feature_major, smooth_keys
from tpuport.kernels.attention.choice import AttentionChoice
from tpuport.kernels.attention.chunked import chunked_attention
from tpuport.kernels.padding import pad_dim

#: Chunks up to which the rounds of a ring are written out.
MOST_WRITTEN_OUT = 4
#: Passing pays above this ratio: the time of a chunk's products at the chip's peak over
#: the time of its way through one link. By plans for v6e-16 and v6e-64 at head dim 64,
#: passing takes 1.6 times as long as gathering for chunks of 2560 tokens (ratio 0.5),
#: 1.04 to 1.09 times for 5120 (1.0), 0.75 times for 10240 (2.0).
LEAST_HIDDEN = 1.1
PASSED, GATHERED = "passed", "gathered"
"""How devices of a group get keys of the other devices."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Ring:
    """The devices of a mesh axis that share heads.

    Attributes:
        axis: name of the mesh axis.
        groups: places along the axis, in the order of their tokens; of equal length.
        rank: this device's index within its group, a number of the traced program.
    """

    axis: str
    groups: list[list[int]]
    rank: Int[Array, ""]

    @property
    def size(self) -> int:
        """Devices of a group."""
        return len(self.groups[0])

    def pass_on(self, tree: Any) -> Any:
        """The arrays that the device before had."""
        pairs = [
            (group[i - 1], group[i]) for group in self.groups for i in range(self.size)
        ]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), tree)

    def total(self, x: Float[Array, ...]) -> Float[Array, ...]:
        """The sum over the group."""
        out: Array = jax.lax.psum(x, self.axis, axis_index_groups=self.groups)
        return out

    def gather(self, x: Float[Array, "h 1 d c"]) -> Float[Array, "h 1 d l"]:
        """All tokens of the group, in order."""
        out: Array = jax.lax.all_gather(
            x, self.axis, axis=3, axis_index_groups=self.groups, tiled=True
        )
        return out


def ring_attention(
    ring: Ring,
    q: Float[Array, "h 1 d c"],
    k: Float[Array, "h 1 d c"],
    v: Float[Array, "h 1 dv c"],
    *,
    kv_len: int,
    lengths: Int[Array, "h"] | None,
    implementation: AttentionChoice,
    **options: Any,
) -> Float[Array, "h 1 dv c"]:
    """Attention of a device's queries on the keys of its group, passed round.

    Args:
        ring: the group.
        q, k, v: of shape [H, 1, D, C]; for a key that does not count ``k`` is finite
            and ``v`` is zero.
        kv_len: tokens of the group from this index on do not count.
        lengths: tokens of each head that count, integers [H], at most ``kv_len``.
        implementation: the implementation and its options.
        options: ``scale``, ``platform``, ``chip`` and ``interpret`` of
            :func:`tpuport.kernels.attention.attention.attention`.

    Returns:
        of the shape and dtype of ``q``; 0 where no key counts.

    Raises:
        AttentionError: the implementation does not take keys in chunks.
    """
    chunk = k.shape[3]
    all_count = lengths is None and kv_len == chunk * ring.size
    if lengths is None:
        lengths = jnp.full((q.shape[0],), kv_len, jnp.int32)
    if implementation.k_smooth:
        k = _smooth(ring, k, lengths)
    attention = chunked_attention(
        q, k, v, has_lengths=not all_count, implementation=implementation, **options
    )

    def meet(sums: Any, kv: Any, turn: Any) -> Any:
        """The sums with the chunk that is here after ``turn`` turns."""
        counted = None
        if not all_count:
            origin = (ring.rank - turn) % ring.size
            counted = jnp.clip(lengths - origin * chunk, 0, chunk)
        k, v = kv
        return attention.add(sums, k, v, counted)

    def one(carry: Any, turn: Any) -> tuple[Any, None]:
        sums, kv = carry
        coming = ring.pass_on(kv)
        # One chunk is under way while the kernel works on another. Without the barrier
        # a scheduler may send two chunks first, and wait for them.
        return jax.lax.optimization_barrier((meet(sums, kv, turn), coming)), None

    carry = attention.start(), attention.keys(k, v)
    last = ring.size - 1
    if ring.size <= MOST_WRITTEN_OUT:
        for turn in range(last):
            carry, _ = one(carry, turn)
    else:
        # Two turns a round: chunks change places without a copy.
        carry, _ = jax.lax.scan(one, carry, jnp.arange(last), unroll=2)
    return attention.divide(meet(*carry, last))


def too_short(chunk: int, head_dim: int, itemsize: int, chip: str) -> str | None:
    """Why chunks of ``chunk`` tokens should be gathered; None if they should not.

    The times of work and transfer are both proportional to the number of heads.
    """
    found = chip_named(chip)
    # The matrix unit takes as long for fewer than 128 rows as for 128.
    met = 4 * max(head_dim, 128) * chunk**2 / found.peak_flops
    sent = 2 * head_dim * itemsize * chunk / found.ici_link_bandwidth
    if met >= LEAST_HIDDEN * sent:
        return None
    return (
        f"a chunk of {chunk} tokens is met in {met / sent:.2f} of the time that the "
        "next one takes to come"
    )


def keys_within(chunk: int, length: int, window: tuple[int, int] | None) -> int:
    """Number of keys that :func:`gathered_attention` uses for ``chunk`` queries.

    The group has ``length`` keys; a window adds padding behind them.
    """
    if window is None:
        return length
    left, right = (min(side, length) for side in window)
    return min(chunk + left, length) + right


def _smooth(
    ring: Ring, k: Float[Array, "h 1 d c"], lengths: Int[Array, "h"]
) -> Float[Array, "h 1 dv c"]:
    """``k`` minus the mean of all keys of the group that count.

    The softmax is unchanged only if all chunks lose one and the same vector.
    """
    places = ring.rank * k.shape[3] + jnp.arange(k.shape[3])
    counts = (places < lengths[:, None])[:, None, None]
    wide = k.astype(jnp.float32)
    total = ring.total(jnp.where(counts, wide, 0.0).sum(3, keepdims=True))
    mean = total / jnp.maximum(lengths, 1)[:, None, None, None]
    return (wide - mean).astype(k.dtype)


def gathered_attention(
    ring: Ring,
    q: Float[Array, "h 1 d c"],
    k: Float[Array, "h 1 d c"],
    v: Float[Array, "h 1 dv c"],
    *,
    kv_len: int,
    lengths: Int[Array, "h"] | None,
    implementation: AttentionChoice,
    **options: Any,
) -> Float[Array, "h 1 dv c"]:
    """Attention of a device's queries on all keys of its group, gathered.

    The arguments are those of :func:`ring_attention`. With a window only the keys
    within its reach are used. Their start relative to the queries is known when the
    program runs and has few values: there is a branch for each value.
    """
    attend: Callable[..., Array] = attention_feature_major
    run = functools.partial(attend, hidden=True, **options)
    k, v = ring.gather(k), ring.gather(v)
    choice = implementation
    window = choice.window
    if window is None:
        return run(q, k, v, kv_len=kv_len, kv_lengths=lengths, implementation=choice)
    if lengths is None:
        lengths = jnp.full((q.shape[0],), kv_len, jnp.int32)
    if choice.k_smooth:
        k = smooth_keys(k.swapaxes(2, 3), lengths).swapaxes(2, 3)
        choice = replace(choice, k_smooth=False)
    chunk, length = q.shape[3], k.shape[3]
    left, right = (min(side, length) for side in window)
    reach = keys_within(chunk, length, window)
    starts = [max(rank * chunk - left, 0) for rank in range(ring.size)]
    k, v = (pad_dim(x, 3, max(length, starts[-1] + reach)) for x in (k, v))
    ahead = [rank * chunk - start for rank, start in enumerate(starts)]
    kinds = sorted(set(ahead))

    def near(
        before: int,
        q: Float[Array, "h 1 d c"],
        k: Float[Array, "h 1 d n"],
        v: Float[Array, "h 1 dv n"],
        lengths: Int[Array, "h"],
    ) -> Float[Array, "h 1 dv c"]:
        # Query i of the device has index i + before among the keys, before <= left.
        seen = (left - before, right + before)
        near_choice = replace(choice, window=seen)
        return run(q, k, v, kv_lengths=lengths, implementation=near_choice)

    start = jnp.asarray(starts)[ring.rank]
    k, v = (jax.lax.dynamic_slice_in_dim(x, start, reach, 3) for x in (k, v))
    out: Array = jax.lax.switch(
        jnp.asarray([kinds.index(one) for one in ahead])[ring.rank],
        [functools.partial(near, one) for one in kinds],
        q,
        k,
        v,
        jnp.clip(lengths - start, 0, reach),
    )
    return out
