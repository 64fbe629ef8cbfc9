"""Attention on arrays with the head dim before the tokens, as a TPU has them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.attention.oracle import (
    Case,
    compiled,
    inputs,
    numpy_attention,
    worst,
)
from tests.tolerances import TOLERANCES
from tpuport.kernels.attention.attention import attention_feature_major
from tpuport.kernels.attention.choice import AttentionChoice
from tpuport.kernels.attention.splash import (
    SplashBlocks,
    splash_feature_major,
    splash_in_parts,
)


@pytest.mark.parametrize(
    "implementation",
    [
        *("splash", "reference", "blockwise"),
        AttentionChoice(name="splash", k_smooth=True),
        AttentionChoice(name="reference", k_smooth=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_len", [None, 300])
def test_every_implementation_counts_the_same_keys(
    implementation: str | AttentionChoice, kv_len: int | None
) -> None:
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=400))
    want = numpy_attention(q, k[:, :, :kv_len], v[:, :, :kv_len])
    got = compiled(
        attention_feature_major,
        *(x.swapaxes(2, 3) for x in (q, k, v)),
        kv_len=kv_len,
        platform="cpu",
        implementation=implementation,
        interpret=True,
    )
    assert worst(got, want.swapaxes(2, 3)) < TOLERANCES["attention float32"]


def test_tokens_in_parts_are_as_if_joined() -> None:
    """Three arrays; the tokens from 1,400 on do not count."""
    count = 1400
    numbers = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(numbers.normal(size=(3, 2, 2, 32, 512)), jnp.float32)
        for _ in range(3)
    )
    v = v * (jnp.arange(1536).reshape(3, 1, 1, 1, 512) < count)
    blocks = SplashBlocks(q=256, kv=512, kv_compute=256)
    options: dict[str, Any] = {"kv_len": count, "hidden": True, "interpret": True}
    found = splash_in_parts(q, k, v, blocks=blocks, **options)
    joined = (jnp.concatenate(list(x), 3) for x in (q, k, v))
    expected = splash_feature_major(*joined, blocks=blocks, **options)
    assert (jnp.concatenate(list(found), 3) == expected).all()
