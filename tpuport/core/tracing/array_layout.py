"""How arrays lie in the memory of a TPU, if the compiler's choice is a bad one."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Format, Layout, with_layout_constraint


def row_major(x: jax.Array, platform: str) -> jax.Array:
    """``x`` with its last dim along the lanes of a TPU; elsewhere as it is.

    For the latents that a model takes and returns. The compiler would put their few
    channels along the lanes, as patches want them, in the scheduler too: eight times
    the memory, and half of the time around the blocks.
    """
    if platform != "tpu":
        return x
    layout = Layout(major_to_minor=tuple(range(x.ndim)))
    out: jax.Array = with_layout_constraint(x, layout)
    return out


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
