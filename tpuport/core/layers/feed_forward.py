"""The feed-forward layer of a transformer block, as two products for the chip.

Letters: E width, F inner width.
"""

from __future__ import annotations

import jax

from tpuport.core.arrays import Array, Float, Float32
from tpuport.core.layers.joint_sequence import JointSequence, dense

#: Features that fill the lanes.
LANES = 128
#: Bytes of a weight that the compiler keeps in VMEM during its product.
MOST = 48 << 20


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
    pieces: int = 1,
) -> Float32[Array, "*lead e"]:
    """Two linear layers with GELU between them, float32 [..., E].

    Args:
        sequence: as :func:`tpuport.core.layers.joint_sequence.dense` takes it.
        first, last: weight and bias of each layer; a bias may be ``None``.
        tanh: the form of GELU.
        pieces: in which the inner features are computed and added up.
    """

    if pieces == 1:
        inner = gelu_dense(sequence, x, *first, tanh=tanh)
        return dense(sequence, inner, *last, row_parallel=True)
    weight, bias = first
    size = weight.shape[0] // pieces
    out: Array | None = None
    for start in range(0, weight.shape[0], size):
        some = slice(start, start + size)
        # Barriers: slices of their own, which fit VMEM, and one sum after the other.
        parts = jax.lax.optimization_barrier((weight[some], last[0][:, some], x, out))
        rows, columns, x, out = parts
        inner = gelu_dense(
            sequence, x, rows, None if bias is None else bias[some], tanh=tanh
        )
        rest = last[1] if out is None else None
        added = dense(sequence, inner, columns, rest, row_parallel=True)
        out = added if out is None else out + added
    assert out is not None
    return out


def pieces_of(sequence: JointSequence, weight: Float[Array, "f e"]) -> int:
    """Into how many pieces of F a feed-forward layer falls whose products are fastest.

    A product whose weight lies in VMEM keeps the matrix unit of a v6e busy for 0.95 of
    the time, by the compiler's estimate, and one that reads it from HBM for 0.74.
    """
    if sequence.active.context.platform != "tpu" or sequence.sums_partial_products:
        return 1
    lanes, rest = divmod(weight.shape[0], LANES)
    fits = (
        n for n in range(1, lanes + 1) if lanes % n == 0 and weight.nbytes <= n * MOST
    )
    return 1 if rest else next(fits, 1)
