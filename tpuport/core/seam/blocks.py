"""Lists of alike blocks, found by looking: what no plugin declares."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Mapping, Sequence

import torch

from tpuport.core.seam.module_state import OWN_ATTRIBUTES
from tpuport.core.seam.values import equal
from tpuport.core.tracing.block_stacks import Stack, tensors_of

#: A list of blocks becomes one scan if the list holds this share of the elements.
SMALLEST_SHARE = 0.05
#: Attributes that may differ: transformers numbers its layers for caches of keys, and a
#: layer without a cache does not read its number.
NUMBERS = frozenset({"layer_idx"})


def alike_blocks(module: torch.nn.Module, turns: bool = True) -> tuple[Stack, ...]:
    """The lists of structurally identical blocks in ``module``, outermost first.

    Every run of alike blocks of a list is a stack, and so are kinds of blocks that take
    turns: of all ways to part a list, the one with the fewest bodies to compile.
    Without ``turns`` there are only runs.
    """
    total = sum(parameter.numel() for parameter in module.parameters())
    found: list[Stack] = []
    differ = NUMBERS | _unread(module)
    for path, blocks in module.named_modules():
        inside = any(path.startswith(f"{stack.path}.") for stack in found)
        if inside or not isinstance(blocks, torch.nn.ModuleList):
            continue
        every, stacks = tuple(blocks), list[Stack]()
        for first, count, period in _runs(_kinds(every, differ), turns):
            alike = every[first:][:count]
            if all(map(tensors_of, alike[:period])):
                stacks.append(Stack(path, first, alike, period))
        tensors = [p for one in stacks for b in one.blocks for p in b.parameters()]
        if sum(p.numel() for p in tensors) >= SMALLEST_SHARE * total:
            found += stacks
    return tuple(found)


def _unread(module: torch.nn.Module) -> frozenset[str]:
    """Whole numbers among the attributes that no code but ``__init__`` names.

    The code is that of the files that define the modules, and what modules hold, such
    as processors of attention.
    """
    children = [*module.modules()]
    held = [value for child in children for value in vars(child).values()]
    kinds = {kind for v in (*children, *held) for kind in type(v).__mro__}
    files = {kind.__module__ for kind in kinds - {*torch.nn.Module.__mro__}}
    numbers = {
        name
        for child in children
        for name, value in vars(child).items()
        if type(value) is int
    }
    return frozenset(numbers.difference(*map(named_in, files)))


@functools.cache
def named_in(file: str) -> frozenset[str]:
    """The names and texts in all functions and methods of a Python module."""
    values = vars(sys.modules[file])
    kinds = [value for value in values.values() if isinstance(value, type)]
    named: set[str] = set()
    for holder in (values, *map(vars, kinds)):
        for name, value in holder.items():
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            elif isinstance(value, property | functools.cached_property):
                value = value.fget if isinstance(value, property) else value.func
            wraps = isinstance(getattr(value, "__wrapped__", None), types.FunctionType)
            function = inspect.unwrap(value) if wraps else value
            if name != "__init__" and isinstance(function, types.FunctionType):
                code = getattr(function, "__code__", None)
                named |= set() if code is None else _names(code)
    return frozenset(named)


def _names(code: types.CodeType) -> set[str]:
    """Names and texts in a function's code, and in functions within."""
    texts = {value for value in code.co_consts if isinstance(value, str)}
    within = [value for value in code.co_consts if isinstance(value, types.CodeType)]
    return texts.union(code.co_names, *map(_names, within))


def usable_stacks(
    blocks: Sequence[Stack], tied: Mapping[str, str]
) -> tuple[Stack, ...]:
    """Those of ``blocks`` that share no tensor, which one array per name would part."""
    shared = {*tied, *tied.values()}
    return tuple(
        one
        for one in blocks
        if shared.isdisjoint(itertools.chain(*one.arrays().values()))
    )


def without(
    module: torch.nn.Module, stacks: tuple[Stack, ...], path: str
) -> tuple[Stack, ...]:
    """Fewer ``stacks``, after those of ``path`` were refused.

    Kinds of blocks that take turns become runs of alike blocks. Runs leave out their
    first block, or go: the first block of some models takes another dtype than it hands
    on, and in bfloat16 the blocks of T5 return float32.
    """
    others = tuple(one for one in stacks if one.path != path)
    refused = [one for one in stacks if one.path == path]
    if any(one.period > 1 for one in refused):
        runs = alike_blocks(module, turns=False)
        return (*others, *(one for one in runs if one.path == path))
    first = [one for one in refused if one.first == 0 and len(one.blocks) > 2]
    return (*others, *(Stack(one.path, 1, one.blocks[1:]) for one in first))


def _kinds(
    blocks: Sequence[torch.nn.Module | None], differ: frozenset[str]
) -> list[int]:
    """For each block the first one that is like the block; an empty place is alone."""
    firsts: dict[int, torch.nn.Module] = {}
    kinds = []
    for index, block in enumerate(blocks):
        if block is None:
            kinds.append(index)
            continue
        like = (n for n, first in firsts.items() if _alike(first, block, differ))
        kinds.append(next(like, index))
        firsts.setdefault(kinds[-1], block)
    return kinds


def _alike(
    one: torch.nn.Module, other: torch.nn.Module, differ: frozenset[str]
) -> bool:
    """Whether two blocks differ in their weights alone, and in attributes that may."""
    pair = (one, other)
    # A parametrized module has a class of its own, of the same name.
    kinds = [{n: type(m).__name__ for n, m in b.named_modules()} for b in pair]
    shapes = [{n: (t.dtype, t.shape) for n, t in tensors_of(b).items()} for b in pair]
    if kinds[0] != kinds[1] or shapes[0] != shapes[1]:
        return False
    own = OWN_ATTRIBUTES | differ
    ours, theirs = (
        {
            name: {k: v for k, v in vars(m).items() if k not in own}
            for name, m in block.named_modules()
        }
        for block in pair
    )
    return equal(ours, theirs)


def _runs(kinds: Sequence[int], turns: bool) -> list[tuple[int, int, int]]:
    """Where runs of alike blocks begin, their lengths and their periods.

    Each run holds a period twice or more.
    """
    #: From each place on: the bodies of the best parting, how many of them are in turns
    #: of others, and its runs.
    best: list[tuple[int, int, list[tuple[int, int, int]]]] = [(0, 0, [])]
    for first in reversed(range(len(kinds))):
        rest = best[0]
        found = (rest[0] + 1, rest[1], rest[2])
        longest = (len(kinds) - first) // 2
        for period in range(1, (longest if turns else min(1, longest)) + 1):
            stop = first + period
            while kinds[stop : stop + period] == kinds[first : first + period]:
                stop += period
                bodies, more, runs = best[stop - first - 1]
                here = (first, stop - first, period)
                made = (bodies + period, more + period - 1, [here, *runs])
                found = min(found, made, key=lambda parting: parting[:2])
        best.insert(0, found)
    return best[0][2]
