"""Operators that torchax has not, not whole, or not as exact as torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _mode_utils

from tpuport.core.arrays import to_numpy
from tpuport.core.tracing.op_overrides import OpOverride


def linear(
    input: jax.Array, weight: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """``torch.nn.functional.linear``: [..., in], [out, in], [out] -> [..., out]."""
    precision = _precision(input, weight)
    product = jnp.einsum("...a,ba->...b", input, weight, precision=precision)
    return product if bias is None else product + bias


def product(input: jax.Array, other: jax.Array) -> jax.Array:
    """``torch.matmul`` and its like: [..., a, b] by [..., b, c] -> [..., a, c]."""
    return jnp.matmul(input, other, precision=_precision(input, other))


def _precision(one: jax.Array, other: jax.Array) -> jax.lax.Precision | None:
    """In full for float32, which a module of bfloat16 keeps where it matters."""
    in_full = one.dtype == other.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if in_full else None


def _window(name: str) -> Callable[..., jax.Array]:
    """A window of signals: [length], made by torch on the host."""
    make = getattr(torch, name)

    def window(*args: Any, dtype: Any = None, **_: Any) -> jax.Array:
        with _mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
            return jnp.asarray(to_numpy(make(*args, dtype=dtype, device="cpu")))

    return window


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


def gelu(input: jax.Array, *, approximate: str = "none") -> jax.Array:
    """``torch.nn.functional.gelu`` of any shape, evaluated in float32, rounded once.

    torchax rounds every step to the dtype of its input. In float32 nothing changes.
    Source: ATen/native/cpu/Activation.cpp, ``GeluKernelImpl``.
    """
    wide = jax.nn.gelu(input.astype(jnp.float32), approximate=approximate == "tanh")
    return wide.astype(input.dtype)


def _override(target: str, function: Callable[..., Any], reason: str) -> OpOverride:
    return OpOverride(
        targets=(target,),
        make=lambda context: function,
        owner="tpuport.patches.missing",
        reason=reason,
    )


GELU_ROUNDED_ONCE = _override(
    "torch.ops.aten.gelu",
    gelu,
    "GELU in float32, rounded once, as torch's kernels have it",
)
"""For any model that runs in bfloat16."""

MISSING = (
    _override(
        "torch.ops.aten.sum",
        total,
        "torchax leaves out the dtype that a sum is asked for",
    ),
    _override(
        "torch.ops.aten._is_all_true",
        jnp.all,
        "torchax lacks the operator, which torch's checks of values call",
    ),
    _override(
        "torch.nn.functional.linear",
        linear,
        "torchax has other names for the arguments: linear(input=x) is a TypeError",
    ),
    *(
        _override(
            f"torch.ops.aten.{name}",
            product,
            "a TPU multiplies float32 in bfloat16 unless it is asked otherwise",
        )
        for name in ("mm", "bmm", "matmul")
    ),
    *(
        _override(
            f"torch.ops.aten.{name}",
            _window(name),
            "torchax lacks the window of a spectrum",
        )
        for name in ("hann_window", "hamming_window")
    ),
)
"""For any model: sums of masks, checks of values, spectra of sound."""
