"""Lists of alike blocks, found by looking: what no plugin declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tpuport.core.tracing.block_stacks import StackedBlocks, find_stacks, unlike
from tpuport.errors import PluginError

#: A list of blocks becomes one scan if the list holds this share of the elements.
SMALLEST_SHARE = 0.1
#: Attributes that may differ: transformers numbers its layers for caches of keys, and a
#: layer without a cache does not read its number.
NUMBERS = ("layer_idx",)


def alike_blocks(module: torch.nn.Module) -> tuple[StackedBlocks, ...]:
    """The lists of structurally identical blocks in ``module``, outermost first.

    Only the longest run of alike blocks of a list counts: the first or the last block
    of a list is often another.
    """
    total = sum(parameter.numel() for parameter in module.parameters())
    found: list[StackedBlocks] = []
    for path, blocks in module.named_modules():
        inside = any(path.startswith(f"{stack.path}.") for stack in found)
        if inside or not isinstance(blocks, torch.nn.ModuleList) or len(blocks) < 2:
            continue
        first, count = _longest_run(list(blocks))
        run = [b for b in list(blocks)[first : first + count] if b is not None]
        held = sum(p.numel() for block in run for p in block.parameters())
        if count >= 2 and held >= SMALLEST_SHARE * total:
            found.append(
                StackedBlocks(path=path, first=first, count=count, differ=NUMBERS)
            )
    return tuple(found)


def usable_stacks(
    module: torch.nn.Module,
    blocks: Sequence[StackedBlocks],
    tied: Mapping[str, str],
) -> tuple[StackedBlocks, ...]:
    """Those of ``blocks`` whose weights can be held as one array per name."""
    usable = []
    for one in blocks:
        try:
            find_stacks(module, [one], tied)
        except PluginError:
            continue
        usable.append(one)
    return tuple(usable)


def _longest_run(blocks: Sequence[torch.nn.Module | None]) -> tuple[int, int]:
    """Where the longest run of alike blocks begins, and its length."""
    best = (0, 1)
    first = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or _apart(blocks[first], blocks[index]):
            if index - first > best[1]:
                best = (first, index - first)
            first = index
    return best


def _apart(one: torch.nn.Module | None, other: torch.nn.Module | None) -> bool:
    """Whether two entries of a list are unlike; an empty one is like no other."""
    return one is None or other is None or bool(unlike(one, other, NUMBERS))
