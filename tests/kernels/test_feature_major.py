"""Attention on arrays with the head dim before the tokens, as a TPU has them."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.oracle import Case, inputs, numpy_attention, worst
from tests.tolerances import TOLERANCES
from tpuport.kernels.attention import attention_feature_major
from tpuport.kernels.splash import SplashBlocks, splash_feature_major
from tpuport.kernels.splash_bounds import MOST_GIVEN

LN_2 = math.log(2)
BLOCKS = SplashBlocks(q=128, kv=256, kv_compute=128)
# Keys that count of each item; the rest are finite in k and zero in v.
COUNTS = (300, 130)
KEYS = 512


def hidden_case() -> tuple[list[Any], np.ndarray]:
    """q, k, v [2, 2, 64, L] with keys past the counts hidden, and the result."""
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=KEYS))
    want = numpy_attention(q, k, v, kv_lengths=np.asarray(COUNTS))
    dead = (jnp.arange(KEYS) >= jnp.asarray(COUNTS)[:, None])[:, None, :, None]
    k, v = jnp.where(dead, 3.0, k), jnp.where(dead, 0.0, v)
    return [x.swapaxes(2, 3) for x in (q, k, v)], want.swapaxes(2, 3)


@pytest.mark.parametrize("bound", [None, 5.0, 1e4])
def test_keys_that_the_caller_has_hidden(bound: float | None) -> None:
    arrays, want = hidden_case()
    got = splash_feature_major(
        *arrays,
        kv_lengths=jnp.asarray(COUNTS),
        hidden=True,
        score_bound=None if bound is None else jnp.float32(bound),
        blocks=BLOCKS,
        interpret=True,
    )
    assert worst(got, want) < TOLERANCES["attention float32"]


def test_a_bound_beyond_what_may_be_given_is_not_trusted() -> None:
    # Scores of several hundred: without a maximum they overflow.
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=300), size=10.0)
    want = numpy_attention(q, k, v).swapaxes(2, 3)
    arrays = [x.swapaxes(2, 3) for x in (q, k, v)]

    def run(bound: float, **options: Any) -> Any:
        return splash_feature_major(
            *arrays,
            score_bound=jnp.float32(bound),
            blocks=BLOCKS,
            interpret=True,
            **options,
        )

    assert worst(run(1e4), want) < TOLERANCES["attention float32 large scores"]
    assert not bool(jnp.isfinite(run(1.0)).all())
    # It is of scores as the softmax has them; the kernel's are powers of two, and keys
    # less their mean may be twice as long.
    for smooth, most in ((False, MOST_GIVEN * LN_2), (True, MOST_GIVEN * LN_2 / 2)):
        trusted, beyond = (run(most * x, k_smooth=smooth) for x in (0.99, 1.01))
        assert not bool(jnp.isfinite(trusted).all())
        assert worst(beyond, want) < TOLERANCES["attention float32 large scores"]


@pytest.mark.parametrize("implementation", ["splash", "reference", "blockwise"])
@pytest.mark.parametrize("kv_len", [None, 300])
def test_every_implementation_counts_the_same_keys(
    implementation: str, kv_len: int | None
) -> None:
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=400))
    want = numpy_attention(q, k[:, :, :kv_len], v[:, :, :kv_len])
    got = attention_feature_major(
        *(x.swapaxes(2, 3) for x in (q, k, v)),
        kv_len=kv_len,
        platform="cpu",
        implementation=implementation,
        interpret=True,
    )
    assert worst(got, want.swapaxes(2, 3)) < TOLERANCES["attention float32"]
