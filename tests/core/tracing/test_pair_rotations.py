"""A rotation of pairs becomes one product, with the numbers that it had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import pytest

from tpuport.core.tracing.pair_rotations import (
    pairs_apart,
    pairs_together,
    rotations_joined,
)

Rotation = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def wan(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Halves of both, of the angles too."""
    one, two = pairs_apart(x)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    first, second = one * cos - two * sin, one * sin + two * cos
    return pairs_together(first.astype(x.dtype), second.astype(x.dtype))


def ltx(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The turned pairs first, then products with whole angles."""
    one, two = pairs_apart(x)
    turned = pairs_together(-two, one)
    return (x.astype(cos.dtype) * cos + turned.astype(cos.dtype) * sin).astype(x.dtype)


def widened(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """In float32, from angles that are broadcast first."""
    one, two = (half.astype("float32") for half in pairs_apart(x))
    shape = (*x.shape[:-1], one.shape[-1])
    cos, sin = (jnp.broadcast_to(t[..., 0::2], shape) for t in (cos, sin))
    return pairs_together(cos * one - sin * two, two * cos + one * sin)


def squared(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """No rotation: not linear in the pairs."""
    one, two = pairs_apart(x)
    return pairs_together(one * one, two)


def of_two(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """No rotation: halves of two arrays."""
    return pairs_together(pairs_apart(x)[0], pairs_apart(x + 1)[1])


def rounded(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """No rotation: rounded on the way."""
    one, two = pairs_apart(x)
    half = (one * cos[..., 0::2]).astype("bfloat16") * sin[..., 0::2]
    return pairs_together(half, two.astype(half.dtype))


def numbers(dtype: str, heads: int = 1) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pairs [2, 10, 3, 8], and angles [1, 10, ``heads``, 8]."""
    keys = jax.random.split(jax.random.key(0), 3)
    angles = (1, 10, heads, 8)
    return (
        jax.random.normal(keys[0], (2, 10, 3, 8)).astype(dtype),
        jax.random.normal(keys[1], angles),
        jax.random.normal(keys[2], angles),
    )


def products(jaxpr: Any, size: int) -> int:
    """Products of more than ``size`` elements that an output needs."""
    needed, count = set(jaxpr.outvars), 0
    for eqn in reversed(jaxpr.eqns):
        if needed.isdisjoint(eqn.outvars):
            continue
        needed |= {x for x in eqn.invars if not hasattr(x, "val")}
        inner = eqn.params.get("jaxpr")
        count += products(inner.jaxpr, size) if inner is not None else 0
        large = eqn.outvars[0].aval.size > size
        count += eqn.primitive.name == "dot_general" and large
    return count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("rotation", [wan, ltx, widened])
def test_a_rotation_is_one_product_with_the_same_bits(
    rotation: Rotation, heads: int, dtype: str
) -> None:
    given = numbers(dtype, heads)
    before = jax.make_jaxpr(rotation)(*given)
    after = rotations_joined(before)
    (expected,) = jax.extend.core.jaxpr_as_fun(before)(*given)
    (found,) = jax.extend.core.jaxpr_as_fun(after)(*given)
    assert found.dtype == expected.dtype
    assert (found == expected).all()
    angles = 10 * heads * 8
    assert products(before.jaxpr, angles) == 2
    assert products(after.jaxpr, angles) == 1


@pytest.mark.parametrize("other", [squared, of_two, rounded])
def test_what_is_no_rotation_stays(other: Rotation) -> None:
    given = numbers("float32")
    before = jax.make_jaxpr(other)(*given)
    after = rotations_joined(before)
    (expected,) = jax.extend.core.jaxpr_as_fun(before)(*given)
    (found,) = jax.extend.core.jaxpr_as_fun(after)(*given)
    assert (found == expected).all()
    assert products(after.jaxpr, 0) == products(before.jaxpr, 0)


def test_scopes_keep_their_names() -> None:
    """The time of a program is told by them."""

    def named(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            return wan(x, cos, sin) @ jnp.ones((8, 8))

    given = numbers("float32")
    after = rotations_joined(jax.make_jaxpr(named)(*given))
    text = jax.jit(jax.extend.core.jaxpr_as_fun(after)).lower(*given)
    assert "attention/dot_general" in text.as_text(debug_info=True)
