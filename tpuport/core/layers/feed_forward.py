"""The feed-forward layer of a transformer block, as two products for the chip.

Letters: B batch, L tokens with padding, E width, F inner width.

On a TPU a kernel makes both products if their weights do not fit the VMEM that XLA
gives a product (``tpuport/kernels/products/token_product.py``), each device with its
own tokens. XLA's code runs elsewhere, and if the kernel refuses a size.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.arrays import Array, Float, Float32
from tpuport.core.layers.joint_sequence import (
    JointSequence,
    dense,
    from_heads,
    gated,
)
from tpuport.core.layers.token_norms import has_kernels
from tpuport.core.tracing.kernel_options import kernel_options
from tpuport.core.tracing.ported_module import on_devices
from tpuport.kernels.attention.selection import DEFAULT_CHIP
from tpuport.kernels.products.token_product import gated_token_product, token_product

#: The share of the kernels' VMEM up to which XLA keeps a weight there.
KEPT_BY_XLA = 3 / 8
#: Where the kernel was found to be faster.
FASTER_ON = ("v6e",)

#: Weight [F, E] and bias [F] of a layer to F features, and those of one back to E; a
#: bias may be ``None``.
Linear = tuple[Float[Array, "f e"], Float[Array, "f"] | None]
Back = tuple[Float[Array, "e f"], Float[Array, "e"] | None]


def gelu_dense(
    sequence: JointSequence,
    x: Float[Array, "*lead e"],
    weight: Float[Array, "f e"],
    bias: Float[Array, "f"] | None,
    *,
    tanh: bool = True,
) -> Float[Array, "*lead f"]:
    """A linear layer and GELU, the first half of a feed-forward layer.

    Args:
        sequence: as :func:`tpuport.core.layers.joint_sequence.dense` takes it.
        tanh: the form of GELU.

    Returns:
        [..., F] in the dtype of ``x``, rounded once.
    """
    wide = dense(sequence, x, weight, bias)
    inner = jax.nn.gelu(wide, approximate=tanh).astype(x.dtype)
    # Without the barrier XLA computes this product again in each block of the next.
    return jax.lax.optimization_barrier(inner)


def feed_forward(
    sequence: JointSequence,
    x: Float[Array, "*lead e"],
    first: Linear,
    last: Back,
    *,
    tanh: bool = True,
) -> Float32[Array, "*lead e"]:
    """Two linear layers with GELU between them, float32 [..., E].

    Args:
        sequence: as :func:`tpuport.core.layers.joint_sequence.dense` takes it.
        first, last: weight and bias of each layer.
        tanh: the form of GELU.
    """
    inner = gelu_dense(sequence, x, *first, tanh=tanh)
    return dense(sequence, inner, *last, row_parallel=True)


def add_feed_forward(
    sequence: JointSequence,
    x: Float[Array, "b l e"],
    y: Float[Array, "b l e"],
    first: Linear,
    last: Back,
    *,
    text: Float[Array, "b *l e"],
    video: Float[Array, "b *l e"],
    tanh: bool = True,
) -> Float[Array, "b l e"]:
    """``x + gate * feed_forward(y)``, rounded once.

    Args:
        sequence, first, last, tanh: as :func:`feed_forward` takes them.
        text, video: gates, as :func:`tpuport.core.layers.joint_sequence.gated` takes
            them.

    Returns:
        of the shape and dtype of ``x``.
    """
    gates = video, text
    if _is_kernels(sequence, first[0], gates):
        try:
            inner = _on_tokens(
                sequence,
                functools.partial(
                    token_product,
                    activation=functools.partial(jax.nn.gelu, approximate=tanh),
                ),
                first,
                y.swapaxes(1, 2),
            )
            return _added(sequence, x, inner, last, gates)
        except NotImplementedError:
            # Another number of tokens or features, or another dtype, than the kernel's.
            pass
    update = feed_forward(sequence, y, first, last, tanh=tanh)
    return gated(sequence, x, update, text=text, video=video)


def add_from_heads(
    sequence: JointSequence,
    x: Float[Array, "b l e"],
    out: Float[Array, "b h m n"],
    linear: Back,
    *,
    text: Float[Array, "b *l e"],
    video: Float[Array, "b *l e"],
) -> Float[Array, "b l e"]:
    """``x + gate * from_heads(out)``, rounded once; see :func:`add_feed_forward`."""
    gates = video, text
    if _is_kernels(sequence, linear[0], gates):
        try:
            inner = out.reshape(out.shape[0], -1, out.shape[3])
            return _added(sequence, x, inner, linear, gates)
        except NotImplementedError:
            # As above.
            pass
    update = from_heads(sequence, out, *linear)
    return gated(sequence, x, update, text=text, video=video)


def _is_kernels(
    sequence: JointSequence, weight: Float[Array, "f e"], gates: tuple[Array, Array]
) -> bool:
    """Whether a product is the kernel's: XLA would read the weight more than once.

    A device must have all columns of the weights, and a gate be one for all tokens.
    """
    if not has_kernels(sequence) or sequence.sums_partial_products:
        return False
    context = sequence.active.context
    if (context.chip or DEFAULT_CHIP) not in FASTER_ON:
        return False
    kept = kernel_options(context)["vmem_limit"] * KEPT_BY_XLA
    return weight.nbytes > kept and gates[0].ndim == 2


def _added(
    sequence: JointSequence,
    x: Float[Array, "b l f"],
    inner: Float[Array, "b e l"],
    linear: Linear,
    gates: tuple[Float[Array, "b f"], Float[Array, "b f"]],
) -> Float[Array, "b l f"]:
    """``x + gate * linear(inner)`` by the kernel, with gates of video and of text."""
    marked = (0, 0) if gates[0] is gates[1] else sequence.text_places
    batch, axis = sequence.axes(x.shape[0])
    each = x.shape[1] // sequence.active.axis_size(axis)
    out = _on_tokens(
        sequence,
        functools.partial(gated_token_product, marked=marked),
        linear,
        inner,
        # A transpose on paper only: tokens are last in memory.
        (x.swapaxes(1, 2), (batch, None, axis)),
        (jnp.stack(gates, 1).astype(jnp.float32), (batch,)),
        (jnp.arange(0, x.shape[1], each, dtype=jnp.int32), (axis,)),
    )
    return out.swapaxes(1, 2)


def _on_tokens(
    sequence: JointSequence,
    run: Any,
    linear: Linear,
    x: Float[Array, "b e l"],
    *others: tuple[Array, tuple[str | None, ...]],
) -> Float[Array, "b f l"]:
    """The kernel on each device's tokens; ``others`` with the axes that split them."""
    context, (weight, bias) = sequence.active.context, linear
    batch, axis = sequence.axes(x.shape[0])
    wide = (
        jnp.zeros(weight.shape[0], jnp.float32)
        if bias is None
        else bias.astype(jnp.float32)
    )
    split = (batch, None, axis)
    arrays, axes = zip((weight, ()), (x, split), (wide, ()), *others, strict=True)
    run = functools.partial(run, **kernel_options(context))
    return on_devices(context.mesh, run, arrays, axes, split)
