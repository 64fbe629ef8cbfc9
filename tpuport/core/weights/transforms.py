"""Weights rewritten once at load, for native blocks that want another order.

Letters: H heads, D head dim.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpuport.core.weights.file_parts import Index
from tpuport.core.weights.stored_tensors import part_of
from tpuport.errors import PluginError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightTransform:
    """One rewriting of stored tensors that keeps shape and dtype.

    Attributes:
        pattern: a regex that matches the whole names of the tensors.
        apply: ``apply(tensor, config)`` gives the new tensor.
        reason: the reason for the rewriting.
        needed: whether a module of a config must have a tensor that matches.
        rows: the name of the config's value that tells how many rows belong together.
            ``apply`` gives for whole groups of rows, and for some of their columns,
            what it gives for the whole tensor there. So a host reads its part alone.
    """

    pattern: str
    apply: Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]
    reason: str
    needed: Callable[[Mapping[str, Any]], bool] = lambda config: True
    rows: str = ""


def transformer(
    transforms: Iterable[WeightTransform],
    config: Mapping[str, Any],
    names: Iterable[str],
) -> Callable[[str, torch.Tensor, Index], torch.Tensor]:
    """``f(name, tensor, index)``: a part after the transform that matches the name.

    The part has memory of its own. Of a tensor that waits in its file the part alone is
    read, if no transform needs more.

    ``config`` and ``names``, of all tensors, are those of the module.

    Raises:
        PluginError: a transform that is needed matches none of the names; from ``f``:
            two transforms match, or the shape or dtype changes.
    """
    compiled = [(re.compile(t.pattern), t) for t in transforms]
    known = tuple(names)
    for pattern, one in compiled:
        if one.needed(config) and not any(map(pattern.fullmatch, known)):
            raise PluginError(
                f"weight transform {one.pattern!r} ({one.reason}) matches no weight: "
                "blocks that count on it would compute something else"
            )

    def apply(name: str, tensor: torch.Tensor, index: Index) -> torch.Tensor:
        found = [t for pattern, t in compiled if pattern.fullmatch(name)]
        if not found:
            return part_of(tensor, index)
        if len(found) > 1:
            raise PluginError(
                f"{name} matches {len(found)} weight transforms: "
                + ", ".join(repr(t.pattern) for t in found)
            )
        group = config[found[0].rows] if found[0].rows else 0
        alone = group and index[0].start % group == index[0].stop % group == 0
        given = part_of(tensor, index) if alone else tensor
        out = found[0].apply(given, config)
        if (out.shape, out.dtype) != (given.shape, given.dtype):
            raise PluginError(
                f"weight transform {found[0].pattern!r} makes {out.dtype} "
                f"{[*out.shape]} of {name}, which is {given.dtype} {[*given.shape]}"
            )
        return out.contiguous() if alone else part_of(out, index)

    return apply


@functools.cache
def half_order(head_dim: int) -> tuple[int, ...]:
    """The source index of each element of a head: first the even, then the odd ones.

    Interleaved rotary pairs (2i, 2i + 1) become (i, i + D/2), so that a rotation takes
    two contiguous halves. Queries and keys share the order, so products do not change.
    """
    return (*range(0, head_dim, 2), *range(1, head_dim, 2))


def to_halves(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The rows of a projection [H D, ...], or a vector per element, in ``half_order``.

    Raises:
        ValueError: D is odd or does not divide the rows.
    """
    rows = tensor.shape[0]
    if head_dim % 2 or rows % head_dim:
        raise ValueError(f"{rows} rows are no whole heads of {head_dim}, or it is odd")
    heads = tensor.reshape(rows // head_dim, head_dim, *tensor.shape[1:])
    return heads[:, list(half_order(head_dim))].reshape(tensor.shape)
