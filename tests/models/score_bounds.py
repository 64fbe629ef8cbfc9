"""What attention of native blocks is told of its scores, beside the scores."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch


def random_norms(module: torch.nn.Module) -> None:
    """Weights and biases of the norms of queries and keys, of either sign."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        if ".norm_" in name and parameter.ndim == 1 and "attn" in name:
            with torch.no_grad():
                parameter.uniform_(-2.0, 2.0, generator=generator)


def watch_scores(
    monkeypatch: pytest.MonkeyPatch, module: Any
) -> list[tuple[float, float]]:
    """(bound, largest score) of every call of ``module``'s attention, as it runs."""
    seen: list[tuple[float, float]] = []
    original = module.sequence_attention

    def note(bound: Any, score: Any) -> None:
        seen.append((float(bound), float(score)))

    def watched(active: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
        assert not options["feature_major"]
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[3])
        jax.debug.callback(note, options["score_bound"], jnp.abs(scores).max())
        return original(active, q, k, v, **options)

    monkeypatch.setattr(module, "sequence_attention", watched)
    return seen
