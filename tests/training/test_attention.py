"""Attention as training computes it is what the pipeline computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from training.demo.transformer import plain_attention


@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_torchs(scale: float | None, masked: bool) -> None:
    """T5 adds its bias of positions as a mask, and takes a scale of 1."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 9, 16)
    mask = torch.randn(1, 4, 9, 9) if masked else None
    given = {"attn_mask": mask, "scale": scale}
    expected = functional.scaled_dot_product_attention(query, key, value, **given)
    found = plain_attention(query, key, value, **given)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "given",
    [
        {"dropout_p": 0.1},
        {"is_causal": True},
        {"attn_mask": torch.ones(9, 9, dtype=torch.bool)},
    ],
)
def test_what_it_cannot_do_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no dropout"):
        plain_attention(*torch.randn(3, 2, 4, 9, 16), **given)
