"""Layers of video autoencoders on TPU: the project's kernels on a device's part.

Native forms of upstream's blocks are made of these layers. Arrays are channels-last, as
the kernels want; upstream's [B, C, T, Y, X] is the same memory with other dims.

Legend: B batch, T frames, Y rows, X columns of this device, C input channels (I of a
shortcut), O output channels, K frames of a kernel; t, y, x frames, rows and columns of
latents, Z channels of them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.arrays import Array, Float, Float32
from tpuport.core.mesh.picture_marks import Mark, marked
from tpuport.core.mesh.spatial_split import COLUMNS, ROWS, Border, Side, Space
from tpuport.core.tracing.context import OpContext
from tpuport.core.tracing.kernel_options import kernel_options
from tpuport.kernels.attention.reference import matmul_precision
from tpuport.kernels.convolution.conv import (
    EdgedVideo,
    edged_convolution,
    video_convolution,
)
from tpuport.kernels.convolution.conv_kernel import pitch_of
from tpuport.kernels.convolution.conv_sides import outer_columns
from tpuport.kernels.norms.video_norm import apply_norm, channel_moments, joined
from tpuport.kernels.phantoms import Real

#: The convolution kernel in reports, as in a profile.
KERNEL = "tpuport_conv"
#: The implementation of convolutions of one element, in reports.
PRODUCT = "a product of matrices"
#: Channels that fill the lanes, and columns that fill a tile.
LANES, TILE_ROWS = 128, 16
_DIMS = (2, 3)


def has_kernels(context: OpContext) -> bool:
    """Whether the kernels can run: on a TPU, on arrays of one device.

    The compiler cannot split a kernel over a mesh. In a program that is split in space
    the context has no mesh.
    """
    alone = context.mesh is None or context.mesh.size == 1
    return context.platform == "tpu" and alone


def marked_picture(
    context: OpContext, name: str, out: Array, *pictures: Array | None
) -> Array:
    """A layer's result from ``pictures``, of which the layer knew the borders."""
    if context.space is None:
        return out
    return marked(Mark(name=name, dims=_DIMS, given=_DIMS), out, *pictures)


def convolve(
    context: OpContext,
    x: Float[Array, "b t y x c"],
    before: Float[Array, "b lag y x c"] | None,
    weight: Float[Array, "o c k 3 3"],
    bias: Float[Array, "o"] | None,
    residual: Float[Array, "b t y x o"] | None = None,
    shortcut: tuple[
        Float[Array, "b t y x i"], Float[Array, "o i 1 1 1"], Float[Array, "o"]
    ]
    | None = None,
    border: Border = "zeros",
) -> Float[Array, "b t y x o"]:
    """A convolution with a border around the picture, and frames in front.

    Args:
        x: [B, T, Y, X, C]; ``before`` [B, K - 1, Y, X, C], ``None`` with K = 1.
        weight: [O, C, K, 3, 3], upstream's; ``bias`` [O], or ``None``.
        residual: [B, T, Y, X, O], added to the result.
        shortcut: makes a residual: [B, T, Y, X, I] and upstream's convolution of one
            element, [O, I, 1, 1, 1] and [O].
        border: what lies around the picture.

    Returns:
        [B, T, Y, X, O] in the dtype of ``x``.

    Raises:
        NotImplementedError: the kernels cannot: another size, or not enough VMEM.
    """
    out = _convolved(context, x, before, weight, bias, residual, shortcut, border)
    pictures = (x, before, residual, shortcut and shortcut[0])
    return marked_picture(context, "a convolution", out, *pictures)


def _convolved(
    context: OpContext,
    x: Array,
    before: Array | None,
    weight: Array,
    bias: Array | None,
    residual: Array | None,
    shortcut: tuple[Array, Array, Array] | None,
    border: Border,
) -> Array:
    options = kernel_options(context)
    weight = jnp.transpose(weight, (2, 3, 4, 1, 0))
    space = context.space
    if space is None and border == "edge":
        rows, columns = x.shape[2:4]
        space = Space(
            rows=Side(axis=ROWS, parts=1, size=rows),
            columns=Side(axis=COLUMNS, parts=1, size=columns),
        )
    video: EdgedVideo | None = None
    copied = ""
    if space is not None:
        try:
            edges = _edges(space, x, before, options, border)
            video = EdgedVideo(x, before, *edges, real=_real(space, x))
        except NotImplementedError as error:
            # The kernel refuses the channels: the other form copies the video.
            copied = str(error)
    if shortcut is not None:
        if video is not None and _fits(shortcut[0]):
            short, matrix, more = shortcut
            both = more.astype(jnp.float32)
            both = both if bias is None else both + bias.astype(jnp.float32)
            added = (short, matrix.reshape(matrix.shape[:2]).T)
            # Both may not fit into VMEM together, but one after the other.
            with contextlib.suppress(NotImplementedError):
                out = edged_convolution(video, weight, both, shortcut=added, **options)
                # The kernel and the convolution of one element.
                context.note(KERNEL)
                context.note(KERNEL)
                return out
        residual = pointwise(context, *shortcut)
    if video is not None:
        try:
            out = edged_convolution(video, weight, bias, residual, **options)
            context.note(KERNEL)
            return out
        except NotImplementedError as error:
            copied = str(error)
    whole = x if before is None else jnp.concatenate([before, x], axis=1)
    out = _padded_convolution(context, whole, weight, bias, border)
    context.note(f"{KERNEL}, of a padded copy" if copied else KERNEL, copied)
    return out if residual is None else out + residual


def _padded_convolution(
    context: OpContext,
    x: Float[Array, "b _ y x c"],
    weight: Float[Array, "k 3 3 c o"],
    bias: Float[Array, "o"] | None,
    border: Border,
) -> Float[Array, "b t y x o"]:
    """A convolution [K, 3, 3, C, O] of a padded copy of [B, T + K - 1, Y, X, C].

    ``context`` has the neighbours, whose rows and columns are part of the copy; ``x``
    is the chunk behind the frames before it.
    """
    columns = x.shape[3]
    beyond = (0, pitch_of(columns) - columns - 2)
    if context.space is None:
        around = ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0))
        x = jnp.pad(x, around, mode="edge" if border == "edge" else "constant")
    else:
        x = context.space.halo(x, _DIMS, (1, 1), (1, 1), border)
    padded = jnp.pad(x, ((0, 0), (0, 0), (0, 0), beyond, (0, 0)))
    return video_convolution(padded, weight, bias, columns, **kernel_options(context))


def enlarged_convolution(
    context: OpContext,
    x: Float[Array, "b t y x c"],
    weight: Float[Array, "o c 3 3"],
    bias: Float[Array, "o"] | None,
    copies: int = 1,
) -> Float[Array, "b {copies}*t 2*y 2*x o"]:
    """Twice the rows and columns by nearest neighbours, then a convolution of frames.

    The enlarged video is never in memory.

    Args:
        x: [B, T, Y, X, C].
        weight: [O, C, 3, 3], upstream's; ``bias`` [O], or ``None``.
        copies: number of copies of each frame, one after the other.

    Returns:
        [B, copies T, 2 Y, 2 X, O] in the dtype of ``x``.

    Raises:
        NotImplementedError: the kernels cannot.
    """
    options, space = kernel_options(context), context.space
    if space is None:
        raise NotImplementedError("enlarging without a split in space")
    edges = _edges(space, x, None, options, "zeros")
    video = EdgedVideo(x, None, *edges, real=_real(space, x))
    kernel = jnp.transpose(weight, (2, 3, 1, 0))[None]
    out = edged_convolution(video, kernel, bias, scale=2, copies=copies, **options)
    context.note(KERNEL)
    return marked_picture(context, "an enlarged convolution", out, x)


def _edges(
    space: Space,
    x: Float[Array, "b t y x c"],
    before: Float[Array, "b lag y x c"] | None,
    options: dict[str, Any],
    border: Border,
) -> tuple[
    tuple[Float[Array, "b lag_t y+2 c"], Float[Array, "b lag_t y+2 c"]],
    Float[Array, "b lag_t 2 x c"] | None,
]:
    """``sides`` and ``ends`` of an ``EdgedVideo``.

    Args:
        x, before: arrays of this device; phantom rows and columns hold anything.

    Raises:
        NotImplementedError: the kernel that reads columns cannot, or the outermost row
            or column would have to be repeated beside phantoms.
    """
    columns = space.columns
    if border == "edge" and not (space.rows.even and columns.even):
        raise NotImplementedError("repeated edges beside rows or columns of padding")
    outer = outer_columns(x, before, **options)

    def exchanged(first: Array, last: Array) -> tuple[Array, Array]:
        left, right = _beside(columns, first, last, border)
        if not columns.even:
            # The next device may have no real column.
            right = jnp.where(columns.ahead(x.shape[3]) > x.shape[3], right, 0)
        return left, right

    if space.rows.parts == 1 and border == "zeros":
        return exchanged(*outer), None
    parts = [x] if before is None else [before, x]

    def row(at: int) -> Array:
        place = at % x.shape[2]
        pieces = [jax.lax.slice_in_dim(p, place, place + 1, axis=2) for p in parts]
        return jnp.concatenate(pieces, axis=1)

    above, below = _beside(space.rows, row(0), row(-1), border)
    # Corners belong to the columns, and come with a second exchange.
    sides = [
        jnp.concatenate([above[..., at, :], side[:, :, 1:-1], below[..., at, :]], 2)
        for at, side in zip((0, -1), outer, strict=True)
    ]
    left, right = exchanged(*sides)
    ends = jnp.concatenate([above, below], axis=2)
    if not space.rows.even:
        # Keep the rows of the picture: the row above, the own rows, the row below.
        rows = x.shape[2]
        real = jnp.arange(rows + 2)[:, None] <= space.rows.ahead(rows)
        left, right = (jnp.where(real, side, 0) for side in (left, right))
        ends = jnp.where(real[:: rows + 1, None], ends, 0)
    return (left, right), ends


def _beside(
    side: Side, first: Array, last: Array, border: Border
) -> tuple[Array, Array]:
    """What precedes the first row or column of a device, and what follows the last."""
    preceding, following = side.moved(last, 1), side.moved(first, -1)
    if border == "zeros":
        return preceding, following
    if side.parts == 1:
        return first, last
    place = side.place()
    preceding = jnp.where(place == 0, first, preceding)
    return preceding, jnp.where(place == side.parts - 1, last, following)


def _real(space: Space, x: Float[Array, "b t y x c"]) -> Real:
    """Number of real rows and columns of [B, T, Y, X, C], without phantoms."""
    return space.rows.count(x.shape[2]), space.columns.count(x.shape[3])


def _fits(x: Float[Array, "b t y x i"]) -> bool:
    """Whether [B, T, Y, X, I] has whole tiles, for a product in the kernel."""
    return x.shape[3] % TILE_ROWS == 0 and x.shape[4] % LANES == 0


def pointwise(
    context: OpContext,
    x: Float[Array, "b t y x i"],
    weight: Float[Array, "o i 1 1 1"],
    bias: Float[Array, "o"],
) -> Float[Array, "b t y x o"]:
    """[B, T, Y, X, I] through a convolution of one element, [O, I, 1, 1, 1]."""
    context.note(PRODUCT)
    flat = weight.reshape(weight.shape[:2])
    out = jnp.einsum(
        "btyxc,oc->btyxo",
        x,
        flat,
        precision=matmul_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return (out + bias.astype(jnp.float32)).astype(x.dtype)


def group_norm(
    context: OpContext,
    x: Float[Array, "b t y x c"],
    groups: int,
    weight: Float[Array, "c"],
    bias: Float[Array, "c"],
    eps: float,
    modulation: Float[Array, "b _ _ x 2*c"] | None = None,
    *,
    silu: bool,
    kept: int = 0,
) -> tuple[Float[Array, "b t y x c"], Float[Array, "b {kept} y x c"] | None]:
    """Group norm of the whole picture, modulated, through SiLU; float32 until the end.

    Args:
        x: [B, T, Y, X, C], C a multiple of 128.
        modulation: [B, t, y, X, 2 C] as :func:`apply_norm` takes it, or ``None``.
        kept: number of last frames to return separately too.

    Returns:
        of the shape and dtype of ``x``, and the kept frames.
    """
    batch, *_, channels = x.shape
    mean, variance = _channel_statistics(context, x)
    grouped = (batch, groups, channels // groups)
    means, variances = mean.reshape(grouped), variance.reshape(grouped)
    mean = jnp.mean(means, axis=2, keepdims=True)
    apart = jnp.square(means - mean)
    variance = jnp.mean(variances + apart, axis=2, keepdims=True)
    mean, variance = (
        jnp.broadcast_to(v, grouped).reshape(batch, channels) for v in (mean, variance)
    )
    scale = weight.astype(jnp.float32) / jnp.sqrt(variance + eps)
    shift = jnp.broadcast_to(bias.astype(jnp.float32), scale.shape)
    out, last = apply_norm(
        x,
        mean,
        scale,
        shift,
        modulation,
        silu=silu,
        kept=kept,
        **kernel_options(context),
    )
    pictures = (x, modulation)
    out = marked_picture(context, "a group norm", out, *pictures)
    if last is not None:
        last = marked_picture(context, "a group norm", last, *pictures)
    return out, last


def _channel_statistics(
    context: OpContext, x: Float[Array, "b t y x c"]
) -> tuple[Float32[Array, "b c"], Float32[Array, "b c"]]:
    """Mean and variance of every channel over all devices, float32 [B, C] each."""
    _, frames, rows, columns, _ = x.shape
    space, real = context.space, None
    if space is not None and not (space.rows.even and space.columns.even):
        rows, columns = real = _real(space, x)
    mean, spread = channel_moments(x, real, **kernel_options(context))
    count: Any = frames * rows * columns
    if space is not None and space.axes:
        counts = jnp.broadcast_to(jnp.asarray(count, jnp.float32), mean.shape)
        # A device may have no real element.
        parts = jax.lax.all_gather(jnp.stack([counts, mean, spread]), space.axes)
        count, mean, spread = joined(parts[:, 0], parts[:, 1], parts[:, 2], (0,))
    return mean, spread / count


def modulation_maps(
    latents: Float[Array, "b t y x z"],
    columns: int,
    weights: tuple[Float[Array, "c z 1 1 1"], Float[Array, "c z 1 1 1"]],
    biases: tuple[Float[Array, "c"], Float[Array, "c"]],
) -> Float[Array, "b t y {columns} 2*c"]:
    """Factors and summands of a spatial norm, as wide as the video.

    Latents go through pointwise products and are then enlarged by nearest neighbour:
    enlarging copies elements, so the order changes no number. A product with zeros and
    ones enlarges columns here; rows and frames are enlarged where they are read.

    Args:
        latents: [B, t, y, x, Z].
        columns: X, a multiple of x.
        weights, biases: of factors and of summands, [C, Z, 1, 1, 1] and [C] each.

    Returns:
        [B, t, y, X, 2 C] in the dtype of ``latents``.
    """
    count = columns // latents.shape[3]
    copies = jnp.repeat(jnp.eye(latents.shape[3], dtype=latents.dtype), count, axis=1)
    # Each sum has one product that is not zero, so no precision is lost.
    exact = jax.lax.Precision.HIGHEST if latents.dtype == jnp.float32 else None
    wide = jnp.einsum("btyxz,xw->btywz", latents, copies, precision=exact)
    weight = jnp.concatenate([w.reshape(w.shape[:2]) for w in weights])
    out = jnp.einsum(
        "btywz,cz->btywc",
        wide,
        weight,
        precision=matmul_precision(latents.dtype),
        preferred_element_type=jnp.float32,
    )
    out = out + jnp.concatenate([b.astype(jnp.float32) for b in biases])
    return out.astype(latents.dtype)
