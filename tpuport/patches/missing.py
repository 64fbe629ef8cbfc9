"""Operators that torchax has not, or under other names of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.core.arrays import to_numpy
from tpuport.core.tracing.op_overrides import OpOverride


def linear(
    input: jax.Array, weight: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """``torch.nn.functional.linear``: [..., in], [out, in], [out] -> [..., out]."""
    product = jnp.einsum("...a,ba->...b", input, weight)
    return product if bias is None else product + bias


def _window(name: str) -> Callable[..., jax.Array]:
    """A window of signals: [length], made by torch on the host."""
    make = getattr(torch, name)

    def window(*args: Any, dtype: Any = None, **_: Any) -> jax.Array:
        from torch.utils import _mode_utils

        with _mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
            return jnp.asarray(to_numpy(make(*args, dtype=dtype, device="cpu")))

    return window


def _override(target: str, function: Callable[..., Any], reason: str) -> OpOverride:
    return OpOverride(
        targets=(target,),
        make=lambda context: function,
        owner="tpuport.patches.missing",
        reason=reason,
    )


MISSING = (
    _override(
        "torch.nn.functional.linear",
        linear,
        "torchax has other names for the arguments: linear(input=x) is a TypeError",
    ),
    *(
        _override(f"torch.ops.aten.{name}", _window(name), "torchax lacks the operator")
        for name in ("hann_window", "hamming_window")
    ),
)
"""For any model; windows are for spectra of sound."""
