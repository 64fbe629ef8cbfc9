"""Every implementation against float64, on the same cases, and against each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
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
from tests.sweeps import swept
from tests.tolerances import TOLERANCES
from tpuport.kernels.attention.blockwise import Tiling, blockwise_attention
from tpuport.kernels.attention.reference import reference_attention
from tpuport.kernels.attention.splash import SplashBlocks, splash_attention

Attention = Callable[..., jax.Array]

# Small blocks, so that short inputs run over several of them, the last one partial.
SMALL = Tiling(block_q=64, block_kv=96)
BLOCKS = SplashBlocks(q=128, kv=256, kv_compute=128)

MASKING: dict[str, Attention] = {
    "reference": reference_attention,
    "blockwise": partial(blockwise_attention, tiling=SMALL),
}
ALL: dict[str, Attention] = {
    **MASKING,
    "splash": partial(splash_attention, blocks=BLOCKS, interpret=True),
}
# Keys in the last of the blocks of 3072 at 39826 tokens, by the small blocks of 256.
REST = 39826 % 3072 % 256 + 256

# Each has a program of its own, so that one case may have several things in it.
PLAIN = [
    Case(q_len=1, kv_len=1),
    Case(q_len=127, kv_len=127, scale=0.0),
    Case(q_len=300, kv_len=1, head_dim=48),
    Case(q_len=128, kv_len=256, head_dim=128),
    Case(q_len=129, kv_len=REST, head_dim=40, scale=0.3, batch=1),
    Case(q_len=129, kv_len=129, head_dim=48, v_dim=80, scale=-0.3),
    Case(q_len=127, kv_len=300, head_dim=128, heads=6, kv_heads=2),
    Case(q_len=127, kv_len=129, head_dim=256, batch=1, heads=1, kv_heads=1),
    Case(q_len=300, kv_len=300, head_dim=80, lengths=(0, 140), is_causal=True, heads=4),
    Case(q_len=300, kv_len=129, head_dim=48, lengths=(0, 100), is_causal=True, heads=4),
    # Of the sizes of other tests.
    Case(q_len=129, kv_len=600),
    Case(q_len=129, kv_len=600, is_causal=True),
    *(
        Case(q_len=129, kv_len=600, lengths=lengths)
        for lengths in ((0, 150), (1, 600), (256, 255), (512, 513), (3, 599), (600, 0))
    ),
]
PLAIN_SWEEP = [
    *(Case(q_len=n, kv_len=n) for n in (127, 129, 300)),
    Case(q_len=1031, kv_len=1031, batch=1),
    Case(q_len=129, kv_len=300, head_dim=80),
    Case(q_len=127, kv_len=129, head_dim=160, batch=1),
    Case(q_len=127, kv_len=300, heads=4, kv_heads=1),
    Case(q_len=300, kv_len=300, is_causal=True, heads=4),
    Case(q_len=129, kv_len=600, is_causal=True, head_dim=128),
    Case(q_len=300, kv_len=300, lengths=(1, 300), head_dim=128),
    Case(q_len=129, kv_len=600, lengths=(512, 513), heads=4),
    Case(q_len=129, kv_len=129, scale=0.3),
    Case(q_len=129, kv_len=129, scale=0.0),
]
MASKED = [
    Case(q_len=127, kv_len=300, mask="bool bhqk"),
    Case(q_len=127, kv_len=300, mask="float bhqk"),
    Case(q_len=127, kv_len=300, mask="bool bk", heads=4),
    Case(q_len=127, kv_len=300, mask="float h", heads=6),
    Case(q_len=127, kv_len=129, mask="bool q", is_causal=True),
    Case(q_len=127, kv_len=300, mask="bool hqk dead", lengths=(0, 200)),
    Case(q_len=127, kv_len=300, mask="float bq dead", is_causal=True),
    Case(q_len=127, kv_len=300, mask="float qk dead", lengths=(300, 97)),
    Case(q_len=127, kv_len=300, heads=6, kv_heads=2, mask="float hk"),
]
MASKED_SWEEP = [
    Case(q_len=127, kv_len=300, mask="float hq"),
    Case(q_len=127, kv_len=129, mask="float qk"),
    Case(q_len=129, kv_len=130, mask="float q dead"),
]


def run(name: str, *arrays: Any, **options: Any) -> jax.Array:
    return compiled(ALL[name], *arrays, **options)


@pytest.mark.parametrize("case", [*PLAIN, *map(swept, PLAIN_SWEEP)], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_equals_the_formula_in_float64(name: str, case: Case) -> None:
    arrays, options = inputs(case)
    got = run(name, *arrays, **options)
    assert got.dtype == jnp.float32
    want = numpy_attention(*arrays, **options)
    assert worst(got, want) < TOLERANCES["attention float32"]
    for item, length in enumerate(case.lengths or ()):
        assert length or not np.asarray(got)[item].any()  # without keys exactly zero


@pytest.mark.parametrize(
    ("length", "is_causal"),
    [(129, True), (1031, False), swept(129, False), swept(1031, True)],
)
def test_default_block_sizes(length: int, is_causal: bool) -> None:
    case = Case(q_len=length, kv_len=length, batch=1, is_causal=is_causal)
    arrays, options = inputs(case)
    got = compiled(blockwise_attention, *arrays, **options)
    want = numpy_attention(*arrays, **options)
    assert worst(got, want) < TOLERANCES["attention float32"]


@pytest.mark.parametrize("case", [*MASKED, *map(swept, MASKED_SWEEP)], ids=str)
@pytest.mark.parametrize("name", MASKING)
def test_masks_equal_the_formula_in_float64(name: str, case: Case) -> None:
    arrays, options = inputs(case)
    got = run(name, *arrays, **options)
    want = numpy_attention(*arrays, **options)
    assert worst(got, want) < TOLERANCES["attention float32"]
    if "dead" in str(case.mask):
        # A query without keys gives zero.
        np.testing.assert_array_equal(got[:, :, 0], 0)


SCALED = "attention bfloat16 scaled q"


@pytest.mark.parametrize(
    ("name", "head_dim", "tolerance"),
    [
        *((name, 64, "attention bfloat16") for name in ALL),
        *(swept(name, 128, SCALED) for name in MASKING),
        # The kernel does not round q again, whatever the scale.
        *(("splash", n, "attention bfloat16") for n in (40, 128)),
        swept("splash", 80, "attention bfloat16"),
    ],
)
def test_bfloat16_in_bfloat16_out(name: str, head_dim: int, tolerance: str) -> None:
    case = Case(
        q_len=129, kv_len=600, head_dim=head_dim, lengths=(600, 77), dtype="bfloat16"
    )
    arrays, options = inputs(case)
    got = run(name, *arrays, **options)
    assert got.dtype == jnp.bfloat16
    assert worst(got, numpy_attention(*arrays, **options)) < TOLERANCES[tolerance]


@pytest.mark.parametrize("name", MASKING)
def test_bfloat16_is_rounded_once_at_the_end(name: str) -> None:
    # The best bfloat16 result is the exact one rounded. Summing in bfloat16 on the
    # way would leave more than this many entries elsewhere.
    arrays, options = inputs(Case(q_len=129, kv_len=300, dtype="bfloat16"))
    got = np.asarray(run(name, *arrays, **options))
    best = numpy_attention(*arrays, **options).astype(got.dtype)
    assert float(np.mean(got != best)) < 0.01


@pytest.mark.parametrize("name", MASKING)
def test_a_mask_of_the_lowest_float_spreads_the_weight_evenly(name: str) -> None:
    # How transformers writes masks: not -inf. torch then averages all values.
    arrays, _ = inputs(Case(q_len=5, kv_len=130))
    mask = np.full((1, 1, 1, 130), np.finfo(np.float32).min, np.float32)
    got = run(name, *arrays, mask=mask)
    want = np.mean(np.asarray(arrays[2], np.float64), 2, keepdims=True)
    want = np.broadcast_to(want, got.shape)
    assert worst(got, want) < TOLERANCES["attention float32"]


@pytest.mark.parametrize("name", ALL)
def test_keys_that_do_not_count_leave_no_trace(name: str) -> None:
    # The neighbours of the valid keys point exactly along the queries: any leak of a
    # masked key takes all the weight.
    case = Case(q_len=129, kv_len=600, lengths=(131, 131))
    (q, k, v), options = inputs(case)
    want = numpy_attention(q, k[:, :, :131], v[:, :, :131])
    k[:, :, 131:] = 100 * q[:, :, :1]
    v[:, :, 131:] = 1e6
    got = run(name, q, k, v, **options)
    assert worst(got, want) < TOLERANCES["attention float32"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("reach", [0.5, 2])
def test_padding_takes_no_weight_from_very_negative_scores(
    name: str, reach: float
) -> None:
    # Every score is about -25, or -120: a padded key with score 0 would win outright.
    (q, k, v), options = inputs(Case(q_len=129, kv_len=600))
    q, k = np.abs(q) + np.float32(reach), -np.abs(k) - np.float32(reach)
    got, want = run(name, q, k, v, **options), numpy_attention(q, k, v, **options)
    assert worst(got, want) < TOLERANCES["attention float32 large scores"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("is_causal", [False, True])
def test_large_norms(name: str, is_causal: bool) -> None:
    # Scores reach several hundred: exp of them overflows, exp of their difference
    # must not.
    case = Case(q_len=129, kv_len=600, is_causal=is_causal)
    arrays, options = inputs(case, size=10.0)
    got, want = run(name, *arrays, **options), numpy_attention(*arrays, **options)
    assert worst(got, want) < TOLERANCES["attention float32 large scores"]


@pytest.mark.parametrize("name", ALL)
def test_a_nan_is_not_hidden(name: str) -> None:
    (q, k, v), options = inputs(Case(q_len=129, kv_len=600))
    q[0, 0, 3, 0] = np.nan
    got = np.asarray(run(name, q, k, v, **options))
    assert np.isnan(got[0, 0, 3]).all()
    assert not np.isnan(got[1]).any()
