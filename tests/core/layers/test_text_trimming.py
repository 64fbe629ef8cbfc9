"""Text is cut to a bucket, valid tokens first, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from tpuport.core.layers.text_trimming import bucket_length, trim

BUCKETS = (0, 4, 8)


@pytest.mark.parametrize(
    ("tokens", "length"),
    [(0, 0), (1, 4), (4, 4), (5, 8), (8, 8), (9, 10), (10, 10)],
)
def test_the_smallest_bucket_that_holds_the_tokens(tokens: int, length: int) -> None:
    assert bucket_length(tokens, BUCKETS, 10) == length


def test_a_bucket_as_long_as_the_text_is_the_text() -> None:
    assert bucket_length(3, (4, 100), 4) == 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16], ids=str)
def test_valid_tokens_come_first_and_in_order(dtype: torch.dtype) -> None:
    embeds = torch.arange(2 * 10 * 3, dtype=torch.float32).reshape(2, 10, 3) + 1
    mask = torch.zeros(2, 10)
    mask[0, [2, 5, 9]] = 1
    mask[1, 0] = 1
    kept, valid = trim(embeds, mask.to(dtype), BUCKETS)
    assert kept.shape == (2, 4, 3)
    assert valid.tolist() == [[True, True, True, False], [True, False, False, False]]
    assert torch.equal(kept[0, :3], embeds[0, [2, 5, 9]])
    assert torch.equal(kept[1, 0], embeds[1, 0])
    # Padding is zero whatever it was, so that a run does not depend on it.
    assert not kept[~valid].any()


def test_more_than_256_tokens_of_a_bfloat16_mask_are_counted() -> None:
    mask = torch.ones(1, 300, dtype=torch.bfloat16)
    kept, valid = trim(torch.ones(1, 300, 2), mask, (256,))
    assert kept.shape[1] == int(valid.sum()) == 300


def test_no_valid_token_at_all_leaves_none() -> None:
    kept, valid = trim(torch.ones(2, 10, 3), torch.zeros(2, 10), BUCKETS)
    assert kept.shape == (2, 0, 3)
    assert valid.shape == (2, 0)
