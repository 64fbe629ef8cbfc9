"""FlexAttention: attention whose mask and scores are Python functions of positions.

Torch compiles these functions by its own compiler. Here the functions are called once,
on all positions at a time, and attention runs as any other with the mask they give.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from tpuport.core.tracing.patching import Patch

_MODULE = "torch.nn.attention.flex_attention"


class WholeMask(BlockMask):
    """A mask that is made where attention runs.

    Args:
        allowed: gives the mask from the places of row, head, query and key, four
            integer tensors that broadcast against one another.
        block: queries and keys in a block.
    """

    def __init__(self, allowed: Callable[..., Any], block: tuple[int, int]) -> None:
        self.allowed = allowed
        self.BLOCK_SIZE = block


def _pair(block: Any) -> tuple[int, int]:
    return (block, block) if isinstance(block, int) else tuple(block)


def create_block_mask(
    mask_mod: Callable[..., Any],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
    BLOCK_SIZE: Any = 128,
    **_: Any,
) -> WholeMask:
    """As torch's function of this name."""
    return WholeMask(mask_mod, _pair(BLOCK_SIZE))


def from_kv_blocks(
    cls: Any,
    kv_num_blocks: Any,
    kv_indices: Any,
    full_kv_num_blocks: Any = None,
    full_kv_indices: Any = None,
    BLOCK_SIZE: Any = 128,
    mask_mod: Callable[..., Any] | None = None,
    **_: Any,
) -> WholeMask:
    """As ``BlockMask.from_kv_blocks``: for each block of queries its blocks of keys."""
    block = _pair(BLOCK_SIZE)

    def whole(count: Any, indices: Any, q: Any, k: Any) -> Any:
        """Whether the key's block is among the first ``count`` of the query's block."""
        listed = torch.arange(indices.shape[-1], device=indices.device)
        blocks = torch.arange(math.ceil(k.numel() / block[1]), device=indices.device)
        found = (indices[..., None] == blocks) & (listed < count[..., None])[..., None]
        rows = found.any(-2).repeat_interleave(block[0], -2)[..., : q.numel(), :]
        return rows.repeat_interleave(block[1], -1)[..., : k.numel()]

    def allowed(b: Any, h: Any, q: Any, k: Any) -> Any:
        found = whole(kv_num_blocks, kv_indices, q, k)
        if mask_mod is not None:
            found = found & mask_mod(b, h, q, k)
        if full_kv_num_blocks is not None:
            found = found | whole(full_kv_num_blocks, full_kv_indices, q, k)
        return found

    return WholeMask(allowed, block)


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: WholeMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    **_: Any,
) -> torch.Tensor:
    """As torch's function of this name, for arrays [batch, heads, tokens, width].

    Raises:
        NotImplementedError: sums of the weights are asked for.
    """
    if return_lse:
        raise NotImplementedError("flex_attention with return_lse")
    sizes = (*query.shape[:3], key.shape[2])
    places = [
        torch.arange(size, device=query.device).reshape(
            [size if dim == other else 1 for other in range(4)]
        )
        for dim, size in enumerate(sizes)
    ]
    mask = None if block_mask is None else block_mask.allowed(*places)
    if score_mod is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = score_mod(query @ key.transpose(-1, -2) * scale, *places)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value


_REPLACED: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("flex_attention", flex_attention),
    ("create_block_mask", create_block_mask),
    ("BlockMask.from_kv_blocks", from_kv_blocks),
)
FLEX_ATTENTION = tuple(
    Patch(
        name=f"flex-attention-{target.rpartition('.')[2].rpartition(':')[2]}",
        target=f"{_MODULE}:{target}",
        replacement=replacement,
        reason="torch hands the mask's function to its own compiler, which torchax "
        "cannot trace: LTX-2's diffusion decoder and Kandinsky 6's upscaler",
        upstream="",
        link="https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html",
    )
    for target, replacement in _REPLACED
)
"""For any model that masks by functions of positions."""
