from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tpuport.kernels.attention.problem import describe, resolve_scale


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


Q, K, V = array(2, 4, 5, 8), array(2, 2, 7, 8), array(2, 2, 7, 3)


def test_a_problem_is_the_sizes_and_options_of_a_call() -> None:
    problem = describe(Q, K, V, mask=array(1, 4, 1, 7, dtype=jnp.bool_), is_causal=True)
    assert (problem.batch, problem.heads, problem.kv_heads) == (2, 4, 2)
    assert (problem.q_len, problem.kv_len) == (5, 7)
    assert (problem.head_dim, problem.v_dim) == (8, 3)
    assert problem.groups == 2
    assert problem.scores_per_head == 35
    assert problem.mask_shape == (1, 4, 1, 7)
    assert problem.mask_is_bool
    assert problem.is_causal
    assert not problem.has_lengths
    assert problem.dtype == "float32"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": array(4, 5, 8)}, r"4 dims; got q float32\[4, 5, 8\]"),
        ({"q": array(3, 4, 5, 8)}, r"differ in batch; got q float32\[3, 4, 5, 8\]"),
        ({"v": array(1, 2, 7, 3)}, r"differ in batch"),
        ({"q": array(2, 4, 5, 9)}, r"share a head dim .* q float32\[2, 4, 5, 9\]"),
        ({"v": array(2, 2, 6, 3)}, r"heads or length; .* v float32\[2, 2, 6, 3\]"),
        ({"v": array(2, 1, 7, 3)}, r"heads or length"),
        ({"q": array(2, 3, 5, 8)}, r"2 key/value heads do not divide 3"),
        ({"q": array(2, 4, 5, 8, dtype=jnp.bfloat16)}, r"dtype; got q bfloat16"),
        ({"mask": array(5, 7)}, r"mask must have 4 dims.*got float32\[5, 7\]"),
        ({"mask": array(1, 2, 5, 7)}, r"\[2, 4, 5, 7\]; got float32\[1, 2, 5, 7\]"),
        ({"mask": array(1, 1, 1, 7, dtype=jnp.int32)}, r"bool .* or floating"),
        ({"kv_lengths": array(3, dtype=jnp.int32)}, r"shape \[2\]; got int32\[3\]"),
        ({"kv_lengths": array(2)}, r"integers of shape \[2\]; got float32\[2\]"),
        (
            {n: array(2, 2, 7, 8, dtype=jnp.int32) for n in "qkv"},
            "takes floating-point arrays",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_its_shape(
    change: dict[str, Any], message: str
) -> None:
    call = {"q": Q, "k": K, "v": V} | change
    with pytest.raises(ValueError, match=message):
        describe(**call)


def test_no_scale_means_one_over_the_root_of_the_head_dim() -> None:
    assert resolve_scale(None, 64) == 0.125
    assert resolve_scale(0.0, 64) == 0.0
