"""Norms of tokens and of heads in interpret mode, against float64."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.sweeps import sweep
from tests.tolerances import TOLERANCES
from tpuport.kernels.norms.token_norm import (
    BESIDE,
    head_norm_rotary,
    modulated_layer_norm,
    tokens_per_block,
)

LIMIT = 100 * 2**20
OPTIONS: dict[str, Any] = {"eps": 1e-5, "vmem_limit": LIMIT, "interpret": True}
#: Of which 384 tokens make three blocks.
SMALL = BESIDE + 4 * 128 * 256 * 4
EPS = OPTIONS["eps"]


def normals(*shape: int, mean: float = 0.0) -> np.ndarray:
    """Reproducible normals, as float32 has them."""
    made = np.random.default_rng(math.prod(shape)).normal(mean, 1.0, shape)
    return made.astype(np.float32).astype(np.float64)


def normed(x: np.ndarray, axis: int, centre: bool = True) -> np.ndarray:
    """The norm by itself, in float64."""
    centred = x - x.mean(axis, keepdims=True) if centre else x
    return centred / np.sqrt((centred**2).mean(axis, keepdims=True) + EPS)


def of_tokens(
    x: np.ndarray, vectors: np.ndarray, first: int, marked: tuple[int, int]
) -> np.ndarray:
    """What :func:`modulated_layer_norm` should give; ``vectors`` [2, B, 2, E]."""
    places = first + np.arange(x.shape[2])
    mine = ((places >= marked[0]) & (places < marked[1]))[None, None]
    factor, summand = (
        np.where(mine, pair[:, 1, :, None], pair[:, 0, :, None]) for pair in vectors
    )
    return normed(x, 1) * factor + summand


# None, in the first block, over the edge of two, in no block of these, all.
MARKED = [
    (0, (0, 0)),
    (0, (0, 70)),
    (256, (300, 420)),
    (384, (0, 384)),
    (128, (100, 600)),
]


@pytest.mark.parametrize(
    ("first", "marked", "limit"),
    sweep(
        [*((*one, SMALL) for one in MARKED), (*MARKED[2], LIMIT)],
        ((*one, limit) for one in MARKED for limit in (SMALL, LIMIT)),
    ),
)
def test_tokens_are_normed_and_take_their_own_vectors(
    first: int, marked: tuple[int, int], limit: int
) -> None:
    blocks = 384 // tokens_per_block(384, 256 * 4, limit)
    assert blocks == (3 if limit == SMALL else 1)
    x, vectors = normals(2, 256, 384, mean=3.0), normals(2, 2, 2, 256)
    options = OPTIONS | {"marked": marked, "vmem_limit": limit}
    call = functools.partial(modulated_layer_norm, **options)
    found = jax.jit(call)(
        *(array.astype(np.float32) for array in (x, *vectors)),
        np.asarray([first], np.int32),
    )
    error = np.abs(found - of_tokens(x, vectors, first, marked)).max()
    assert error <= TOLERANCES["norm float32"]


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    x = normals(1, 256, 128, mean=1000.0)
    ones, zeros = np.ones((1, 2, 256)), np.zeros((1, 2, 256))
    found = modulated_layer_norm(
        *(jnp.asarray(array, jnp.float32) for array in (x, ones, zeros)),
        jnp.zeros(1, jnp.int32),
        **OPTIONS,
    )
    error = np.abs(found - normed(x, 1)).max()
    assert error <= TOLERANCES["norm float32 large mean"]


# As many heads as a step takes, more, and a number that no step divides evenly.
@pytest.mark.parametrize(
    ("heads", "over"),
    sweep(
        [(1, "centred"), (11, "each"), (16, "centred"), (11, "all")],
        itertools.product([1, 11, 16], ["centred", "each", "all"]),
    ),
)
def test_heads_are_normed_and_rotated(heads: int, over: str) -> None:
    centre, across = over == "centred", over == "all"
    x = normals(2, heads, 64, 256, mean=0.5)
    vectors = normals(heads if across else 1, 2, 64)
    cos, sin = normals(64, 256), normals(256, 64).T
    call = functools.partial(head_norm_rotary, centre=centre, across=across, **OPTIONS)
    found = jax.jit(call)(
        *(array.astype(np.float32) for array in (x, vectors, cos, sin))
    )
    y = normed(x, (1, 2) if across else 2, centre)
    y = y * vectors[:, 0, :, None] + vectors[:, 1, :, None]
    first, second = y[:, :, :32], y[:, :, 32:]
    turned = np.concatenate(
        [
            first * cos[:32] - second * sin[:32],
            second * cos[32:] + first * sin[32:],
        ],
        2,
    )
    assert np.abs(found - turned).max() <= TOLERANCES["norm float32"]


def test_bfloat16_is_rounded_once() -> None:
    x = jnp.asarray(normals(1, 2, 64, 128), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    ones = jnp.ones((64, 128), jnp.float32)
    vectors = jnp.stack([ones[:, 0], 0 * ones[:, 0]])[None]
    heads = head_norm_rotary(x, vectors, ones, 0 * ones, centre=True, **OPTIONS)
    assert heads.dtype == jnp.bfloat16
    tokens = modulated_layer_norm(
        x.reshape(1, 128, 128),
        *(jnp.full((1, 2, 128), value, jnp.float32) for value in (1, 0)),
        jnp.zeros(1, jnp.int32),
        **OPTIONS,
    )
    assert tokens.dtype == jnp.bfloat16
    whole = normed(wide.reshape(1, 128, 128), 1)
    for found, want in ((heads, normed(wide, 2)), (tokens, whole)):
        # Half a unit in the last place of 8 bits.
        apart = np.abs(np.asarray(found, np.float64) - want)
        assert (apart <= np.abs(want) * 2.0**-8 + TOLERANCES["norm float32"]).all()


@pytest.mark.parametrize(
    ("tokens", "features", "limit", "why"),
    [
        (200, 256, LIMIT, "200 tokens are no multiple of 128"),
        (256, 192, LIMIT, "192 features are no multiple of 128"),
        (256, 4096, BESIDE + 2**20, "do not fit"),
    ],
)
def test_what_the_kernel_cannot_it_refuses(
    tokens: int, features: int, limit: int, why: str
) -> None:
    vectors = jnp.zeros((1, 2, features), jnp.float32)
    with pytest.raises(NotImplementedError, match=why):
        modulated_layer_norm(
            jnp.zeros((1, features, tokens), jnp.float32),
            vectors,
            vectors,
            jnp.zeros(1, jnp.int32),
            **OPTIONS | {"vmem_limit": limit},
        )


@pytest.mark.parametrize(
    ("features", "tokens", "why"),
    [
        (48, 128, "a head dim of 48 is no multiple of 32"),
        (64, 130, "130 tokens are no multiple of 128"),
    ],
)
def test_heads_that_the_kernel_cannot_take(
    features: int, tokens: int, why: str
) -> None:
    table = jnp.zeros((features, tokens), jnp.float32)
    with pytest.raises(NotImplementedError, match=why):
        head_norm_rotary(
            jnp.zeros((1, 2, features, tokens), jnp.float32),
            jnp.zeros((1, 2, features), jnp.float32),
            table,
            table,
            centre=True,
            **OPTIONS,
        )


def test_blocks_are_the_largest_divisors_that_fit() -> None:
    # The lengths of both models on eight chips, at 720p.
    assert tokens_per_block(9984, 3072 * 2, LIMIT) == 768
    assert tokens_per_block(28160, 2048 * 2, LIMIT) == 640
    assert tokens_per_block(9984, 3072 * 4, LIMIT) == 384
    assert tokens_per_block(128, 3072 * 2, LIMIT) == 128
    # Four of 4.5 MiB do not fit here; two bytes for 384 tokens do.
    assert tokens_per_block(9984, 3072 * 2, 16 << 20) == 384
