"""The feed-forward layer of a transformer block, as two products for the chip.

Letters: E width, F inner width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpuport.core.layers.joint_sequence import JointSequence, dense

if TYPE_CHECKING:
    import jax


def gelu_dense(
    sequence: JointSequence,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    tanh: bool = True,
) -> jax.Array:
    """A linear layer and GELU, the first half of a feed-forward layer.

    Args:
        sequence: as :func:`tpuport.core.layers.joint_sequence.dense` takes it.
        x: of shape [..., E].
        weight: of shape [F, E].
        bias: of shape [F], or ``None``.
        tanh: the form of GELU.

    Returns:
        of shape [..., F] in the dtype of ``x``, rounded once.
    """
    import jax

    wide = dense(sequence, x, weight, bias)
    inner = jax.nn.gelu(wide, approximate=tanh).astype(x.dtype)
    # Without it XLA computes this product anew within the next, per block of it.
    return jax.lax.optimization_barrier(inner)


def feed_forward(
    sequence: JointSequence,
    x: jax.Array,
    first: tuple[jax.Array, jax.Array | None],
    last: tuple[jax.Array, jax.Array | None],
    *,
    tanh: bool = True,
) -> jax.Array:
    """Two linear layers with GELU between them.

    Args:
        sequence: as :func:`tpuport.core.layers.joint_sequence.dense` takes it.
        x: of shape [..., E].
        first, last: weight and bias of each, the bias or ``None``.
        tanh: the form of GELU.

    Returns:
        float32 [..., E].
    """
    inner = gelu_dense(sequence, x, *first, tanh=tanh)
    return dense(sequence, inner, *last, row_parallel=True)
