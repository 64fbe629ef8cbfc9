"""A product of a large weight and tokens for TPU, and what a block makes of it.

A weight that does not fit VMEM is cut into pieces of rows. A piece stays while all
tokens come by, so the weight is read once, and the tokens once for each piece. No sum
leaves VMEM. The rows of a piece are taken a chunk at a time: the matrix unit works on
one chunk while the vector unit finishes the chunk before. Tokens are last, as the
kernels of attention and norms have them.

Legend: B batch, L tokens, E features of the tokens, F features of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

#: A token lies in a lane. Vectors of features are turned by as many.
LANES = 128
#: Rows of a chunk: at least, and at most. The matrix unit waits for about 180 cycles at
#: the end of each; larger ones take the compiler longer.
LEAST_CHUNK, MOST_CHUNK = 256, 640
#: Rows of a piece at most. All tokens are read again for each: with 1,120 rows, on a
#: v6e, in half of the time of the products. The first piece comes before any product.
MOST_ROWS = 1536
#: Tokens of a block at most.
MOST_TOKENS = 768
#: Rows of a vector that a kernel can take.
VECTORS = 8
#: Bytes of VMEM for all but blocks and chunks.
BESIDE = 8 << 20


def token_product(
    weight: Float[Array, "f e"],
    x: Float[Array, "b e l"],
    bias: Float32[Array, " f"],
    *,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    vmem_limit: int,
    interpret: bool = False,
) -> Float[Array, "b f l"]:
    """``activation(weight x + bias)``, in float32 until the end.

    Args:
        weight: [F, E]; ``bias`` float32 [F].
        x: [B, E, L], in the dtype of ``weight``.
        activation: of elements; ``None`` for none.
        vmem_limit: bytes of VMEM that the kernel may take.
        interpret: run on the CPU, for tests.

    Returns:
        [B, F, L] in the dtype of ``x``.

    Raises:
        NotImplementedError: sizes or a dtype that the kernel does not take.
    """
    vectors = jnp.broadcast_to(bias[None, None], (x.shape[0], 1, len(bias)))

    def finish(y: jax.Array, given: jax.Array, *_: Any) -> jax.Array:
        y = y + given[:, 0:1]
        return y if activation is None else activation(y)

    return _product(weight, x, vectors, finish, (), vmem_limit, interpret)


def gated_token_product(
    weight: Float[Array, "f e"],
    x: Float[Array, "b e l"],
    bias: Float32[Array, " f"],
    residual: Float[Array, "b f l"],
    gates: Float32[Array, "b 2 f"],
    first: Int32[Array, 1],
    *,
    marked: tuple[int, int] = (0, 0),
    vmem_limit: int,
    interpret: bool = False,
) -> Float[Array, "b f l"]:
    """``residual + gate * (weight x + bias)``, in float32 until the end.

    Args:
        weight, x, bias, vmem_limit, interpret: as :func:`token_product` takes them.
        residual: [B, F, L].
        gates: float32 [B, 2, F]: of all other tokens, and of marked ones.
        first: int32 [1]: the index of the first of these tokens in their sequence.
        marked: the marked tokens of the sequence, from one index to before another.

    Returns:
        of the shape and dtype of ``residual``.

    Raises:
        NotImplementedError: sizes or a dtype that the kernel does not take.
    """
    wide = jnp.broadcast_to(bias[None, None], (x.shape[0], 1, len(bias)))
    vectors = jnp.concatenate([wide, gates], 1)

    def finish(
        y: jax.Array, given: jax.Array, place: jax.Array, held: jax.Array
    ) -> jax.Array:
        gate = given[:, 1:2]
        if marked[0] < marked[1]:
            here = (place >= marked[0]) & (place < marked[1])
            gate = jnp.where(here, given[:, 2:3], gate)
        return held.astype(jnp.float32) + gate * (y + given[:, 0:1])

    others = (residual, first)
    return _product(weight, x, vectors, finish, others, vmem_limit, interpret)


def _product(
    weight: Float[Array, "f e"],
    x: Float[Array, "b e l"],
    vectors: Float32[Array, "b n f"],
    finish: Callable[..., jax.Array],
    others: tuple[Any, ...],
    vmem_limit: int,
    interpret: bool,
) -> Float[Array, "b f l"]:
    """``finish`` of the product of a chunk, its vectors [rows, n], and ``others``."""
    rows, features = weight.shape
    batch, _, tokens = x.shape
    piece, chunk, block, held = _sizes(weight, x, bool(others), vmem_limit)
    residual, first = others or (None, jnp.zeros(1, jnp.int32))
    starts = first + block * jnp.arange(tokens // block, dtype=jnp.int32)
    padding = ((0, 0), (0, VECTORS - vectors.shape[1]), (0, 0))
    whole = pl.BlockSpec((1, piece, block), lambda f, b, t, *_: (b, f, t))
    given = [
        (
            pl.BlockSpec((1, VECTORS, piece), lambda f, b, t, *_: (b, 0, f)),
            jnp.pad(vectors, padding),
        ),
        (pl.BlockSpec((piece, features), lambda f, b, t, *_: (f, 0)), weight),
        (pl.BlockSpec((1, features, block), lambda f, b, t, *_: (b, 0, t)), x),
    ]
    if residual is not None:
        given.append((whole, residual))
    specs, arrays = zip(*given, strict=True)
    moved = weight.nbytes + rows // piece * x.nbytes
    out = jax.ShapeDtypeStruct((batch, rows, tokens), x.dtype)
    return pl.pallas_call(
        functools.partial(_body, finish),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows // piece, batch, tokens // block),
            in_specs=list(specs),
            out_specs=whole,
            scratch_shapes=[pltpu.VMEM((chunk, block), jnp.float32)] * 2,
        ),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3, vmem_limit_bytes=held
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * weight.size * batch * tokens,
            transcendentals=0,
            bytes_accessed=moved + out.size * x.dtype.itemsize * (1 + bool(others)),
        ),
        interpret=interpret,
        name="tpuport_product",
    )(starts, *arrays)


def _sizes(
    weight: Float[Array, "f e"], x: Float[Array, "b e l"], gated: bool, limit: int
) -> tuple[int, int, int, int]:
    """Rows of a piece and of a chunk, tokens of a block, and bytes of VMEM.

    Raises:
        NotImplementedError: sizes or a dtype that the kernel does not take.
    """
    rows, features = weight.shape
    tokens, itemsize = x.shape[2], x.dtype.itemsize
    if itemsize != 2 or x.dtype != weight.dtype:
        raise NotImplementedError(f"products of {weight.dtype} and {x.dtype}")
    if rows % LEAST_CHUNK or features % LANES or tokens % LANES:
        raise NotImplementedError(
            f"{rows} x {features} features and {tokens} tokens are no multiples of "
            f"{LEAST_CHUNK} x {LANES} and {LANES}"
        )
    chunk = max(n for n in range(LEAST_CHUNK, MOST_CHUNK + 1, LANES) if rows % n == 0)
    # A matrix unit has 256 columns.
    sizes = (LANES, *range(2 * LANES, MOST_TOKENS + 1, 2 * LANES))
    block = max(n for n in sizes if tokens % n == 0)

    def size(piece: int) -> int:
        """Bytes of both buffers of what comes and goes, and of the chunks."""
        moving = piece * features + features * block + (1 + gated) * piece * block
        twice = moving * itemsize + VECTORS * piece * 4
        return 2 * (twice + chunk * block * 4) + BESIDE

    most = min(rows, MOST_ROWS)
    pieces = [n for n in range(chunk, most + 1, chunk) if rows % n == 0]
    fits = [n for n in pieces if size(n) <= limit]
    if not fits:
        raise NotImplementedError(f"{chunk} rows of {features} features are too many")
    piece = max(fits)
    return piece, chunk, block, size(piece)


def _body(
    finish: Callable[..., jax.Array],
    starts_ref: Any,
    vectors_ref: Any,
    weight_ref: Any,
    x_ref: Any,
    *refs: Any,
) -> None:
    """A piece of the weight and a block of tokens."""
    *residual_ref, out_ref, even_ref, odd_ref = refs
    size, tokens = even_ref.shape
    place = lax.broadcasted_iota(jnp.int32, (1, tokens), 1)
    place = place + starts_ref[pl.program_id(2)]

    def multiply(chunk: Any, sums_ref: Any) -> None:
        start = pl.multiple_of(chunk * size, size)
        rows = weight_ref[pl.ds(start, size)]
        sums_ref[...] = jnp.dot(rows, x_ref[0], preferred_element_type=jnp.float32)

    def end(chunk: Any, sums_ref: Any) -> None:
        for offset in range(0, size, LANES):
            start = pl.multiple_of(chunk * size + offset, LANES)
            rows = pl.ds(start, LANES)
            # What belongs to a feature lies along the sublanes.
            given = vectors_ref[0, :, rows].T
            held = [ref[0, rows] for ref in residual_ref]
            y = finish(sums_ref[offset : offset + LANES], given, place, *held)
            out_ref[0, rows] = y.astype(out_ref.dtype)

    def two(pair: Any, carry: None) -> None:
        multiply(2 * pair + 1, odd_ref)
        end(2 * pair, even_ref)
        multiply(2 * pair + 2, even_ref)
        end(2 * pair + 1, odd_ref)

    chunks = weight_ref.shape[0] // size
    multiply(0, even_ref)
    lax.fori_loop(0, (chunks - 1) // 2, two, None)
    if chunks % 2 == 0:
        multiply(chunks - 1, odd_ref)
        end(chunks - 2, even_ref)
        end(chunks - 1, odd_ref)
    else:
        end(chunks - 1, even_ref)
