"""Sizes rounded up, arrays filled up with zeros.

Padding alone changes an attention result: a zero key has score 0, which is not weight
0. Whoever pads keys also has to take their weight away (see ``splash.py``).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def ceil_div(size: int, step: int) -> int:
    """How many steps of ``step`` cover ``size``; ``step`` > 0, ``size`` >= 0."""
    return -(-size // step)


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``size``.

    Raises:
        ValueError: ``size`` is negative or ``multiple`` is not positive.
    """
    if size < 0 or multiple <= 0:
        raise ValueError(
            f"cannot round {size} up to a multiple of {multiple}: the size must be "
            "at least 0 and the multiple at least 1"
        )
    return ceil_div(size, multiple) * multiple


def pad_dim(x: jax.Array, dim: int, size: int) -> jax.Array:
    """``x`` with zeros appended to dimension ``dim`` until it has ``size`` entries.

    Returns ``x`` itself when nothing is missing, so that an aligned input is not
    copied.

    Raises:
        ValueError: the dimension is already longer than ``size``.
    """
    missing = size - x.shape[dim]
    if missing < 0:
        raise ValueError(
            f"cannot pad dimension {dim} of shape {x.shape} to {size}: it is longer"
        )
    if missing == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, missing)
    return jnp.pad(x, widths)
