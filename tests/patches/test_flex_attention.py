"""FlexAttention under torchax: equal to torch's own, which runs without a compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import flex_attention

import tpuport
from tests.tolerances import TOLERANCES
from tpuport.patches.flex_attention import FLEX_ATTENTION

TOKENS, BLOCK = 20, 8
#: Blocks of keys for the first, second and third block of queries, and how many count.
PLACES = torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 1, 0]]]], dtype=torch.int32)
COUNTS = torch.tensor([[[1, 2, 3]]], dtype=torch.int32)


class Attention(torch.nn.Module):
    """Attention with one of the masks or scores that upstream uses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def mask(self, x: torch.Tensor) -> Any:
        if self.kind == "mask":
            return flex_attention.create_block_mask(
                lambda b, h, q, k: (q - k).abs() <= 3 + h,
                1,
                x.shape[1],
                TOKENS,
                TOKENS,
                device=x.device,
                BLOCK_SIZE=BLOCK,
            )
        if self.kind == "score":
            return None
        counts, places = COUNTS.to(x.device), PLACES.to(x.device)
        return flex_attention.BlockMask.from_kv_blocks(
            torch.zeros_like(counts),
            places,
            counts,
            places,
            BLOCK_SIZE=BLOCK,
            seq_lengths=(TOKENS, TOKENS),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = flex_attention.flex_attention(
            x,
            x.roll(1, -1),
            x,
            score_mod=distance if self.kind == "score" else None,
            block_mask=self.mask(x),
            scale=0.7,
        )
        return found


def distance(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - 0.1 * (h + 1) * (q - k).abs()


def test_the_names_that_reports_have() -> None:
    assert {patch.name for patch in FLEX_ATTENTION} == {
        "torch-flex-attention",
        "torch-create-mask",
        "torch-ordered-to-dense",
    }


@pytest.mark.parametrize("kind", ["mask", "score"])
def test_attention_by_functions_of_positions_is_torchs(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Torch's compiler takes seconds, and fails once torchax is imported.
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    module, x = Attention(kind), torch.randn(2, 2, TOKENS, 16)
    with torch.no_grad():
        found = tpuport.port(module)(x)
        expected = module(x)
    assert (found - expected).abs().max() < TOLERANCES["module float32"]


def test_attention_to_listed_blocks_leaves_the_others_out() -> None:
    """Torch on a CPU reads the function alone, and attends to every block."""
    module, x = Attention("blocks"), torch.randn(2, 2, TOKENS, 16)
    with torch.no_grad():
        found = tpuport.port(module)(x)
    mask = module.mask(x).to_dense().bool()
    for dim in (-1, -2):
        mask = mask.repeat_interleave(BLOCK, dim).narrow(dim, 0, TOKENS)
    expected = functional.scaled_dot_product_attention(
        x, x.roll(1, -1), x, attn_mask=mask, scale=0.7
    )
    assert not mask.all()
    assert (found - expected).abs().max() < TOLERANCES["module float32"]
