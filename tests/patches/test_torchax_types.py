"""``type_as`` makes a new tensor, which torch takes for its type."""

from __future__ import annotations

import jax.numpy as jnp
import torch

from tpuport.core.layers.model_runtime import model_runtime
from tpuport.patches.torchax_types import TYPE_AS


def test_type_as_makes_a_new_tensor() -> None:
    assert TYPE_AS.name == "torchax-type-as"
    runtime = model_runtime(mesh=None, platform="cpu", patches=(TYPE_AS,))
    with runtime.tracing() as env:
        half = env.j2t_iso(jnp.ones((1, 2, 3, 3), jnp.bfloat16))
        full = half.float()
        found = full.type_as(half)
        assert (full.dtype, found.dtype) == (torch.float32, torch.bfloat16)
        # The check of torch itself, before any of torchax's own code.
        weight = env.j2t_iso(jnp.ones((2, 2, 1, 1), jnp.bfloat16))
        bias = env.j2t_iso(jnp.ones((2,), jnp.bfloat16))
        assert torch.nn.functional.conv2d(found, weight, bias).dtype == torch.bfloat16
