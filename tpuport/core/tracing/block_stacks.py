"""Which blocks of a module are stacked: the same code on weights of the same shapes.

A component declares its lists of blocks by their paths (``Component.stacked``). The
weights of a list are held as one array per name within a block, with a leading dim of
blocks, and :mod:`tpuport.core.tracing.block_scan` runs them under one ``lax.scan``.
Blocks that differ in anything but their weights are refused here, by name.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpuport.errors import PluginError

if TYPE_CHECKING:
    import torch


class StackError(PluginError):
    """A loop over blocks that cannot be one scan.

    Attributes:
        path: dotted name of the list of blocks.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedBlocks:
    """A list of identical blocks, or of some kinds of blocks that take turns.

    Attributes:
        path: dotted name of the ``ModuleList``.
        first: the first block that is like the others; earlier blocks run unstacked.
        count: the number of stacked blocks; ``None`` for all from ``first`` on.
        period: a block is like the block so many places before; ``count`` is a multiple
            of the period.
        differ: names of attributes that may differ from block to block because forward
            does not depend on them here, such as the index of a cache that is not used.
    """

    path: str
    first: int = 0
    count: int | None = None
    period: int = 1
    differ: tuple[str, ...] = ()

    @classmethod
    def of(cls, declared: str | StackedBlocks) -> StackedBlocks:
        """``declared``, or all blocks of the list if it is a path."""
        return cls(path=declared) if isinstance(declared, str) else declared


@dataclass(frozen=True, slots=True)
class Stack:
    """Identical blocks of one list of a module; two or more.

    Attributes:
        path: dotted name of the list.
        first: index of the first stacked block in the list.
        blocks: the modules.
        tensors: names of a block's parameters and buffers, within the block.
        period: the blocks are so many places apart: stacks of other blocks take turns
            with this one.
        turn: which of these stacks this one is.
    """

    path: str
    first: int
    blocks: tuple[torch.nn.Module, ...]
    tensors: tuple[str, ...]
    period: int = 1
    turn: int = 0

    def name(self, tensor: str) -> str:
        """The name of the array that holds ``tensor`` of all blocks."""
        return f"{self.path}.{self.first or ''}*.{tensor}"

    def members(self, tensor: str) -> tuple[str, ...]:
        """The names that ``tensor`` has in the module, one per block."""
        blocks = range(len(self.blocks))
        return tuple(f"{self.block_name(index)}.{tensor}" for index in blocks)

    def block_name(self, index: int) -> str:
        """The dotted name of one of ``blocks``."""
        return f"{self.path}.{self.first + index * self.period}"


def find_stacks(
    module: torch.nn.Module,
    declared: Sequence[str | StackedBlocks],
    tied: Mapping[str, str],
) -> tuple[Stack, ...]:
    """The stacks of ``module``; a stack needs two blocks and a tensor.

    Args:
        module: may be on the meta device.
        declared: the lists of blocks.
        tied: other names of tensors -> their stored names.

    Raises:
        PluginError: there is no such list, its blocks are not identical, or they share
            weights with each other or the rest of the module.
    """
    wanted = map(StackedBlocks.of, declared)
    found = tuple(stack for one in wanted for stack in _find(module, one))
    names = {
        member: stack
        for stack in found
        for tensor in stack.tensors
        for member in stack.members(tensor)
    }
    for alias, name in tied.items():
        stack = names.get(alias) or names.get(name)
        if stack is not None:
            raise PluginError(
                f"stacked blocks {stack.path!r} of {type(module).__name__}: {alias} "
                f"and {name} are one tensor, which a stack would part"
            )
    if len(names) < sum(len(s.blocks) * len(s.tensors) for s in found):
        raise PluginError(
            f"stacked blocks of {type(module).__name__} overlap: "
            + ", ".join(stack.path for stack in found)
        )
    return found


def blocks_at(module: torch.nn.Module, path: str, what: str) -> torch.nn.ModuleList:
    """The list of blocks at a dotted path; ``what`` needs the list, for messages.

    Raises:
        PluginError: there is no list of blocks.
    """
    import torch

    name = type(module).__name__
    try:
        blocks = module.get_submodule(path)
    except AttributeError:
        raise PluginError(
            f"{what}: {name} has no blocks {path!r}; it has "
            + ", ".join(n for n, _ in module.named_children())
        ) from None
    if not isinstance(blocks, torch.nn.ModuleList):
        raise PluginError(
            f"{what}: {path!r} of {name} is a {type(blocks).__name__}, not a "
            "ModuleList of blocks"
        )
    return blocks


@contextlib.contextmanager
def forwards_replaced(
    replacements: Sequence[tuple[torch.nn.Module, Callable[..., Any]]],
) -> Iterator[None]:
    """In this context the functions replace the blocks' own forward."""
    saved = [(block, vars(block).get("forward")) for block, _ in replacements]
    try:
        for block, forward in replacements:
            vars(block)["forward"] = forward
        yield
    finally:
        for block, before in saved:
            vars(block).pop("forward", None)
            if before is not None:
                vars(block)["forward"] = before


def _find(module: torch.nn.Module, declared: StackedBlocks) -> Iterator[Stack]:
    """The stacks that take turns in a list, or none."""
    blocks = tuple(blocks_at(module, declared.path, "stacked blocks"))
    blocks = blocks[declared.first :][: declared.count]
    period = declared.period
    names = [tuple(_tensors(block)) for block in blocks[:period]]
    if len(blocks) < 2 * period or not all(names):
        return
    for turn, tensors in enumerate(names):
        alike = blocks[turn::period]
        first = declared.first + turn
        stack = Stack(declared.path, first, alike, tensors, period, turn)
        _check_alike(stack, type(module).__name__, declared.differ)
        yield stack


def _check_alike(stack: Stack, name: str, differ: Sequence[str]) -> None:
    for index, block in enumerate(stack.blocks):
        difference = unlike(stack.blocks[0], block, differ)
        if difference:
            raise PluginError(
                f"stacked blocks: {stack.block_name(index)} of {name} is not like "
                f"{stack.block_name(0)}: {difference}. Blocks that differ cannot be "
                "stacked; take the list out of Component.stacked, or name an attribute "
                "that forward does not read in StackedBlocks(differ=...)"
            )


def _tensors(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    return dict(itertools.chain(block.named_parameters(), block.named_buffers()))


def unlike(one: torch.nn.Module, other: torch.nn.Module, allowed: Sequence[str]) -> str:
    """How ``other`` differs from ``one``; empty if they are alike."""
    kinds = [{n: type(m).__name__ for n, m in b.named_modules()} for b in (one, other)]
    if kinds[0] != kinds[1]:
        return _first_difference(*kinds)
    shapes = [
        {n: f"{t.dtype} {[*t.shape]}" for n, t in _tensors(b).items()}
        for b in (one, other)
    ]
    if shapes[0] != shapes[1]:
        return _first_difference(*shapes)
    modules = dict(other.named_modules())
    for name, module in one.named_modules():
        prefix = f"{name}." if name else ""
        found, expected = (
            {k: v for k, v in vars(m).items() if k not in own_attributes()}
            for m in (modules[name], module)
        )
        for key in allowed:
            found.pop(key, None)
            expected.pop(key, None)
        for path in _unequal(expected, found, prefix, set()):
            return path
    return ""


def _first_difference(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    for name in (*one, *other):
        if one.get(name) != other.get(name):
            return f"{name} is {other.get(name, 'missing')}, not {one.get(name)}"
    return "the order of its parts"


@functools.cache
def own_attributes() -> frozenset[str]:
    """Attributes of every torch module, not compared: hooks run outside forward."""
    import torch

    return frozenset(vars(torch.nn.Module())) | {"forward"}


def _unequal(one: Any, other: Any, path: str, seen: set[Any]) -> Iterator[str]:
    """The differences of two attributes, each as a line of text.

    ``path`` has a dot behind; ``seen`` are the pairs being compared further up.
    """
    import torch

    where = path.rstrip(".")
    if one is other:
        return
    if type(one) is not type(other):
        yield f"{where} is a {type(other).__name__}, not a {type(one).__name__}"
    elif isinstance(one, torch.nn.Module):
        # The module is elsewhere in the tree, and compared there.
        return
    elif isinstance(one, torch.Tensor):
        if one.is_meta or one.shape != other.shape or not torch.equal(one, other):
            yield f"{where} is another tensor"
    elif isinstance(one, Mapping):
        if one.keys() != other.keys():
            yield f"{where} has {sorted(map(str, other))}, not {sorted(map(str, one))}"
            return
        for key in one:
            yield from _unequal(one[key], other[key], f"{path}{key}.", seen)
    elif isinstance(one, tuple | list):
        if len(one) != len(other):
            yield f"{where} has {len(other)} entries, not {len(one)}"
            return
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _unequal(*pair, f"{path}{index}.", seen)
    elif (parts := _parts(one)) is not None:
        if (id(one), id(other)) not in seen:
            seen.add((id(one), id(other)))
            yield from _unequal(parts, _parts(other), path, seen)
    elif one != other:
        yield f"{where} is {other!r}, not {one!r}"


def _parts(value: Any) -> dict[str, Any] | None:
    """The parts of an object to compare; ``None`` if ``==`` compares the object."""
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, types.MethodType):
        return {"function": value.__func__}
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return {"code": value.__code__, "default": value.__defaults__, "cells": cells}
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return None
    return vars(value)
