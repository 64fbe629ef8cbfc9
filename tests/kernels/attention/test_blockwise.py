from __future__ import annotations

import math
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
from tests.models.jaxprs import arrays_in
from tests.tolerances import TOLERANCES
from tpuport.kernels.attention.blockwise import (
    MAX_BLOCK_KV,
    MAX_BLOCK_Q,
    MAX_TILE_SCORES,
    Tiling,
    blockwise_attention,
    default_tiling,
)
from tpuport.kernels.attention.problem import describe
from tpuport.kernels.attention.reference import reference_attention

Q_LEN, KV_LEN = 5003, 7001


def long_shapes(attention: Any, mask: tuple[int, ...] | None, **options: Any) -> set:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    arrays = [array(1, 2, n, 64) for n in (Q_LEN, KV_LEN, KV_LEN)]
    if mask is not None:
        arrays.append(array(*mask))

    def call(q: Any, k: Any, v: Any, *masks: Any) -> Any:
        return attention(q, k, v, mask=masks[0] if masks else None, **options)

    return set(arrays_in(jax.make_jaxpr(call)(*arrays).jaxpr))


def scores_built(shapes: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {shape for shape in shapes if sum(dim >= Q_LEN for dim in shape) > 1}


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (None, {}),
        (None, {"is_causal": True}),
        ((1, 1, 1, KV_LEN), {}),
        ((1, 2, Q_LEN, 1), {}),
    ],
)
def test_never_builds_the_score_matrix(mask: Any, options: dict[str, Any]) -> None:
    assert not scores_built(long_shapes(blockwise_attention, mask, **options))


def test_the_search_for_score_matrices_finds_them() -> None:
    assert scores_built(long_shapes(reference_attention, None))


def test_tiles_stay_below_the_limit() -> None:
    def sizes(shape: tuple[int, ...]) -> int:
        return math.prod(shape)

    shapes = long_shapes(blockwise_attention, None)
    blocks = {s for s in shapes if len(s) == 2 and s[1] not in (1, 64)}
    assert blocks
    assert max(map(sizes, blocks)) <= MAX_TILE_SCORES


@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "kv_heads"),
    [(1, 1, 1, 1), (226, 226, 48, 48), (39826, 39826, 30, 30), (4096, 77, 24, 24),
     (8192, 8192, 32, 2), (5, 100000, 7, 7), (2000, 2000, 4096, 1)],
)  # fmt: skip
def test_default_tiles_cover_and_waste_little(
    q_len: int, kv_len: int, heads: int, kv_heads: int
) -> None:
    q = jax.ShapeDtypeStruct((1, heads, q_len, 64), jnp.float32)
    k = jax.ShapeDtypeStruct((1, kv_heads, kv_len, 64), jnp.float32)
    problem = describe(q, k, k)
    tiling = default_tiling(problem)
    assert tiling.block_q <= MAX_BLOCK_Q
    assert tiling.block_kv <= MAX_BLOCK_KV
    scores = problem.groups * tiling.block_q * tiling.block_kv
    assert scores <= max(MAX_TILE_SCORES, problem.groups * tiling.block_kv)
    for length, block in ((q_len, tiling.block_q), (kv_len, tiling.block_kv)):
        count = -(-length // block)
        assert count * block - length < count


@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(block_q=1, block_kv=1),
        Tiling(block_q=7, block_kv=11),
        Tiling(block_q=20, block_kv=21),
        Tiling(block_q=999, block_kv=999),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_result_does_not_depend_on_the_tiling(
    tiling: Tiling, is_causal: bool
) -> None:
    case = Case(
        q_len=20, kv_len=23, heads=8, kv_heads=4, head_dim=16, mask="float bhqk",
        is_causal=is_causal, lengths=(23, 12),
    )  # fmt: skip
    arrays, options = inputs(case)
    got = compiled(blockwise_attention, *arrays, **options, tiling=tiling)
    want = numpy_attention(*arrays, **options)
    assert worst(got, want) < TOLERANCES["attention float32"]


def test_a_tiling_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="block_q=0"):
        Tiling(block_q=0, block_kv=5)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("attention", [blockwise_attention, reference_attention])
def test_empty_inputs_give_zeros(attention: Any, q_len: int, kv_len: int) -> None:
    q, k = jnp.ones((1, 2, q_len, 8)), jnp.ones((1, 2, kv_len, 8))
    got = attention(q, k, k)
    assert got.shape == q.shape
    assert worst(got, jnp.zeros_like(q)) == 0


@pytest.mark.parametrize(
    ("options", "rows"),
    [({"is_causal": True}, 400), ({"kv_lengths": np.asarray([390])}, 1000)],
)
def test_blocks_without_allowed_keys_are_not_computed(
    options: dict[str, Any], rows: int
) -> None:
    # Weight 0 times NaN is NaN: had a block beyond key 400 been multiplied, it would
    # show in these rows.
    (q, k, v), _ = inputs(Case(q_len=1000, kv_len=1000, batch=1))
    tiling = Tiling(block_q=100, block_kv=200)
    poisoned = v.copy()
    poisoned[:, :, 400:] = np.nan
    got = np.asarray(
        compiled(blockwise_attention, q, k, poisoned, tiling=tiling, **options)
    )
    want = numpy_attention(q, k, v, **options)
    assert (
        worst(got[:, :, :rows], want[:, :, :rows]) < (TOLERANCES["attention float32"])
    )
