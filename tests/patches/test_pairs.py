"""Pairs of neighbours are moved exactly, by products of zeros and ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.patches.tools import found_by
from tpuport.core.arrays import to_torch
from tpuport.core.tracing.context import OpContext
from tpuport.patches.pairs import (
    FEWEST_TOKENS,
    MOST,
    PAIRS,
    are_heads,
    heads_apart,
    on_lanes,
    put_together,
    taken_apart,
)


def pairs(dtype: Any) -> jax.Array:
    # As many digits as the dtype has.
    return jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 2)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_move_pairs_bit_for_bit(dtype: str) -> None:
    x = pairs(dtype)
    first, second = taken_apart(x)
    assert (first == x[..., 0]).all()
    assert (second == x[..., 1]).all()
    assert (put_together([first, second]) == x).all()
    assert first.dtype == x.dtype


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_torch_code_gets_what_torch_gives(platform: str) -> None:
    """Also what is no pair: other dims, three parts, integers."""

    def rotate(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, other = x.unflatten(-1, (-1, 2)).unbind(-1)
        rows = torch.stack(x.unbind(0), dim=1)
        three = torch.stack([one, one, other], dim=-1)
        even, _ = ids.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([-other, one], dim=-1).flatten(2), rows, three, even

    x, ids = torch.randn(2, 3, 8), torch.arange(8).reshape(1, 1, 8)
    found = found_by(rotate, x, ids, platform=platform, overrides=PAIRS)
    for one, other in zip(found, rotate(x, ids), strict=True):
        assert torch.equal(one.to(other.dtype), other)


def test_products_are_for_pairs_on_a_tpu() -> None:
    assert on_lanes("tpu", (4, 64, 2), jnp.bfloat16)
    assert not on_lanes("cpu", (4, 64, 2), jnp.bfloat16)
    assert not on_lanes("tpu", (4, 64, 3), jnp.bfloat16)
    assert not on_lanes("tpu", (4, MOST + 1, 2), jnp.bfloat16)
    assert not on_lanes("tpu", (4, 64, 2), jnp.int32)


def test_heads_are_taken_apart_bit_for_bit() -> None:
    x = torch.randn(2, 5, 3 * 128)
    found = heads_apart(jnp.asarray(x.numpy()), 3)
    assert torch.equal(to_torch(found), x.unflatten(-1, (3, 128)))


def test_views_that_make_heads() -> None:
    tokens = FEWEST_TOKENS
    context = OpContext(mesh=None, platform="tpu", records=[])
    assert are_heads(context, (1, tokens, 512), (1, tokens, 4, 128))
    assert not are_heads(context, (1, tokens, 512), (1, tokens, 8, 64))
    assert not are_heads(context, (1, tokens - 1, 512), (1, tokens - 1, 4, 128))
    assert not are_heads(context, (2, tokens, 512), (1, 2 * tokens, 4, 128))
    assert not are_heads(
        replace(context, platform="cpu"), (1, tokens, 512), (1, tokens, 4, 128)
    )
