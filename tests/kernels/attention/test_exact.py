"""Every implementation against float64, on the same cases, and against each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.attention.oracle import Case, inputs, numpy_attention, worst
from tests.tolerances import TOLERANCES
from tpuport.kernels.attention.blockwise import Tiling, blockwise_attention
from tpuport.kernels.attention.reference import reference_attention

Attention = Callable[..., jax.Array]

# Small blocks, so that short inputs run over several of them, the last one partial.
SMALL = Tiling(heads=1, block_q=64, block_kv=96)

ALL: dict[str, Attention] = {
    "reference": reference_attention,
    "blockwise": partial(blockwise_attention, tiling=SMALL),
}

PLAIN = [
    *(Case(q_len=n, kv_len=n) for n in (1, 127, 129, 300)),
    Case(q_len=1031, kv_len=1031, batch=1),
    Case(q_len=129, kv_len=300, head_dim=128),
    Case(q_len=300, kv_len=1, head_dim=48),
    Case(q_len=127, kv_len=129, head_dim=160, batch=1),
    Case(q_len=128, kv_len=256, head_dim=128),
    Case(q_len=300, kv_len=129, heads=6, kv_heads=2, head_dim=48),
    Case(q_len=127, kv_len=300, heads=4, kv_heads=1),
    Case(q_len=300, kv_len=300, is_causal=True),
    Case(q_len=129, kv_len=300, is_causal=True, head_dim=128),
    Case(q_len=300, kv_len=129, is_causal=True, heads=4, head_dim=48),
    Case(q_len=129, kv_len=300, lengths=(0, 150)),
    Case(q_len=300, kv_len=300, lengths=(1, 300), head_dim=128),
    Case(q_len=300, kv_len=256, lengths=(256, 255), heads=4),
    Case(q_len=300, kv_len=300, lengths=(0, 140), is_causal=True, head_dim=48),
    Case(q_len=129, kv_len=129, scale=0.3),
    Case(q_len=129, kv_len=129, scale=0.0),
]
MASKED = [
    Case(q_len=127, kv_len=300, mask="bool bhqk"),
    Case(q_len=127, kv_len=300, mask="float bhqk"),
    Case(q_len=127, kv_len=300, mask="bool bk", heads=4),
    Case(q_len=127, kv_len=300, mask="float hq"),
    Case(q_len=127, kv_len=300, mask="float h", heads=6),
    Case(q_len=127, kv_len=129, mask="float qk"),
    Case(q_len=127, kv_len=129, mask="bool q", is_causal=True),
    Case(q_len=127, kv_len=300, mask="bool hqk dead", lengths=(0, 200)),
    Case(q_len=127, kv_len=300, mask="float bq dead", is_causal=True),
    Case(q_len=127, kv_len=300, mask="float qk dead", lengths=(300, 97)),
    Case(q_len=129, kv_len=129, v_dim=80, head_dim=48),
]
GROUPED_MASK = Case(q_len=127, kv_len=300, heads=6, kv_heads=2, mask="float hk")


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize("name", ALL)
def test_equals_the_formula_in_float64(name: str, case: Case) -> None:
    arrays, options = inputs(case)
    got = ALL[name](*arrays, **options)
    assert got.dtype == jnp.float32
    assert (
        worst(got, numpy_attention(*arrays, **options))
        < (TOLERANCES["attention float32"])
    )


@pytest.mark.parametrize("length", [129, 1031])
@pytest.mark.parametrize("is_causal", [False, True])
def test_default_block_sizes(length: int, is_causal: bool) -> None:
    case = Case(q_len=length, kv_len=length, batch=1, is_causal=is_causal)
    arrays, options = inputs(case)
    got = blockwise_attention(*arrays, **options)
    want = numpy_attention(*arrays, **options)
    assert worst(got, want) < TOLERANCES["attention float32"]


@pytest.mark.parametrize("case", [*MASKED, GROUPED_MASK], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_masks_equal_the_formula_in_float64(name: str, case: Case) -> None:
    arrays, options = inputs(case)
    got = ALL[name](*arrays, **options)
    assert (
        worst(got, numpy_attention(*arrays, **options))
        < (TOLERANCES["attention float32"])
    )


@pytest.mark.parametrize(
    ("head_dim", "tolerance"),
    [(64, "attention bfloat16"), (128, "attention bfloat16 scaled q")],
)
@pytest.mark.parametrize("name", ALL)
def test_bfloat16_in_bfloat16_out(name: str, head_dim: int, tolerance: str) -> None:
    case = Case(
        q_len=129, kv_len=300, head_dim=head_dim, lengths=(300, 77), dtype="bfloat16"
    )
    arrays, options = inputs(case)
    got = ALL[name](*arrays, **options)
    assert got.dtype == jnp.bfloat16
    assert worst(got, numpy_attention(*arrays, **options)) < TOLERANCES[tolerance]


@pytest.mark.parametrize("name", ["reference", "blockwise"])
def test_bfloat16_is_rounded_once_at_the_end(name: str) -> None:
    # The best bfloat16 result is the exact one rounded. Summing in bfloat16 on the
    # way would leave more than this many entries elsewhere.
    arrays, options = inputs(Case(q_len=129, kv_len=300, dtype="bfloat16"))
    got = ALL[name](*arrays, **options)
    best = jnp.asarray(numpy_attention(*arrays, **options), jnp.bfloat16)
    assert float(jnp.mean(got != best)) < 0.01


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("is_causal", [False, True])
def test_without_keys_the_result_is_zero(name: str, is_causal: bool) -> None:
    case = Case(q_len=129, kv_len=130, lengths=(0, 9), is_causal=is_causal)
    arrays, options = inputs(case)
    got = ALL[name](*arrays, **options)
    np.testing.assert_array_equal(got[0], 0)
    assert float(jnp.abs(got[1]).min(axis=(0, 2)).max()) > 0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("mask", ["bool hqk dead", "float q dead", "float qk dead"])
def test_a_query_without_keys_gives_zero(name: str, mask: str) -> None:
    arrays, options = inputs(Case(q_len=129, kv_len=130, mask=mask))
    got = ALL[name](*arrays, **options)
    np.testing.assert_array_equal(got[:, :, 0], 0)
    assert not bool(jnp.isnan(got).any())


@pytest.mark.parametrize("name", ALL)
def test_a_mask_of_the_lowest_float_spreads_the_weight_evenly(name: str) -> None:
    # How transformers writes masks: not -inf. torch then averages all values.
    arrays, _ = inputs(Case(q_len=5, kv_len=130))
    mask = jnp.full((1, 1, 1, 130), jnp.finfo(jnp.float32).min)
    got = ALL[name](*arrays, mask=mask)
    want = np.mean(np.asarray(arrays[2], np.float64), 2, keepdims=True)
    assert (
        worst(got, np.broadcast_to(want, got.shape)) < (TOLERANCES["attention float32"])
    )


@pytest.mark.parametrize("name", ALL)
def test_keys_that_do_not_count_leave_no_trace(name: str) -> None:
    # The neighbours of the valid keys point exactly along the queries: any leak of a
    # masked key takes all the weight.
    case = Case(q_len=129, kv_len=300, lengths=(131, 131))
    (q, k, v), options = inputs(case)
    k = k.at[:, :, 131:].set(100 * q[:, :, :1])
    v = v.at[:, :, 131:].set(1e6)
    got = ALL[name](q, k, v, **options)
    assert (
        worst(got, ALL[name](q, k[:, :, :131], v[:, :, :131]))
        < (TOLERANCES["attention float32"])
    )


@pytest.mark.parametrize("name", ALL)
def test_padding_takes_no_weight_from_very_negative_scores(name: str) -> None:
    # Every score is about -120: a padded key with score 0 would win outright.
    case = Case(q_len=130, kv_len=129)
    (q, k, v), options = inputs(case)
    q, k = jnp.abs(q) + 2, -jnp.abs(k) - 2
    got = ALL[name](q, k, v, **options)
    assert (
        worst(got, numpy_attention(q, k, v, **options))
        < (TOLERANCES["attention float32 large scores"])
    )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("is_causal", [False, True])
def test_large_norms(name: str, is_causal: bool) -> None:
    # Scores reach several hundred: exp of them overflows, exp of their difference
    # must not.
    case = Case(q_len=129, kv_len=300, is_causal=is_causal)
    arrays, options = inputs(case, size=10.0)
    got = ALL[name](*arrays, **options)
    assert (
        worst(got, numpy_attention(*arrays, **options))
        < (TOLERANCES["attention float32 large scores"])
    )


@pytest.mark.parametrize("name", ALL)
def test_a_nan_is_not_hidden(name: str) -> None:
    (q, k, v), options = inputs(Case(q_len=129, kv_len=129))
    got = ALL[name](q.at[0, 0, 3, 0].set(jnp.nan), k, v, **options)
    assert bool(jnp.isnan(got[0, 0, 3]).all())
    assert not bool(jnp.isnan(got[1]).any())


@pytest.mark.parametrize("name", ALL)
def test_runs_inside_jit_with_lengths_as_input(name: str) -> None:
    case = Case(q_len=65, kv_len=130, lengths=(3, 130))
    arrays, _ = inputs(case)
    run = jax.jit(lambda q, k, v, n: ALL[name](q, k, v, kv_lengths=n))
    for lengths in ([3, 130], [130, 0]):
        got = run(*arrays, jnp.asarray(lengths, jnp.int32))
        want = numpy_attention(*arrays, kv_lengths=np.asarray(lengths))
        assert worst(got, want) < TOLERANCES["attention float32"]


@pytest.mark.parametrize("name", ALL)
def test_equals_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    arrays, options = inputs(Case(q_len=129, kv_len=300, is_causal=True, heads=2))
    want = torch.nn.functional.scaled_dot_product_attention(
        *(torch.from_numpy(np.array(x)) for x in arrays), is_causal=True
    )
    assert worst(ALL[name](*arrays, **options), want) < TOLERANCES["attention float32"]
