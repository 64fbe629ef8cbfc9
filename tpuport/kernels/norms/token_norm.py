"""Norms of transformer blocks for TPU, each in one pass over the tokens.

XLA reads the tokens three times, for the mean, for the variance and to apply both. It
also writes the halves of a rotated head apart before it joins them. Here a block of
tokens is read once, and everything else happens in VMEM. Tokens are last, as the
attention kernel takes them: sums over the features then add whole registers.

Legend: B batch, L tokens, E features, H heads, D features of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

#: Tokens of a block are whole lanes, features of a head whole sublanes in either dtype.
LANES, SUBLANES = 128, 16
#: Bytes of a block at most: what a step costs besides is small from 4 MiB on.
BLOCK_BYTES = 6 << 20
#: Tokens of a block at most.
MOST_TOKENS = 1024
#: Bytes of VMEM for all but the blocks. What a kernel asks for XLA cannot keep other
#: arrays in meanwhile.
BESIDE = 4 << 20


def tokens_per_block(tokens: int, token_bytes: int, vmem_limit: int) -> int:
    """The largest divisor of ``tokens``, whole lanes, whose block is small enough.

    Args:
        token_bytes: of what a step reads of a token.
        vmem_limit: bytes of VMEM that the kernel may take, with both buffers of what
            comes and of what goes.

    Raises:
        NotImplementedError: ``tokens`` are no whole lanes, or do not fit.
    """
    if tokens % LANES or tokens < 1:
        raise NotImplementedError(f"{tokens} tokens are no multiple of {LANES}")
    room = min((vmem_limit - BESIDE) // 4, BLOCK_BYTES)
    most = min(room // token_bytes, MOST_TOKENS)
    sizes = [n for n in range(LANES, most + 1, LANES) if tokens % n == 0]
    if not sizes:
        raise NotImplementedError(
            f"{LANES} tokens of {token_bytes} bytes do not fit into {vmem_limit} of "
            "VMEM four times"
        )
    return max(sizes)


def modulated_layer_norm(
    x: Float[Array, "b e l"],
    factors: Float32[Array, "b 2 e"],
    summands: Float32[Array, "b 2 e"],
    first: Int32[Array, 1],
    *,
    eps: float,
    marked: tuple[int, int] = (0, 0),
    vmem_limit: int,
    interpret: bool = False,
) -> Float[Array, "b e l"]:
    """A layer norm over the features, then a factor and a summand for each.

    Args:
        x: [B, E, L].
        factors, summands: float32 [B, 2, E]: of all other tokens, and of marked ones.
        first: int32 [1]: the index of the first of these tokens in their sequence.
        marked: the marked tokens of the sequence, from one index to before another.
        vmem_limit: bytes of VMEM that the kernel may take.
        interpret: run on the CPU, for tests.

    Returns:
        of the shape and dtype of ``x``; statistics and all else are float32.

    Raises:
        NotImplementedError: tokens or features are no whole lanes, or these too many.
    """
    batch, features, tokens = x.shape
    if features % LANES:
        raise NotImplementedError(f"{features} features are no multiple of {LANES}")
    token_bytes = features * x.dtype.itemsize
    block = tokens_per_block(tokens, token_bytes, vmem_limit)
    whole = pl.BlockSpec((1, features, block), lambda b, t, *_: (b, 0, t))
    starts = first + block * jnp.arange(tokens // block, dtype=jnp.int32)
    some = (starts < marked[1]) & (starts + block > marked[0])
    # Features along the lanes, as they come; the kernel turns them.
    vectors = jnp.concatenate([factors, summands], 1)
    vectors = jnp.pad(vectors, ((0, 0), (0, 8 - vectors.shape[1]), (0, 0)))
    return pl.pallas_call(
        functools.partial(_modulated_body, eps=eps, marked=marked),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, tokens // block),
            in_specs=[
                pl.BlockSpec((1, 8, features), lambda b, t, *_: (b, 0, 0)),
                whole,
            ],
            out_specs=whole,
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"),
            vmem_limit_bytes=4 * block * token_bytes + BESIDE,
        ),
        cost_estimate=pl.CostEstimate(
            flops=8 * x.size, transcendentals=0, bytes_accessed=2 * x.nbytes
        ),
        interpret=interpret,
        name="tpuport_norm_tokens",
    )(starts, some.astype(jnp.int32), vectors, x)


def _modulated_body(
    starts_ref: Any,
    some_ref: Any,
    vectors_ref: Any,
    x_ref: Any,
    out_ref: Any,
    *,
    eps: float,
    marked: tuple[int, int],
) -> None:
    """One block of tokens with all their features."""
    _, features, tokens = x_ref.shape

    def parts(start: Any) -> Iterator[tuple[int, Any, jax.Array]]:
        """Some of ``LANES`` features at a time: offset, place and values."""
        for offset in range(0, LANES, SUBLANES):
            place = pl.ds(pl.multiple_of(start + offset, SUBLANES), SUBLANES)
            yield offset, place, x_ref[0, place].astype(jnp.float32)

    def over(body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """``body`` with the first of every ``LANES`` features."""
        return lax.fori_loop(
            0,
            features // LANES,
            lambda i, held: body(pl.multiple_of(i * LANES, LANES), held),
            carry,
        )

    def mean_of(function: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Over the features, float32 [1, tokens]."""

        def add(start: Any, held: jax.Array) -> jax.Array:
            added = [y[:8] + y[8:] for y in (function(x) for _, _, x in parts(start))]
            # In pairs: one sum after the other would wait for each.
            while len(added) > 1:
                added = [a + b for a, b in zip(added[::2], added[1::2], strict=True)]
            return held + added[0]

        held = over(add, jnp.zeros((8, tokens), jnp.float32))
        return jnp.sum(held, 0, keepdims=True) * (1 / features)

    mean = mean_of(lambda x: x)
    inverse = lax.rsqrt(mean_of(lambda x: jnp.square(x - mean)) + eps)
    block = pl.program_id(1)

    def apply(choose: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
        def one(start: Any, carry: None) -> None:
            # What belongs to a feature lies along the sublanes.
            given = vectors_ref[0, :, pl.ds(start, LANES)].T
            for offset, place, x in parts(start):
                rows = slice(offset, offset + SUBLANES)
                factor = choose(given[rows, 0:1], given[rows, 1:2])
                summand = choose(given[rows, 2:3], given[rows, 3:4])
                y = (x - mean) * inverse * factor + summand
                out_ref[0, place] = y.astype(out_ref.dtype)

        over(one, None)

    def other(unmarked: jax.Array, _: jax.Array) -> jax.Array:
        return unmarked

    def chosen(unmarked: jax.Array, mine: jax.Array) -> jax.Array:
        places = starts_ref[block] + lax.broadcasted_iota(jnp.int32, (1, tokens), 1)
        here = (places >= marked[0]) & (places < marked[1])
        return jnp.where(here, mine, unmarked)

    if marked[0] >= marked[1]:
        apply(other)
        return
    some = some_ref[block] != 0
    pl.when(some)(lambda: apply(chosen))
    pl.when(~some)(lambda: apply(other))


def head_norm_rotary(
    x: Float[Array, "b h d l"],
    vectors: Float32[Array, "own 2 d"],
    cos: Float32[Array, "d l"],
    sin: Float32[Array, "d l"],
    *,
    eps: float,
    centre: bool,
    across: bool = False,
    vmem_limit: int,
    interpret: bool = False,
) -> Float[Array, "b h d l"]:
    """A norm over the features of every head, then a rotation by halves of them.

    Args:
        x: [B, H, D, L].
        vectors: float32 [1, 2, D]: what the norm multiplies by and what it adds; with
            ``across`` [H, 2, D].
        cos, sin: float32 [D, L]; the first half of a head turns with the second.
        centre: take the mean off; without it this is an RMS norm.
        across: an RMS norm over the features of all heads.
        vmem_limit: bytes of VMEM that the kernel may take.
        interpret: run on the CPU, for tests.

    Returns:
        of the shape and dtype of ``x``; all in between is float32.

    Raises:
        NotImplementedError: tokens are no whole lanes, half of D no whole sublanes, or
            a norm of all heads that takes their mean off.
    """
    batch, heads, features, tokens = x.shape
    if features % (2 * SUBLANES):
        raise NotImplementedError(
            f"a head dim of {features} is no multiple of {2 * SUBLANES}"
        )
    if across and centre:
        raise NotImplementedError("a norm of all heads takes no mean off")
    most = heads if across else min(heads, 8)
    each = max(n for n in range(1, most + 1) if heads % n == 0)
    # Beside the heads both tables, float32.
    token_bytes = features * (each * x.dtype.itemsize + 4)
    block = tokens_per_block(tokens, token_bytes, vmem_limit)
    whole = pl.BlockSpec((1, each, features, block), lambda b, t, h: (b, h, 0, t))
    table = pl.BlockSpec((features, block), lambda b, t, h: (0, t))
    return pl.pallas_call(
        functools.partial(_head_body, eps=eps, centre=centre, across=across),
        # Heads last: what rotates them is fetched once for all.
        grid=(batch, tokens // block, heads // each),
        in_specs=[
            pl.BlockSpec((len(vectors), 8, features), lambda b, t, h: (0, 0, 0)),
            table,
            table,
            whole,
        ],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3,
            vmem_limit_bytes=4 * block * token_bytes + BESIDE,
        ),
        cost_estimate=pl.CostEstimate(
            flops=12 * x.size, transcendentals=0, bytes_accessed=2 * x.nbytes
        ),
        interpret=interpret,
        name="tpuport_norm_heads",
        # Features along the lanes, as they come; the kernel turns them.
    )(jnp.pad(vectors, ((0, 0), (0, 6), (0, 0))), cos, sin, x)


def _head_body(
    vectors_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    x_ref: Any,
    out_ref: Any,
    *,
    eps: float,
    centre: bool,
    across: bool,
) -> None:
    """Some heads of one block of tokens."""
    _, heads, features, tokens = x_ref.shape
    half = features // 2
    of_all: Any = None
    if across:

        def add(head: Any, held: jax.Array) -> jax.Array:
            square = jnp.square(x_ref[0, head].astype(jnp.float32))
            return held + square.reshape(-1, 8, tokens).sum(0)

        held = lax.fori_loop(0, heads, add, jnp.zeros((8, tokens), jnp.float32))
        of_all = jnp.sum(held, 0, keepdims=True) * (1 / (heads * features))

    def turn(head: Any, columns: Any, factor: jax.Array, summand: jax.Array) -> None:
        x = x_ref[0, head, :, columns].astype(jnp.float32)
        if centre:
            x = x - jnp.mean(x, 0, keepdims=True)
        if across:
            power = of_all[:, columns]
        else:
            power = jnp.mean(jnp.square(x), 0, keepdims=True)
        x = x * lax.rsqrt(power + eps) * factor + summand
        cos, sin = cos_ref[:, columns], sin_ref[:, columns]
        turned = (
            x[:half] * cos[:half] - x[half:] * sin[:half],
            x[half:] * cos[half:] + x[:half] * sin[half:],
        )
        for start, y in zip((0, half), turned, strict=True):
            out_ref[0, head, start : start + half, columns] = y.astype(out_ref.dtype)

    def one(head: Any, carry: None) -> None:
        # What belongs to a feature lies along the sublanes.
        given = vectors_ref[head if across else 0].T
        for start in range(0, tokens, LANES):
            turn(head, slice(start, start + LANES), given[:, 0:1], given[:, 1:2])

    lax.fori_loop(0, heads, one, None)
