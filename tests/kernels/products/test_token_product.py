"""Products of large weights in interpret mode, against float64."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tolerances import TOLERANCES
from tpuport.kernels.products.token_product import (
    BESIDE,
    gated_token_product,
    token_product,
)

LIMIT = 100 * 2**20
#: In which a piece is one chunk of rows.
SMALL = BESIDE + (4 << 20)


def drawn(*shape: int, scale: float = 1.0) -> jax.Array:
    made = np.random.default_rng(math.prod(shape)).normal(0.0, scale, shape)
    return jnp.asarray(made, jnp.bfloat16)


def exact(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


def close(found: jax.Array, truth: np.ndarray) -> bool:
    """Within the rounding of the result."""
    error = np.abs(exact(found) - truth) / np.maximum(np.abs(truth), 1)
    return bool(error.max() <= TOLERANCES["product bfloat16"])


def product(weight: jax.Array, x: jax.Array, bias: jax.Array) -> np.ndarray:
    """``weight x + bias`` in float64."""
    found = np.einsum("fe,bel->bfl", exact(weight), exact(x))
    return found + exact(bias)[:, None]


# Chunks of a piece: three, two, two of two pieces, one, one of two pieces. Blocks of
# 768, 512, 256 and 128 tokens.
SIZES = [
    ((1536, 384), 768, LIMIT),
    ((1280, 256), 1024, LIMIT),
    ((2048, 128), 256, LIMIT),
    ((256, 128), 640, LIMIT),
    ((768, 256), 512, SMALL),
]


@pytest.mark.parametrize(("weight", "tokens", "limit"), SIZES)
def test_all_tokens_meet_all_rows(
    weight: tuple[int, int], tokens: int, limit: int
) -> None:
    rows, features = weight
    w, x = drawn(rows, features, scale=features**-0.5), drawn(2, features, tokens)
    bias = drawn(rows).astype(jnp.float32)
    call = functools.partial(token_product, vmem_limit=limit, interpret=True)
    found = jax.jit(call)(w, x, bias)
    assert found.dtype == jnp.bfloat16
    truth = product(w, x, bias)
    assert close(found, truth)
    active = jax.jit(functools.partial(call, activation=jax.nn.relu))(w, x, bias)
    assert close(active, np.maximum(truth, 0))


# No token is marked, some of one block, some of two, all.
@pytest.mark.parametrize("marked", [(0, 0), (140, 300), (300, 700), (0, 2000)])
def test_each_token_takes_its_own_gate(marked: tuple[int, int]) -> None:
    w, x, residual = drawn(768, 256, scale=0.05), drawn(2, 256, 512), drawn(2, 768, 512)
    bias, gates = drawn(768).astype(jnp.float32), drawn(2, 2, 768).astype(jnp.float32)
    call = functools.partial(
        gated_token_product, marked=marked, vmem_limit=SMALL, interpret=True
    )
    found = jax.jit(call)(w, x, bias, residual, gates, jnp.asarray([128], jnp.int32))
    places = 128 + np.arange(512)
    mine = (places >= marked[0]) & (places < marked[1])
    other, text = exact(gates).swapaxes(0, 1)[..., None]
    gate = np.where(mine, text, other)
    assert close(found, exact(residual) + gate * product(w, x, bias))


@pytest.mark.parametrize(
    ("weight", "tokens", "limit", "dtype", "said"),
    [
        ((256, 128), 100, LIMIT, jnp.bfloat16, "100 tokens"),
        ((200, 128), 128, LIMIT, jnp.bfloat16, "200 x 128"),
        ((256, 100), 128, LIMIT, jnp.bfloat16, "256 x 100"),
        ((256, 4096), 512, SMALL, jnp.bfloat16, "too many"),
        ((256, 128), 128, LIMIT, jnp.float32, "float32"),
    ],
)
def test_other_sizes_are_refused(
    weight: tuple[int, int], tokens: int, limit: int, dtype: jnp.dtype, said: str
) -> None:
    w, x = jnp.zeros(weight, dtype), jnp.zeros((1, weight[1], tokens), dtype)
    with pytest.raises(NotImplementedError, match=said):
        token_product(w, x, jnp.zeros(weight[0]), vmem_limit=limit, interpret=True)
