"""Padding of pictures that are split over devices.

Upstream pads a border before a convolution. Within the picture, a neighbour's row or
column takes the place of the padding. In a program of whole arrays the border is noted,
and the convolution that reads the array makes the border on each device's part.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from tpuport.core.mesh.spatial_split import Border, Space
from tpuport.core.tracing.context import Padded
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
    padded: dict[int, Padded] | None = None,
) -> jax.Array:
    """``torch.nn.functional.pad``.

    With a ``space`` the last two dims of an array of four or five are a device's rows
    and columns of a picture. A border around the picture is noted in ``padded``.

    Raises:
        ValueError: ``pad`` is no list of pairs, or there is no such mode.
        NotImplementedError: in space, a border that is no zeros and no repetition.
    """
    if len(pad) % 2 or len(pad) > 2 * input.ndim or mode not in _MODES:
        raise ValueError(f"padding {list(pad)} of {input.shape}, mode {mode!r}")
    pairs = [(0, 0)] * input.ndim
    for i in range(len(pad) // 2):
        pairs[-1 - i] = (int(pad[2 * i]), int(pad[2 * i + 1]))
    around = pairs[-2:]
    if input.ndim < 4 or around == [(0, 0)] * 2:
        if mode == "replicate":  # the ends of rows and columns are not looked at
            return _lengthened(input, pairs)
        return _widened(input, pairs, mode, value)
    before, after = zip(*around, strict=True)
    inside = [*pairs[:-2], (0, 0), (0, 0)]
    if space is not None:
        border = _border(mode, value, around)
        dims = (input.ndim - 2, input.ndim - 1)
        input = space.halo(input, dims, before, after, border)
        if border == "edge":
            return _lengthened(input, inside)
        return _widened(input, inside, mode, value)
    try:
        border = _border(mode, value, around)
    except NotImplementedError:
        padded = None
    if padded is None:
        return _widened(input, pairs, mode, value)
    source = _widened(input, inside, mode, value)
    out = _widened(source, [(0, 0)] * (input.ndim - 2) + around, mode, value)
    padded[id(out)] = Padded(
        array=out, source=source, before=before, after=after, border=border
    )
    return out


def _lengthened(input: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """``input`` with its ends repeated, and nothing done along other dims."""
    for axis, (before, after) in enumerate(pairs):
        parts, n = [input], input.shape[axis]
        if before:
            first = jax.lax.slice_in_dim(input, 0, 1, axis=axis)
            parts.insert(0, jnp.repeat(first, before, axis))
        if after:
            last = jax.lax.slice_in_dim(input, n - 1, n, axis=axis)
            parts.append(jnp.repeat(last, after, axis))
        input = jnp.concatenate(parts, axis) if len(parts) > 1 else input
    return input


def _widened(
    input: jax.Array,
    pairs: Sequence[tuple[int, int]],
    mode: str,
    value: float | None,
) -> jax.Array:
    """``input`` with so many elements more at both ends of each dim."""
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
    make=lambda context: functools.partial(
        pad,
        space=context.space,
        padded=None if context.mesh is None else context.padded,
    ),
    owner="tpuport.patches.padding",
    reason="split in space, a device needs its neighbours' rows and columns",
)
"""For any model whose autoencoder is split in space."""
