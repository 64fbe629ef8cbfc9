"""GELU rounded once in bfloat16, as torch's own kernels do.

torchax computes it step by step in the dtype of its input, which rounds every step.
torch evaluates it in float32 and rounds the result. In float32 nothing changes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpuport.core.tracing.op_overrides import OpOverride


def gelu(input: jax.Array, *, approximate: str = "none") -> jax.Array:
    """``torch.nn.functional.gelu`` of any shape, evaluated in float32.

    Source: ATen/native/cpu/Activation.cpp, ``GeluKernelImpl``.
    """
    wide = jax.nn.gelu(input.astype(jnp.float32), approximate=approximate == "tanh")
    return wide.astype(input.dtype)


GELU_ROUNDED_ONCE = OpOverride(
    targets=("torch.ops.aten.gelu",),
    make=lambda context: gelu,
    owner="tpuport.patches.activations",
    reason="GELU in float32, rounded once, as torch's kernels have it",
)
"""For any model that runs in bfloat16."""
