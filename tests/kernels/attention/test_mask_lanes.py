"""Masks that are alike for all queries, as lanes of the keys, against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.attention.oracle import Case, inputs, numpy_attention, worst
from tests.tolerances import TOLERANCES
from tpuport.kernels.attention.attention import attention
from tpuport.kernels.attention.mask_lanes import masks_keys, with_mask_lanes

CASES = [
    Case(q_len=65, kv_len=300, head_dim=128, mask="bool bk", heads=4),
    Case(q_len=65, kv_len=300, mask="float hk", scale=-0.3),
    Case(q_len=65, kv_len=300, mask="float bk dead"),
    Case(q_len=65, kv_len=300, mask="bool bk dead"),
    Case(q_len=65, kv_len=300, mask="float bk", dtype="bfloat16"),
]


def attend(case: Case, implementation: str, mask: Any, arrays: Any) -> Any:
    """As a program: a compiler may take a cast and the cast back for nothing."""

    @jax.jit
    def run(arrays: Any, mask: Any) -> Any:
        scale = case.scale or case.head_dim**-0.5
        assert masks_keys(*arrays, mask, scale)
        q, k, v = with_mask_lanes(*arrays, mask, scale)
        options: Any = {"platform": "tpu", "interpret": True, "scale": scale}
        return attention(q, k, v, implementation=implementation, **options)

    return run(arrays, mask)


@pytest.mark.parametrize("implementation", ["splash", "reference"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lanes_are_the_mask(case: Case, implementation: str) -> None:
    arrays, options = inputs(case)
    found = attend(case, implementation, options["mask"], arrays)
    want = numpy_attention(*arrays, **options)
    assert worst(found, want) < TOLERANCES[f"attention {case.dtype}"]


def test_a_key_that_may_not_be_seen_counts_for_nothing_however_alike() -> None:
    case = Case(q_len=5, kv_len=40, mask="bool bk")
    arrays, options = inputs(case)
    hidden = ~np.broadcast_to(options["mask"], (2, 1, 1, 40))[:, :, 0]
    arrays[1][np.broadcast_to(hidden, (2, 2, 40))] *= 100
    for mask in (options["mask"], np.where(options["mask"], 0, -10000).astype("f")):
        found = attend(case, "splash", mask, arrays)
        want = numpy_attention(*arrays, **options)
        assert worst(found, want) < TOLERANCES["attention float32"]


@pytest.mark.parametrize(
    ("shape", "scale", "told"),
    [
        ((1, 1, 1, 7), 0.5, True),
        ((2, 2, 1, 1), 0.5, True),
        ((1, 1, 5, 7), 0.5, False),
        ((1, 4, 1, 7), 0.5, False),
        ((1, 7), 0.5, False),
        ((1, 1, 1, 7), 0.0, False),
    ],
)
def test_which_masks_lanes_can_hold(
    shape: tuple[int, ...], scale: float, told: bool
) -> None:
    arrays, _ = inputs(Case(q_len=5, kv_len=7, heads=4))
    mask = jnp.ones(shape, bool)
    assert masks_keys(*map(jnp.asarray, arrays), mask, scale) == told
