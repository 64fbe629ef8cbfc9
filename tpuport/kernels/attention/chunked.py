"""Exact attention on keys that come in chunks, one after the other.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq queries, Lk keys of a
chunk), D head dim of queries and keys, Dv head dim of values.

Weighted values and weights are summed up undivided, in float32, together with what was
subtracted from the scores, and divided once after the last chunk. The sums are those
that one call on all keys adds up.

Source: Milakov and Gimelshein 2018 (arXiv:1805.02867), section 3.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tpuport.errors import AttentionError
from tpuport.kernels.attention.blockwise import blockwise_sums
from tpuport.kernels.attention.choice import AUTO, AttentionChoice
from tpuport.kernels.attention.masking import LOWEST
from tpuport.kernels.attention.problem import describe_feature_major
from tpuport.kernels.attention.reference import combined, normalised, reference_sums
from tpuport.kernels.attention.selection import (
    DEFAULT_CHIP,
    as_choice,
    select,
    splash_tiles,
)
from tpuport.kernels.attention.splash import splash_plan, with_factor
from tpuport.kernels.attention.splash_blocks import RESERVED, padded_dim, vmem_limit
from tpuport.kernels.attention.splash_kernel import Plan, divided, empty_state, run
from tpuport.kernels.padding import pad_dim

Sums = Any
"""A pytree of float32 arrays; what is in it is the implementation's own."""


def chunked_refusal(choice: AttentionChoice) -> str | None:
    """Why attention by a choice cannot take keys in chunks, or None if it can."""
    if choice.window is not None:
        return "a window needs to know where a chunk's keys are"
    return None


def chunked_attention(
    q: Float[Array, "b h d lq"],
    k: Float[Array, "b hkv d lk"],
    v: Float[Array, "b hkv dv lk"],
    *,
    has_lengths: bool,
    scale: float | None = None,
    platform: str,
    implementation: str | AttentionChoice = AUTO,
    chip: str | None = None,
    interpret: bool = False,
) -> Kernel | Formula:
    """Attention of ``q`` on chunks of keys, all of one size.

    Args:
        q, k, v: [B, H, D, Lq], and one of the chunks, [B, Hkv, D, Lk] and
            [B, Hkv, Dv, Lk].
        has_lengths: whether ``add`` will be given lengths.

    The other arguments are those of ``attention_feature_major``.

    Raises:
        AttentionError: a window was asked for.
        ValueError: shapes or dtypes that do not fit together.
    """
    choice = as_choice(implementation)
    if refusal := chunked_refusal(choice):
        raise AttentionError(f"attention on keys in chunks: {refusal}")
    lengths: Any = jax.ShapeDtypeStruct((q.shape[0],), jnp.int32)
    problem = describe_feature_major(
        q,
        k,
        v,
        kv_lengths=lengths if has_lengths else None,
        scale=scale,
        platform=platform,
        interpret=interpret,
    )
    selection = select(problem, choice, chip=chip)
    if selection.implementation != "splash":
        sums: _Adder = reference_sums
        if selection.implementation == "blockwise":
            sums = functools.partial(blockwise_sums, tiling=selection.tiling)
        return Formula(q=q.swapaxes(2, 3), v_dim=problem.v_dim, scale=scale, sums=sums)
    blocks = splash_tiles(selection.blocks)
    q, factor = with_factor(q, problem.scale)
    chip = chip or DEFAULT_CHIP
    plan = splash_plan(problem, blocks, factor, chip=chip, partial=True)
    return Kernel(
        plan=plan,
        q=pad_dim(q, 2, padded_dim(problem.head_dim)),
        v_dim=problem.v_dim,
        vmem_limit=vmem_limit(chip) + RESERVED,
        interpret=interpret,
    )


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Kernel:
    """On our Pallas kernel, which goes on from the sums that it is given."""

    plan: Plan
    q: jax.Array
    v_dim: int
    vmem_limit: int
    interpret: bool

    def keys(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A chunk, k [B, Hkv, D, Lk] and v, as ``add`` wants it, copied if need be."""
        whole = self.plan.kv_blocks * self.plan.blocks.kv
        k = pad_dim(k, 2, self.q.shape[2])
        return pad_dim(k, 3, whole), pad_dim(pad_dim(v, 2, self._rows), 3, whole)

    def start(self) -> Sums:
        """The sums over no key."""
        batch, heads, _, length = self.q.shape
        return empty_state(batch, heads, self._rows, length)

    def add(
        self, sums: Sums, k: jax.Array, v: jax.Array, lengths: jax.Array | None
    ) -> Sums:
        """The sums with a chunk more.

        Args:
            sums: of the keys before.
            k, v: as ``keys`` gave them; where a key does not count, finite and zero.
            lengths: integers [B]: how many leading keys of the chunk count; None for
                all.
        """
        if lengths is None:
            lengths = jnp.full((k.shape[0],), self.plan.kv_len, jnp.int32)
        return run(
            self.plan,
            lengths.astype(jnp.int32),
            self.q,
            k,
            v,
            state=sums,
            vmem_limit=self.vmem_limit,
            interpret=self.interpret,
        )

    def divide(self, sums: Sums) -> jax.Array:
        """[B, H, Dv, Lq], in the dtype of the queries; 0 where no key counted."""
        return divided(sums, self._rows)[:, :, : self.v_dim].astype(self.q.dtype)

    @property
    def _rows(self) -> int:
        return padded_dim(self.v_dim)


_Adder = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Formula:
    """In plain jax: each chunk by itself, then both sums at their larger maximum.

    The methods are those of :class:`Kernel`. Arrays have their tokens before the head
    dim in here.
    """

    q: jax.Array
    v_dim: int
    scale: float | None
    sums: _Adder

    def keys(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        return k.swapaxes(2, 3), v.swapaxes(2, 3)

    def start(self) -> Sums:
        shape = self.q.shape[:3]
        highest = jnp.full((*shape, 1), LOWEST, jnp.float32)
        summed = jnp.zeros((*shape, self.v_dim), jnp.float32)
        return highest, jnp.zeros_like(highest), summed

    def add(
        self, sums: Sums, k: jax.Array, v: jax.Array, lengths: jax.Array | None
    ) -> Sums:
        chunk = self.sums(self.q, k, v, scale=self.scale, kv_lengths=lengths)
        return combined(sums, chunk)

    def divide(self, sums: Sums) -> jax.Array:
        _, total, summed = sums
        return normalised(summed, total).astype(self.q.dtype).swapaxes(2, 3)
