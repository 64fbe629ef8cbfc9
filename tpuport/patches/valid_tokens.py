"""Attention for patches on upstream code: padding as lengths, causality as frames.

Once valid tokens stand first, a mask that hides padding only says how many tokens are
valid. If the order of the keys carries no position (a text without rotary embedding),
moving valid tokens to the front changes no result. One integer per batch item then
replaces the mask of Lq x Lk, gigabytes at the sizes of a video:

    text, lengths = valid_first(text, mask)
    ...  # keys and values of [video, text]
    out = attend(query, key, value, key_lengths=video_tokens + lengths)

No shape and no branch depends on data. Attention runs in a traced program alone.

Legend: B batch, H heads, L tokens (Lq queries, Lk keys), D head dim, C channels.
"""

from __future__ import annotations

import torch

from tpuport.core.layers.attention_lengths import length_attention
from tpuport.core.tracing.context import current


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_lengths: torch.Tensor | None = None,
    frame_tokens: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of [B, H, Lq, D] queries on [B, H, Lk, D] keys, [B, H, Lq, Dv].

    Args:
        key, value: fewer heads are allowed where they divide H.
        key_lengths: integers of shape [B]; keys from there on have weight 0. An item
            without any key gives 0.
        frame_tokens: query i sees the keys of frames 0..i // frame_tokens; needs
            Lq = Lk, in whole frames.
        scale: factor of the scores; ``None`` means 1/sqrt(D).

    Raises:
        RuntimeError: no program is being traced.
        ValueError: shapes or dtypes do not fit together.
    """
    active = current()
    q, k, v, lengths = active.arrays((query, key, value, key_lengths))
    out: torch.Tensor = active.tensors(
        length_attention(active.context, q, k, v, lengths, frame_tokens, scale)
    )
    return out


def valid_order(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The order that moves valid tokens to the front; both kinds keep their order.

    Args:
        mask: of shape [B, L] and any dtype; what is not 0 is valid. L may be 0.

    Returns:
        Indices of shape [B, L] for :func:`take_tokens`, and the number of valid tokens,
        integers of shape [B]. Counting in the dtype of the mask, bfloat16 say, would
        make 256 + 1 = 256. ``order.argsort(dim=1)`` moves tokens back.
    """
    valid = mask.bool()
    order = torch.argsort(valid.logical_not().int(), dim=1, stable=True)
    return order, valid.int().sum(dim=1)


def take_tokens(tokens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """The tokens [B, L, C] in the order of indices [B, L], bit for bit."""
    # Whole rows: torch.gather would index every element by itself. By the operator and
    # not in brackets, where torchax 0.0.13 fails on a tensor that is a slice of one.
    rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    taken: torch.Tensor = torch.ops.aten.index(tokens, [rows, order])
    return taken


def valid_first(
    tokens: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, L, C] in the order of :func:`valid_order`, bit for bit.

    Returns:
        The tokens, and the number of valid ones, integers [B].

    Raises:
        ValueError: the shapes do not fit together.
    """
    if tokens.ndim != 3 or mask.shape != tokens.shape[:2]:
        raise ValueError(
            f"valid_first takes tokens [B, L, C] with a mask [B, L]; got "
            f"{[*tokens.shape]} with {[*mask.shape]}"
        )
    order, lengths = valid_order(mask)
    return take_tokens(tokens, order), lengths
