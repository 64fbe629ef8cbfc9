"""FlexAttention as plain operators: torch compiles it, which a traced program cannot.

Functions of positions are called once, on grids that broadcast, in place of one call
for each position under ``torch.vmap``.

Legend: B batch, H heads, Lq queries, Lk keys, D head dim, R and C blocks of positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import _get_mod_type, _ModificationType

from tpuport.core.tracing.patching import Patch


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **asked: Any,
) -> torch.Tensor:
    """``torch.nn.attention.flex_attention.flex_attention``: [B, H, Lq, D].

    Args:
        asked: for other results, which are refused, and of torch's own kernel.

    Raises:
        NotImplementedError: more than the result is asked for.
    """
    if asked.get("return_lse") or asked.get("return_aux") is not None:
        raise NotImplementedError("flex_attention with its sums (return_lse)")
    batch, heads, queries, _ = query.shape
    grid = _grid(batch, heads, queries, key.shape[2], query.device)
    mask = None
    if block_mask is not None:
        # A mask that upstream made on the CPU stays there until it is whole.
        device = block_mask.kv_indices.device
        whole = _grid(batch, heads, queries, key.shape[2], device)
        mask = _allowed(block_mask, whole).to(query.device)
    if score_mod is None:
        if mask is not None:
            mask = mask.expand(batch, heads, queries, key.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        groups = heads // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    wide = query.float() @ key.float().transpose(-1, -2)
    scores = score_mod(wide * (scale or query.shape[-1] ** -0.5), *grid)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    # A row without any key gives 0.
    weights = scores.softmax(-1).masked_fill(torch.isneginf(scores), 0.0)
    return (weights @ value.float()).to(query.dtype)


def create_mask(
    mod_fn: Callable[..., torch.Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = None,
) -> torch.Tensor:
    """``torch.nn.attention.flex_attention.create_mask``: booleans [B, H, Lq, Lk]."""
    shape = (B or 1, H or 1, Q_LEN, KV_LEN)
    grid = _grid(*shape, device)
    if _get_mod_type(mod_fn) == _ModificationType.SCORE_MOD:
        scores = mod_fn(torch.zeros(shape, device=device), *grid)
        return ~torch.isneginf(scores).expand(shape)
    return mod_fn(*grid).expand(shape)


def ordered_to_dense(
    num_blocks_in_row: torch.Tensor, col_indices: torch.Tensor, num_cols: int
) -> torch.Tensor:
    """Which blocks [..., R, C] the first of the indices [..., R, C'] name, int32.

    Args:
        num_blocks_in_row: how many indices count, [..., R].
    """
    device = col_indices.device
    counts = torch.arange(col_indices.shape[-1], device=device)
    counts = counts < num_blocks_in_row[..., None]
    named = col_indices[..., None] == torch.arange(num_cols, device=device)
    return (named & counts[..., None]).any(-2).to(torch.int32)


def _grid(
    batch: int, heads: int, queries: int, keys: int, device: Any
) -> tuple[torch.Tensor, ...]:
    """Positions along B, H, Lq and Lk, each with four dims."""
    sizes = (batch, heads, queries, keys)
    return tuple(
        torch.arange(size, device=device).view([-1 if d == i else 1 for d in range(4)])
        for i, size in enumerate(sizes)
    )


def _allowed(mask: Any, grid: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The booleans [B, H, Lq, Lk] of a block mask, its dims of 1 left as they are."""
    queries, keys = grid[2].shape[2], grid[3].shape[3]
    rows, columns = mask.BLOCK_SIZE

    def whole(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        blocks = ordered_to_dense(counts, indices, -(-keys // columns)).bool()
        spread = blocks.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        return spread[..., :queries, :keys]

    allowed = whole(mask.kv_num_blocks, mask.kv_indices) & mask.mask_mod(*grid)
    if mask.full_kv_indices is None:
        return allowed
    return allowed | whole(mask.full_kv_num_blocks, mask.full_kv_indices)


FLEX_ATTENTION = tuple(
    Patch(
        name=f"torch-{name.replace('_', '-').strip('-')}",
        target=f"torch.nn.attention.flex_attention:{name}",
        replacement=replacement,
        reason="torch compiles FlexAttention and maps its functions over positions, "
        "and neither works on the tensors of a traced program",
        upstream="torch>=2.13,<2.14",
        link="https://github.com/pytorch/pytorch/blob/main/torch/nn/attention/"
        "flex_attention.py",
    )
    for name, replacement in (
        ("flex_attention", flex_attention),
        ("create_mask", create_mask),
        ("_ordered_to_dense", ordered_to_dense),
    )
)
"""For any model that calls FlexAttention."""
