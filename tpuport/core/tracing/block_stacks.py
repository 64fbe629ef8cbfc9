"""Which blocks of a module are stacked: the same code on weights of the same shapes.

The weights of a list of blocks are held as one array per name within a block, with a
leading dim of blocks, and :mod:`tpuport.core.tracing.block_scan` runs them under one
``lax.scan``. :mod:`tpuport.core.seam.blocks` finds the lists.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
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


@dataclass(frozen=True, slots=True)
class Stack:
    """Blocks of a list that are alike, or some kinds of blocks that take turns.

    Attributes:
        path: dotted name of the ``ModuleList``.
        first: the place of the first stacked block in the list.
        blocks: two or more of each kind; each kind has tensors.
        period: a block is like the block so many places before.
    """

    path: str
    first: int
    blocks: tuple[torch.nn.Module, ...]
    period: int = 1

    def name(self, index: int) -> str:
        """The dotted name of one of ``blocks``."""
        return f"{self.path}.{self.first + index}"

    def names(self, turn: int) -> dict[str, str]:
        """The tensors of a kind of block -> the arrays that hold those of all blocks.

        Args:
            turn: the first block of the kind.
        """
        start = f"{self.path}.{self.first + turn or ''}*"
        return {tensor: f"{start}.{tensor}" for tensor in tensors_of(self.blocks[turn])}

    def arrays(self) -> dict[str, tuple[str, ...]]:
        """The names of the arrays -> the names of the tensors in them, by block."""
        return {
            array: tuple(
                f"{self.name(index)}.{tensor}"
                for index in range(turn, len(self.blocks), self.period)
            )
            for turn in range(self.period)
            for tensor, array in self.names(turn).items()
        }


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
