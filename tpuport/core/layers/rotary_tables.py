"""Rotary tables, built once per grid.

Legend: T, Y, X token frames, rows and columns; L = T * Y * X tokens; D head dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from tpuport.core.arrays import Float, HostArray

Tables = tuple[Float[HostArray, "l d"], Float[HostArray, "l d"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryKey:
    """Everything a rotary table depends on, so that no two tables share an entry.

    Attributes:
        grid: (T, Y, X) in tokens.
        axes_dim: how the head dim is split over the axes of the grid.
        theta: the base of the frequencies.
        positions: how grid indices become positions (a crop, a slice of a larger grid).
        interleaved: whether pairs are neighbours (True) or halves (False).
        dtype: dtype of the table.
    """

    grid: tuple[int, ...]
    axes_dim: tuple[int, ...]
    theta: float
    positions: Hashable
    interleaved: bool
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.grid or any(n < 1 for n in self.grid):
            raise ValueError(f"rotary grid {self.grid}: every axis needs a position")
        if any(n < 2 or n % 2 for n in self.axes_dim):
            raise ValueError(f"rotary axes {self.axes_dim}: each must be even")

    @property
    def tokens(self) -> int:
        """L, the rows of the table."""
        return math.prod(self.grid)

    @property
    def head_dim(self) -> int:
        """D, the columns of the table."""
        return sum(self.axes_dim)


class RotaryCache:
    """(cos, sin) tables of shape [L, D], each built once per :class:`RotaryKey`."""

    def __init__(self, limit: int = 16) -> None:
        self.get = functools.lru_cache(limit)(_checked_tables)


def _checked_tables(key: RotaryKey, build: Callable[[RotaryKey], Tables]) -> Tables:
    """The tables of ``key`` as ``build(key)`` makes them.

    Raises:
        ValueError: ``build`` returned another shape than [L, D].
    """
    cos, sin = build(key)
    expected = (key.tokens, key.head_dim)
    if cos.shape != expected or sin.shape != expected:
        raise ValueError(
            f"rotary tables for {key} have shapes {cos.shape} and {sin.shape}, "
            f"expected {expected}"
        )
    return cos, sin
