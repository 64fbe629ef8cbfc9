"""Reductions that torchax has not, or not whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.tracing.op_overrides import OpOverride


def total(
    self: jax.Array,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> jax.Array:
    """``torch.sum`` over ``dim``, or over all dims; ``dtype`` is of the result."""
    from torchax.ops.mappings import t2j_dtype

    axes = (dim,) if isinstance(dim, int) else tuple(dim or range(self.ndim))
    kind = None if dtype is None else t2j_dtype(dtype)
    # As torch does: first the other type, and then the sum.
    return jnp.sum(self if kind is None else self.astype(kind), axes, keepdims=keepdim)


REDUCTIONS = (
    OpOverride(
        targets=("torch.ops.aten.sum",),
        make=lambda context: total,
        owner="tpuport.patches.reductions",
        reason="torchax leaves out the dtype that a sum is asked for",
    ),
    OpOverride(
        targets=("torch.ops.aten._is_all_true",),
        make=lambda context: jnp.all,
        owner="tpuport.patches.reductions",
        reason="torchax lacks the operator, which torch's checks of values call",
    ),
)
"""For any model that counts a mask, or calls ``torch._check_tensor_all``."""
