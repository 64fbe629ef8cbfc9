"""How arrays lie in the memory of a TPU, if the compiler's choice is a bad one."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Format, Layout


def in_order(shape: tuple[int, ...], sharding: jax.sharding.NamedSharding) -> Any:
    """Sharding of a weight as torch has it, and the order of its dims on a TPU.

    Returns:
        ``sharding``. On TPUs a convolution's weight [O, C, taps] with two axes of taps
        or more gets a ``Format``: taps, then C, then O along the lanes, as products
        want. The runtime's own layout has C along the lanes, and every call of a
        program would transpose the weight first.
    """
    platform = sharding.mesh.devices.flat[0].platform
    if platform != "tpu" or len(shape) < 4 or set(shape[2:]) == {1}:
        return sharding
    order = (*range(2, len(shape)), 1, 0)
    return Format(Layout(major_to_minor=order), sharding)
