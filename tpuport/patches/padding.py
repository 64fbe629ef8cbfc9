"""Padding of pictures that are split over devices.

Upstream pads a border before a convolution. Within the picture, a neighbour's row or
column takes the place of the padding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tpuport.core.mesh.spatial_split import Border, Space
from tpuport.core.tracing.op_overrides import OpOverride

_MODES = {
    "constant": "constant",
    "reflect": "reflect",
    "replicate": "edge",
    "circular": "wrap",
}


def pad(
    input: jax.Array,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
    *,
    space: Space | None = None,
) -> jax.Array:
    """``torch.nn.functional.pad``.

    With a ``space`` the last two dims of an array of four or five are a device's rows
    and columns of a picture.

    Raises:
        ValueError: ``pad`` is no list of pairs, or there is no such mode.
        NotImplementedError: in space, a border that is no zeros and no repetition.
    """
    if len(pad) % 2 or len(pad) > 2 * input.ndim or mode not in _MODES:
        raise ValueError(f"padding {list(pad)} of {input.shape}, mode {mode!r}")
    pairs = [(0, 0)] * input.ndim
    for i in range(len(pad) // 2):
        pairs[-1 - i] = (int(pad[2 * i]), int(pad[2 * i + 1]))
    if space is not None and input.ndim >= 4 and pairs[-2:] != [(0, 0)] * 2:
        border = _border(mode, value, pairs[-2:])
        dims = (input.ndim - 2, input.ndim - 1)
        before, after = zip(*pairs[-2:], strict=True)
        input = space.halo(input, dims, before, after, border)
        pairs[-2:] = [(0, 0)] * 2
    # A negative width cuts.
    cut = tuple(
        slice(max(-before, 0), size - max(-after, 0))
        for (before, after), size in zip(pairs, input.shape, strict=True)
    )
    input = input[cut]
    widths = [(max(before, 0), max(after, 0)) for before, after in pairs]
    if mode == "constant":
        out: jax.Array = jnp.pad(input, widths, constant_values=value or 0)
        return out
    return jnp.pad(input, widths, mode=_MODES[mode])


def _border(mode: str, value: float | None, pairs: Sequence[tuple[int, int]]) -> Border:
    if min(min(pair) for pair in pairs) >= 0:
        if mode == "replicate":
            return "edge"
        if mode == "constant" and not value:
            return "zeros"
    raise NotImplementedError(
        f"padding {list(pairs)} of mode {mode!r} and value {value}, split in space"
    )


PADDING = OpOverride(
    targets=("torch.nn.functional.pad",),
    make=lambda context: functools.partial(pad, space=context.space),
    owner="tpuport.patches.padding",
    reason="split in space, a device needs its neighbours' rows and columns",
)
"""For any model whose autoencoder is split in space."""
