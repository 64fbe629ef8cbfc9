"""Text without most of its padding: valid tokens first, cut to one of a few lengths.

Trimming is exact for a model that reads text without positions and excludes padded
tokens by their mask. Each length compiles one program, so there are few lengths.

Legend: R rows, L text tokens, E width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpuport.core.arrays import Bool, Float, Shaped, Tensor


def bucket_length(tokens: int, buckets: Sequence[int], limit: int) -> int:
    """The smallest of ``buckets`` that holds ``tokens``, or else ``limit``."""
    for length in sorted(buckets):
        if tokens <= length < limit:
            return length
    return limit


def trim(
    embeds: Float[Tensor, "r l e"], mask: Shaped[Tensor, "r l"], buckets: Sequence[int]
) -> tuple[Float[Tensor, "r n e"], Bool[Tensor, "r n"]]:
    """Valid tokens first, in order, and no more padding than a bucket needs.

    A token is valid if its entry in the mask [R, L] is not 0.

    Returns:
        Embeddings [R, n, E], padding set to zero, and their mask [R, n], bool.
    """
    valid = mask.bool()
    counts = valid.sum(dim=1)
    length = bucket_length(int(counts.max()), buckets, mask.shape[1])
    order = torch.argsort(valid.logical_not().int(), dim=1, stable=True)[:, :length]
    rows = torch.arange(len(embeds))[:, None]
    kept = torch.arange(length)[None] < counts[:, None]
    zero = torch.zeros((), dtype=embeds.dtype)
    return torch.where(kept[..., None], embeds[rows, order], zero), kept
