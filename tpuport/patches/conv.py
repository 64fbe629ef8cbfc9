"""Convolutions: split over the devices, by kernels, and on the CPU over two axes.

In a program of whole arrays a convolution runs on each device's part of the picture,
with the neighbours' rows and columns around.

The forms for the CPU are in ``tpuport.kernels.convolution.conv_cpu``.

Legend: N batch, C input channels, O output channels, T frames, Y rows, X columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.layers.video_layers import KERNEL, PRODUCT, convolve, has_kernels
from tpuport.core.mesh.picture_marks import Mark, marked
from tpuport.core.mesh.pictures import picture_of
from tpuport.core.mesh.spatial_split import Border
from tpuport.core.tracing.context import OpContext
from tpuport.core.tracing.kernel_options import kernel_options
from tpuport.core.tracing.op_overrides import OpOverride
from tpuport.core.tracing.ported_module import constrain, on_devices
from tpuport.kernels.convolution.conv import video_convolution
from tpuport.kernels.convolution.conv_cpu import for_cpu, with_bias
from tpuport.kernels.convolution.conv_kernel import pitch_of


def plain_convolution(
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
) -> jax.Array:
    """[N, C, *sizes] convolved with [O, C / groups, *kernel] -> [N, O, *sizes'].

    Rounded once, after the bias. Source of the contract: ``torch.nn.functional.conv3d``
    and its like over one and two axes.
    """
    letters = "TYX"[3 - (weight.ndim - 2) :]
    out = jax.lax.conv_general_dilated(
        input,
        weight,
        tuple(stride),
        [(p, p) for p in padding],
        rhs_dilation=tuple(dilation),
        dimension_numbers=(f"NC{letters}", f"OI{letters}", f"NC{letters}"),
        feature_group_count=groups,
        preferred_element_type=jnp.float32,
    )
    return with_bias(out, bias, input.dtype)


def video_kernel(
    context: OpContext,
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    padding: Sequence[int],
) -> jax.Array:
    """[N, C, (T,) Y, X] by the project's kernel for TPU.

    Args:
        weight: [O, C, (K,) 3, 3].
        padding: of every axis.

    Raises:
        NotImplementedError: the kernel cannot.
    """
    if not has_kernels(context):
        raise NotImplementedError("a kernel on a mesh, without a split")
    if weight.shape[-2:] != (3, 3):
        raise NotImplementedError(f"a kernel of {weight.shape[2:]}")
    flat = input.ndim == 4
    if flat:
        input, weight, padding = input[:, :, None], weight[:, :, None], [0, *padding]
    x = jnp.transpose(input, (0, 2, 3, 4, 1))
    frames, rows, columns = padding
    if list(padding) == [0, 1, 1] and weight.shape[2] == 1:
        out = convolve(context, x, None, weight, bias)
    else:
        if context.space is not None:
            around = (rows, columns)
            x = context.space.halo(x, (2, 3), around, around)
            rows = columns = 0
        size = x.shape[3] + 2 * columns
        pitch = pitch_of(size - 2)
        sides = (columns, columns + pitch - size)
        pads = [(0, 0), (frames, frames), (rows, rows), sides, (0, 0)]
        kernel = jnp.transpose(weight, (2, 3, 4, 1, 0))
        out = video_convolution(
            jnp.pad(x, pads), kernel, bias, size - 2, **kernel_options(context)
        )
        context.note(KERNEL)
    out = jnp.transpose(out, (0, 4, 1, 2, 3))
    return out[:, :, 0] if flat else out


def pointwise(input: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    """[N, C, ...] by a kernel [O, C, 1, ...] of one element: a product of matrices.

    As such it compiles in a fraction of the time of a convolution.
    """
    flat = weight.reshape(weight.shape[:2])
    out = jnp.einsum("nc...,oc->no...", input, flat, preferred_element_type=jnp.float32)
    return with_bias(out, bias, input.dtype)


def over_time(
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: int,
    padding: int,
    dilation: int,
) -> jax.Array:
    """[N, C, T, Y, X] by a kernel [O, C, K, 1, 1]: a product of K frames side by side.

    As such it compiles in a fraction of the time of a convolution.
    """
    taps, edge = weight.shape[2], (padding, padding)
    x = jnp.transpose(input, (0, 2, 3, 4, 1))
    x = jnp.pad(x, ((0, 0), edge, (0, 0), (0, 0), (0, 0)))
    last = x.shape[1] - dilation * (taps - 1)
    frames = [x[:, t * dilation :][:, :last:stride] for t in range(taps)]
    matrix = jnp.transpose(weight[..., 0, 0], (2, 1, 0)).reshape(-1, weight.shape[0])
    side_by_side = jnp.concatenate(frames, -1)
    out = jnp.matmul(side_by_side, matrix, preferred_element_type=jnp.float32)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return jnp.transpose(out.astype(input.dtype), (0, 4, 1, 2, 3))


def _beyond(
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    transposed: bool,
    batched: bool,
) -> str:
    """What of a convolution no kernel of the project has, in words."""
    found = {
        f"a stride of {tuple(stride)}": set(stride) != {1},
        f"a dilation of {tuple(dilation)}": set(dilation) != {1},
        f"{groups} groups": groups != 1,
        "transposed": transposed,
        "no batch": not batched,
    }
    return ", ".join(text for text, true in found.items() if true)


def _on_parts(
    context: OpContext,
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> jax.Array | None:
    """A convolution of each device's part of the picture, in a program of whole arrays.

    Returns:
        ``None`` where the picture does not divide: a side by its devices times the
        stride, or a border that is wider than a part.
    """
    known = context.padded.get(id(input))
    pads = [(n, n) for n in padding[-2:]]
    border: Border = "zeros"
    if known is not None and (known.border == "zeros" or pads == [(0, 0)] * 2):
        input, border = known.source, known.border
        around = zip(known.before, known.after, strict=True)
        pads = [
            (one + n, other + n)
            for (one, other), (n, _) in zip(around, pads, strict=True)
        ]
    picture = picture_of(context.mesh, *input.shape[-2:])
    if picture is None:
        return None
    space, halo = picture.space, []
    for at, side in ((-2, space.rows), (-1, space.columns)):
        before, after = pads[at]
        if side.parts > 1:
            step = stride[at]
            reach = dilation[at] * (weight.shape[at] - 1) + 1
            made = (side.size + before + after - reach) // step + 1
            after = reach - step - before
            if (
                side.each % step
                or made * step != side.size
                or not 0 <= after <= side.each >= before
            ):
                return None
        halo.append((before, after))
    around_before, around_after = zip(*halo, strict=True)
    # On one device's part every implementation can run, kernels too.
    run = _make(replace(context, mesh=None))

    def on_part(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        dims = (x.ndim - 2, x.ndim - 1)
        x = space.halo(x, dims, around_before, around_after, border)
        inside = [*padding[:-2], 0, 0]
        out: jax.Array = run(
            x, weight, bias, stride, inside, dilation, False, (0,), groups
        )
        return out

    axes = picture.axes(input.ndim)
    return on_devices(
        picture.mesh, on_part, (input, weight, bias), (axes, (), ()), axes
    )


def _for_tpu(
    context: OpContext,
    simple: bool,
    beyond: str,
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> jax.Array | None:
    """A convolution as a product or by the kernel; ``None`` leaves it to XLA, noted.

    XLA's own takes longer to compile and to run. ``simple``: of a batch, not grouped
    and not transposed. ``beyond`` is what no kernel has.
    """
    kernel = [*weight.shape[2:]]
    if not beyond and set(kernel) == {1} and not any(padding):
        context.note(PRODUCT)
        return pointwise(input, weight, bias)
    flat = [*kernel[1:], *stride[1:], *padding[1:]] == [1, 1, 1, 1, 0, 0]
    if simple and flat:
        context.note(PRODUCT)
        return over_time(input, weight, bias, stride[0], padding[0], dilation[0])
    if len(kernel) == 1:
        context.note("XLA")
        return None
    if beyond:
        context.note("XLA", beyond)
        return None
    run = functools.partial(video_kernel, context, input, weight, bias, padding)
    return context.tried("convolution", "XLA", run)


def _marking(convolution: Callable[..., Any]) -> Callable[..., Any]:
    """A convolution that is split in space, with its result marked."""

    def run(
        input: jax.Array, weight: jax.Array, bias: jax.Array | None, *options: Any
    ) -> Any:
        out = convolution(input, weight, bias, *options)
        if weight.ndim < 4:
            return out  # along frames alone
        (down, right), (above, left), apart = (
            list(one)[-2:] * (1 if len(one) > 1 else 2) for one in options[:3]
        )
        rows, columns = (
            step * (n - 1) + 1 for step, n in zip(apart, weight.shape[-2:], strict=True)
        )
        dims = (input.ndim - 2, input.ndim - 1)
        mark = Mark(
            name="a convolution",
            dims=dims,
            given=dims,
            added=(2 * above, 2 * left),
            reach=(rows, columns),
            stride=(down, right),
        )
        return marked(mark, out, input)

    return run


def _make(context: OpContext) -> Callable[..., Any]:
    from torchax.ops.jaten import _aten_convolution

    platform, space = context.platform, context.space

    def convolution(
        input: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> Any:
        axes = weight.ndim - 2
        batched = input.ndim == weight.ndim
        pads, steps, apart = (
            list(values) * (axes if len(values) == 1 else 1)
            for values in (padding, stride, dilation)
        )
        if pads != [0] * axes or steps != [*weight.shape[2:]]:
            if axes > 1 and batched and not transposed:
                given = (input, weight, bias, steps, pads, apart, groups)
                found = _on_parts(context, *given)
                if found is not None:
                    return found
            # The compiler may not split a picture by itself: its exchange of rows
            # (jaxlib 0.10.2) gives wrong values for a picture of two rows.
            input = constrain(context.mesh, input)
        if platform == "tpu":
            beyond = _beyond(steps, apart, groups, transposed, batched)
            simple = batched and groups == 1 and not transposed
            call = (input, weight, bias, steps, pads, apart)
            found = _for_tpu(context, simple, beyond, *call)
            if found is not None:
                return found
        else:
            context.note("XLA")
        if space is not None and axes > 1:
            if transposed or not batched:
                raise NotImplementedError(
                    f"a convolution of {input.shape} with {weight.shape}, "
                    f"transposed={transposed}, split in space"
                )
            dims = (input.ndim - 2, input.ndim - 1)
            around = (pads[-2], pads[-1])
            input = space.halo(input, dims, around, around)
            pads[-2:] = [0, 0]
        if platform == "cpu" and batched and not transposed:
            found = for_cpu(input, weight, bias, steps, pads, apart, groups)
            if found is not None:
                return found
        if platform == "tpu" and batched and not transposed:
            return plain_convolution(input, weight, bias, steps, pads, apart, groups)
        return _aten_convolution(
            input,
            weight,
            bias,
            stride,
            pads,
            dilation,
            transposed,
            output_padding,
            groups,
        )

    return convolution if space is None else _marking(convolution)


CONVOLUTION = OpOverride(
    targets=("torch.ops.aten.convolution",),
    make=_make,
    owner="tpuport.patches.conv",
    reason="XLA's CPU compiler is slow at convolutions over three axes and of single "
    "channels; split in space, a device needs its neighbours' rows and columns",
)
"""For any model with 3D convolutions."""
