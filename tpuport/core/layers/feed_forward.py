"""The feed-forward layer of a transformer block, as two products for the chip.

Letters: E width, F inner width.
"""

from __future__ import annotations

import jax

from tpuport.core.arrays import Array, Float, Float32
from tpuport.core.layers.joint_sequence import JointSequence, dense


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
    first: tuple[Float[Array, "f e"], Float[Array, "f"] | None],
    last: tuple[Float[Array, "e f"], Float[Array, "e"] | None],
    *,
    tanh: bool = True,
) -> Float32[Array, "*lead e"]:
    """Two linear layers with GELU between them, float32 [..., E].

    Args:
        sequence: as :func:`tpuport.core.layers.joint_sequence.dense` takes it.
        first, last: weight and bias of each layer; a bias may be ``None``.
        tanh: the form of GELU.
    """
    inner = gelu_dense(sequence, x, *first, tanh=tanh)
    return dense(sequence, inner, *last, row_parallel=True)
