"""How many rows and columns are real, if devices share them unevenly.

The last devices then hold phantom rows or columns at their end. Two numbers tell a
kernel how many are real; the kernel ignores the contents of the others.
"""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp

Real: TypeAlias = tuple[jax.Array | int, jax.Array | int]
"""How many of a device's rows and of its columns are real: the first ones. An int means
all of that side, on every device; an int32 scalar any number of it."""


def told(
    real: Real | None, sides: tuple[int, int]
) -> tuple[tuple[bool, bool], list[jax.Array]]:
    """What a kernel is compiled for, and what it is told as it runs.

    ``sides`` are rows and columns of a device; ``real`` is ``None`` for all of both.

    Returns:
        of rows and of columns whether some may be phantoms; and where some may, one
        array int32 [2] of how many are real, for scalar memory.

    Raises:
        ValueError: an int that is not the side's.
    """
    counts = sides if real is None else real
    for n, side in zip(counts, sides, strict=True):
        if isinstance(n, int) and n != side:
            raise ValueError(f"{n} real of {side}, for every device")
    some = (not isinstance(counts[0], int), not isinstance(counts[1], int))
    if not any(some):
        return some, []
    return some, [jnp.stack([jnp.asarray(n, jnp.int32) for n in counts])]
