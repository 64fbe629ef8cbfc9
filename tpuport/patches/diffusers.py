"""Patches of diffusers: what all of them have, and those of more than one model.

XLA for TPU would compute the norm after the last block within the product of the
projection, again for every part of it. Such a product is a fifth of what a transformer
takes to compile. Kept apart, the norm reads and writes the tokens once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

from tpuport.core.tracing.context import current
from tpuport.core.tracing.patching import Patch

_SOURCE = "https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/"


def diffusers_patch(
    name: str,
    target: str,
    replacement: Callable[..., Any],
    reason: str,
    *,
    wraps: bool = False,
) -> Patch:
    """A :class:`Patch` of diffusers.

    Args:
        name, replacement, reason, wraps: as :class:`Patch` has them.
        target: within the package, such as ``"models.normalization:RMSNorm.forward"``.
    """
    module, _, _ = target.partition(":")
    return Patch(
        name=name,
        target=f"diffusers.{target}",
        replacement=replacement,
        wraps=wraps,
        reason=reason,
        upstream="diffusers>=0.42,<0.43",
        link=f"{_SOURCE}{module.replace('.', '/')}.py",
    )


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


def chosen_experts(
    self: Any, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """In place of ``MOEFeedForwardSwiGLU.moe_infer``: [tokens, dim].

    Every expert runs, and a token takes those that it chose.

    Args:
        x: [tokens, dim].
        indices, weights: the experts of each token and their weights, token after
            token: [tokens * k] and [tokens * k, 1].
    """
    chosen = indices.view(x.shape[0], -1)
    shares = weights.view(chosen.shape)
    out = torch.zeros_like(x)
    for number, expert in enumerate(self.experts):
        share = torch.where(chosen == number, shares, 0.0).sum(-1, keepdim=True)
        out = out + expert(x) * share
    return out


CHOSEN_EXPERTS = diffusers_patch(
    "hidream-experts",
    "models.transformers.transformer_hidream_image:MOEFeedForwardSwiGLU.moe_infer",
    chosen_experts,
    "how many tokens an expert gets is known too late for shapes",
)
"""For HiDream."""
