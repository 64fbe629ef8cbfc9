"""Lists of alike blocks, found by looking: what no plugin declares."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from tpuport.core.tracing.block_stacks import StackedBlocks, find_stacks, unlike
from tpuport.errors import PluginError

#: A list of blocks becomes one scan if the list holds this share of the elements.
SMALLEST_SHARE = 0.05
#: Attributes that may differ: transformers numbers its layers for caches of keys, and a
#: layer without a cache does not read its number.
NUMBERS = frozenset({"layer_idx"})


def alike_blocks(module: torch.nn.Module) -> tuple[StackedBlocks, ...]:
    """The lists of structurally identical blocks in ``module``, outermost first.

    Every run of alike blocks of a list is a stack: the first or the last block of a
    list is often another, and some lists have two kinds of blocks in turn.
    """
    total = sum(parameter.numel() for parameter in module.parameters())
    found: list[StackedBlocks] = []
    differ = tuple(NUMBERS | _unread(module))
    for path, blocks in module.named_modules():
        inside = any(path.startswith(f"{stack.path}.") for stack in found)
        if inside or not isinstance(blocks, torch.nn.ModuleList):
            continue
        runs = list(_runs(list(blocks), differ))
        alike = [block for first, count in runs for block in blocks[first:][:count]]
        held = sum(p.numel() for block in alike for p in block.parameters())
        if held >= SMALLEST_SHARE * total:
            found += (
                StackedBlocks(path=path, first=first, count=count, differ=differ)
                for first, count in runs
            )
    return tuple(found)


def _unread(module: torch.nn.Module) -> frozenset[str]:
    """Whole numbers among the attributes that no code but ``__init__`` names.

    The code is that of the files that define the modules, and what modules hold, such
    as processors of attention.
    """
    children = [*module.modules()]
    held = [value for child in children for value in vars(child).values()]
    files = {type(value).__module__ for value in (*children, *held)}
    numbers = {
        name
        for child in children
        for name, value in vars(child).items()
        if type(value) is int
    }
    return frozenset(numbers.difference(*map(_named_in, files)))


@functools.cache
def _named_in(file: str) -> frozenset[str]:
    """The names and texts in all functions and methods of a Python module."""
    values = vars(sys.modules[file])
    kinds = [value for value in values.values() if isinstance(value, type)]
    named: set[str] = set()
    for holder in (values, *map(vars, kinds)):
        for name, value in holder.items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if name != "__init__" and isinstance(function, types.FunctionType):
                code = getattr(inspect.unwrap(function), "__code__", None)
                named |= set() if code is None else _names(code)
    return frozenset(named)


def _names(code: types.CodeType) -> set[str]:
    """Names and texts in a function's code, and in functions within."""
    texts = {value for value in code.co_consts if isinstance(value, str)}
    within = [value for value in code.co_consts if isinstance(value, types.CodeType)]
    return texts.union(code.co_names, *map(_names, within))


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


def without(stacks: tuple[StackedBlocks, ...], path: str) -> tuple[StackedBlocks, ...]:
    """Fewer ``stacks``: those of ``path`` leave out their first block, or go.

    The first block of some models takes another dtype than it hands on: in bfloat16 the
    blocks of T5 return float32.
    """
    kept = []
    for one in stacks:
        if one.path != path:
            kept.append(one)
        elif one.first == 0 and (one.count or 0) > 2:
            count = (one.count or 0) - 1
            kept.append(replace(one, first=1, count=count))
    return tuple(kept)


def _runs(
    blocks: Sequence[torch.nn.Module | None], differ: Sequence[str]
) -> Iterator[tuple[int, int]]:
    """Where runs of two or more alike blocks begin, and their lengths."""
    first = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or _apart(blocks[first], blocks[index], differ):
            if index - first > 1:
                yield first, index - first
            first = index


def _apart(
    one: torch.nn.Module | None, other: torch.nn.Module | None, differ: Sequence[str]
) -> bool:
    """Whether two entries of a list are unlike; an empty one is like no other."""
    return one is None or other is None or bool(unlike(one, other, differ))
