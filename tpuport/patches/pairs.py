"""What models do within the last dim: pairs of neighbours, as rotary embeddings have
them, and heads.

Pairs are moved by products (:mod:`tpuport.core.tracing.pair_rotations`).

Heads are whole tiles of lanes. The compiler turns tokens and features around, twice,
to make a dim of heads; slices of lanes move whole tiles.

Legend: N pairs, H heads, L tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.tracing.context import HEADS, OpContext
from tpuport.core.tracing.op_overrides import OpOverride
from tpuport.core.tracing.pair_rotations import pairs_apart, pairs_together

#: Pairs, at most: beyond it the product costs more than it saves.
MOST = 256
#: Heads, at most: each is an instruction.
MOST_HEADS = 64
FEWEST_TOKENS = 4096
LANES = 128


def taken_apart(pairs: jax.Array) -> list[jax.Array]:
    """The first and the second elements of [..., N, 2], each [..., N]."""
    return pairs_apart(pairs.reshape(*pairs.shape[:-2], -1))


def put_together(parts: Sequence[jax.Array]) -> jax.Array:
    """[..., N, 2] of the first and the second elements, each [..., N]."""
    return pairs_together(*parts).reshape(*parts[0].shape, 2)


def on_lanes(platform: str, shape: Sequence[int], dtype: Any) -> bool:
    """Whether pairs [..., N, 2] are better moved by a product."""
    few = len(shape) > 2 and 1 < shape[-2] <= MOST and shape[-1] == 2
    return platform == "tpu" and few and bool(jnp.issubdtype(dtype, jnp.floating))


def heads_apart(x: jax.Array, heads: int) -> jax.Array:
    """[..., L, H D] as [..., L, H, D]."""
    return jnp.stack(jnp.split(x, heads, -1), -3).swapaxes(-2, -3)


def are_heads(context: OpContext, before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether a new shape makes heads of many tokens, each of whole tiles of lanes."""
    if not 2 < len(before) == len(after) - 1:
        return False
    *same, heads, width = after
    return (
        context.platform == "tpu"
        and context.axis_size(HEADS) == 1
        and tuple(same) == tuple(before[:-1])
        and 1 < heads <= MOST_HEADS
        and width % LANES == 0
        and before[-2] >= FEWEST_TOKENS
    )


def _unbind(context: OpContext) -> Callable[..., Any]:
    def unbind(self: jax.Array, dim: int = 0) -> tuple[jax.Array, ...]:
        last = dim in (-1, self.ndim - 1)
        if last and on_lanes(context.platform, self.shape, self.dtype):
            return tuple(taken_apart(self))
        return tuple(
            jax.lax.index_in_dim(self, place, dim, keepdims=False)
            for place in range(self.shape[dim])
        )

    return unbind


def _stack(context: OpContext) -> Callable[..., Any]:
    def stack(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
        first = tensors[0]
        last = dim in (-1, first.ndim)
        alike = len({(x.shape, x.dtype) for x in tensors}) == 1
        shape = (*first.shape, len(tensors))
        if last and alike and on_lanes(context.platform, shape, first.dtype):
            return put_together(tensors)
        return jnp.stack(tensors, axis=dim)

    return stack


def _view(context: OpContext) -> Callable[..., Any]:
    def view(self: jax.Array, *size: Any) -> jax.Array:
        given = size[0] if isinstance(size[0], Sequence) else size
        shape = jax.eval_shape(lambda x: x.reshape(given), self).shape
        if are_heads(context, self.shape, shape):
            return heads_apart(self, shape[-2])
        return self.reshape(shape)

    return view


PAIRS = (
    OpOverride(
        targets=("torch.ops.aten.view", "torch.ops.aten._unsafe_view"),
        make=_view,
        owner="tpuport.patches.pairs",
        reason="heads are whole tiles of lanes, which a reshape turns around twice",
    ),
    OpOverride(
        targets=("torch.Tensor.unbind", "torch.unbind"),
        make=_unbind,
        owner="tpuport.patches.pairs",
        reason="a TPU moves neighbouring lanes slowly, and by a product at once",
    ),
    OpOverride(
        targets=("torch.stack",),
        make=_stack,
        owner="tpuport.patches.pairs",
        reason="a TPU moves neighbouring lanes slowly, and by a product at once",
    ),
)
"""For any model with heads, and with rotary embeddings on pairs of neighbours."""
