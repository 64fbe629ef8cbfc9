"""Attention on arrays with the head dim before the tokens, as a TPU has them."""

from __future__ import annotations

import math
from typing import Any

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
from tpuport.kernels.attention.splash import SplashBlocks, splash_feature_major

LN_2 = math.log(2)
BLOCKS = SplashBlocks(q=128, kv=256, kv_compute=128)
# Keys that count of each item; the rest are finite in k and zero in v.
COUNTS = (300, 130)
KEYS = 512


def hidden_case() -> tuple[list[Any], np.ndarray]:
    """q, k, v [2, 2, 64, L] with keys past the counts hidden, and the result."""
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=KEYS))
    want = numpy_attention(q, k, v, kv_lengths=np.asarray(COUNTS))
    dead = (np.arange(KEYS) >= np.asarray(COUNTS)[:, None])[:, None, :, None]
    k, v = np.where(dead, np.float32(3), k), np.where(dead, np.float32(0), v)
    return [x.swapaxes(2, 3) for x in (q, k, v)], want.swapaxes(2, 3)


def test_keys_that_the_caller_has_hidden() -> None:
    arrays, want = hidden_case()
    got = compiled(
        splash_feature_major,
        *arrays,
        kv_lengths=np.asarray(COUNTS),
        hidden=True,
        blocks=BLOCKS,
        interpret=True,
    )
    assert worst(got, want) < TOLERANCES["attention float32"]


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
