"""Norms after the last block that are computed once, before what they are projected by.

XLA for TPU would compute such a norm within the projection's product, again for every
part of it. Such a product is a fifth of what a transformer takes to compile. Kept
apart, the norm reads and writes the tokens once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tpuport.core.tracing.context import current
from tpuport.patches.diffusers import diffusers_patch


def _apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose output is an array of its own, to the compiler as well."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        active = current()
        out = active.arrays(original(self, *args, **kwargs))
        return active.tensors(jax.lax.optimization_barrier(out))

    return forward


MODULATED_NORMS = tuple(
    diffusers_patch(
        f"{name}-apart",
        f"models.normalization:{upstream}.forward",
        _apart,
        "in one with the projection that follows the last block it takes a TPU "
        "compiler as long as several blocks",
        wraps=True,
    )
    for name, upstream in (
        ("ada-layer-norm", "AdaLayerNorm"),
        ("ada-layer-norm-continuous", "AdaLayerNormContinuous"),
    )
)
"""For a transformer that ends in one of these norms and a projection."""
