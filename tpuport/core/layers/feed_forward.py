"""Products of a block by a kernel, each device with its own tokens.

Letters: B batch, L tokens with padding, E width, F inner width.

On a TPU a kernel makes products whose weights do not fit the VMEM that XLA gives a
product (``tpuport/kernels/products/token_product.py``). XLA's code runs elsewhere, and
if the kernel refuses a size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from tpuport.core.arrays import Array, Float
from tpuport.core.layers.joint_sequence import JointSequence
from tpuport.core.layers.token_norms import has_kernels
from tpuport.core.tracing.kernel_options import kernel_options
from tpuport.core.tracing.ported_module import on_devices
from tpuport.kernels.attention.selection import DEFAULT_CHIP
from tpuport.kernels.products.token_product import gated_token_product, token_product

#: The share of the kernels' VMEM up to which XLA keeps a weight there.
KEPT_BY_XLA = 3 / 8
#: Where the kernel was found to be faster.
FASTER_ON = ("v6e",)

#: Weight [F, E] and bias [F] of a layer to F features; the bias may be ``None``.
Linear = tuple[Float[Array, "f e"], Float[Array, "f"] | None]


def is_kernels(
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
    return weight.nbytes > kept and all(gate.ndim == 2 for gate in gates)


def activated_product(
    sequence: JointSequence,
    x: Float[Array, "b l e"],
    linear: Linear,
    activation: Callable[..., Any],
) -> Float[Array, "b f l"]:
    """``activation(linear(x))`` by the kernel, tokens last.

    Raises:
        NotImplementedError: the kernel takes another number of tokens or features, or
            another dtype.
    """
    run = functools.partial(token_product, activation=activation)
    return _on_tokens(sequence, run, linear, x.swapaxes(1, 2))


def added_product(
    sequence: JointSequence,
    x: Float[Array, "b l f"],
    inner: Float[Array, "b e l"],
    linear: Linear,
    gates: tuple[Float[Array, "b f"], Float[Array, "b f"]],
) -> Float[Array, "b l f"]:
    """``x + gate * linear(inner)`` by the kernel, rounded once; its tokens are last.

    Args:
        gates: of the tokens that are marked as text, and of all others.

    Raises:
        NotImplementedError: as :func:`activated_product`.
    """
    text, video = gates
    marked = (0, 0) if text is video else sequence.text_places
    batch, axis = sequence.axes(x.shape[0])
    each = x.shape[1] // sequence.active.axis_size(axis)
    out = _on_tokens(
        sequence,
        functools.partial(gated_token_product, marked=marked),
        linear,
        inner,
        # A transpose on paper only: tokens are last in memory.
        (x.swapaxes(1, 2), (batch, None, axis)),
        (jnp.stack((video, text), 1).astype(jnp.float32), (batch,)),
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
