"""Which blocks of a module are stacked: the same code on weights of the same shapes.

The weights of a list of blocks are held as one array per name within a block, with a
leading dim of blocks, and :mod:`tpuport.core.tracing.block_scan` runs them under one
``lax.scan``. :mod:`tpuport.core.seam.blocks` finds the lists.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """Blocks of a list that are alike, or some kinds of blocks that take turns.

    Attributes:
        path: dotted name of the ``ModuleList``.
        first: the first stacked block.
        count: the number of stacked blocks, a multiple of the period.
        period: a block is like the block so many places before.
    """

    path: str
    first: int = 0
    count: int
    period: int = 1


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
    module: torch.nn.Module, stacked: Iterable[StackedBlocks]
) -> tuple[Stack, ...]:
    """The stacks of ``module``, which may be on the meta device."""
    return tuple(stack for one in stacked for stack in _turns(module, one))


def _turns(module: torch.nn.Module, one: StackedBlocks) -> Iterator[Stack]:
    """The stacks that take turns; none if a kind of block holds no tensors."""
    found: Any = module.get_submodule(one.path)
    blocks = tuple(found)[one.first :][: one.count]
    names = [tuple(tensors_of(block)) for block in blocks[: one.period]]
    if all(names):
        for turn, tensors in enumerate(names):
            alike, first = blocks[turn :: one.period], one.first + turn
            yield Stack(one.path, first, alike, tensors, one.period, turn)


def tensors_of(block: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    return dict(itertools.chain(block.named_parameters(), block.named_buffers()))


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
