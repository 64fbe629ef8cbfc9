"""Experts that tokens choose: every expert runs, and a token takes those it chose."""

from __future__ import annotations

from typing import Any

import torch

from tpuport.patches.diffusers import diffusers_patch


def chosen_experts(
    self: Any, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """In place of ``MOEFeedForwardSwiGLU.moe_infer``: [tokens, dim].

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
