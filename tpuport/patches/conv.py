"""Three-dimensional convolution on the CPU, as a two-dimensional one.

XLA's CPU compiler is much faster at convolutions over two axes than over three. A
convolution whose first axis has stride 1 is one over the other two axes with the taps
of the first side by side in the channels: the same products, summed in another order.
``docs/performance.md`` has what that is worth. Other platforms keep the plain form.

Legend: N batch, C input channels, O output channels, T frames, Y rows, X columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tpuport.core.ops import OpContext, OpOverride

if TYPE_CHECKING:
    import jax


def _is_three_dimensional(
    weight: jax.Array,
    stride: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> bool:
    return (
        weight.ndim == 5
        and weight.shape[2] > 1
        and stride[0] == 1
        and dilation[0] == 1
        and not transposed
        and groups == 1
    )


def convolution_by_taps(
    input: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> jax.Array:
    """[N, C, T, Y, X] convolved with [O, C, Kt, Ky, Kx] -> [N, O, T', Y', X'].

    ``stride`` and ``dilation`` must be 1 in the first place. Source of the contract:
    ``torch.nn.functional.conv3d``.
    """
    import jax
    import jax.numpy as jnp

    count, channels, _, rows, columns = input.shape
    outputs, _, taps, *kernel = weight.shape
    pad_t, *pad = padding
    x = jnp.transpose(input, (0, 2, 3, 4, 1))
    x = jnp.pad(x, ((0, 0), (pad_t, pad_t), (0, 0), (0, 0), (0, 0)))
    frames = x.shape[1] - taps + 1
    side_by_side = jnp.concatenate([x[:, t : t + frames] for t in range(taps)], -1)
    out = jax.lax.conv_general_dilated(
        side_by_side.reshape(count * frames, rows, columns, taps * channels),
        jnp.transpose(weight, (3, 4, 2, 1, 0)).reshape(
            *kernel, taps * channels, outputs
        ),
        tuple(stride[1:]),
        [(p, p) for p in pad],
        rhs_dilation=tuple(dilation[1:]),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        # Rounded once, after the bias, as torch does: in bfloat16 it shows.
        preferred_element_type=jnp.float32,
    )
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    out = out.astype(input.dtype)
    out = out.reshape(count, frames, *out.shape[1:])
    return jnp.transpose(out, (0, 4, 1, 2, 3))


def _make(context: OpContext) -> Callable[..., Any]:
    from torchax.ops.jaten import _aten_convolution

    if context.platform != "cpu":
        plain: Callable[..., Any] = _aten_convolution
        return plain

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
        if input.ndim == 5 and _is_three_dimensional(
            weight, stride, dilation, transposed, groups
        ):
            return convolution_by_taps(input, weight, bias, stride, padding, dilation)
        return _aten_convolution(
            input,
            weight,
            bias,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups,
        )

    return convolution


CONVOLUTION_ON_CPU = OpOverride(
    targets=("torch.ops.aten.convolution",),
    make=_make,
    owner="tpuport.patches.conv",
    reason="XLA's CPU compiler is slow at convolutions over three axes",
)
"""For any model with 3D convolutions."""
