"""Pairs of neighbours in the last dim, as rotary embeddings have them, by products.

Elements 2i and 2i + 1 lie in neighbouring lanes of a vector register, and a TPU moves
lanes slowly. A product with zeros and ones moves them on the MXU instead, and is exact:
each result is one element times one.

A rotation takes pairs apart, scales and adds the halves, and puts the halves together:
three products. The result is linear in the pairs. :func:`rotations_joined` finds
rotations in a traced function and writes each as ``x * own + swapped(x) * other``, with
one product, whose factors depend on the angles alone.

Legend: N pairs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

_ADDED: dict[str, Callable[..., Any]] = {"add": operator.add, "sub": operator.sub}


@jax.jit
def pairs_apart(flat: jax.Array) -> list[jax.Array]:
    """The first and the second elements of the pairs of [..., 2 N], each [..., N]."""
    return jnp.split(_product(flat, _apart(flat.shape[-1] // 2)), 2, -1)


@jax.jit
def pairs_together(first: jax.Array, second: jax.Array) -> jax.Array:
    """[..., 2 N] of the first and the second elements, each [..., N]."""
    both = jnp.concatenate([first, second], -1)
    return _product(both, _apart(first.shape[-1]).T)


def rotations_joined(
    function: jax.extend.core.ClosedJaxpr,
) -> jax.extend.core.ClosedJaxpr:
    """A traced function with one product for each rotation of pairs.

    A rotation is what lies between :func:`pairs_apart` and :func:`pairs_together`:
    products with factors that do not depend on the pairs, sums, differences, and
    changes of the dtype. What does anything else stays as it is.
    """
    names = {eqn.params.get("name") for eqn in function.jaxpr.eqns}
    if pairs_together.__name__ not in names:
        return function
    walk = _Walk(function)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in function.in_avals]
    joined: jax.extend.core.ClosedJaxpr = jax.make_jaxpr(walk.run)(*shapes)
    return joined


@dataclass(frozen=True, eq=False)
class _Half:
    """``x[..., 0::2] * even + x[..., 1::2] * odd``.

    Attributes:
        x: the pairs, [..., 2 N].
        even, odd: factors that broadcast to [..., N]; ``None`` for zero.
        computed: the dtype of the products and sums.
        dtype: of the result.
    """

    x: Any
    even: Any
    odd: Any
    computed: Any
    dtype: Any

    def scaled(self, by: Any) -> _Half:
        even, odd = (None if f is None else f * by for f in (self.even, self.odd))
        return replace(self, even=even, odd=odd)

    def plus(self, other: _Half, add: Callable[..., Any]) -> _Half:
        def sum_of(one: Any, two: Any) -> Any:
            if two is None:
                return one
            return add(0, two) if one is None else add(one, two)

        even, odd = sum_of(self.even, other.even), sum_of(self.odd, other.odd)
        return replace(self, even=even, odd=odd)

    def as_type(self, dtype: Any) -> _Half | None:
        """``None`` for what was rounded already."""
        if self.dtype != self.computed:
            return None
        if jnp.promote_types(self.computed, dtype) == dtype:
            even, odd = (
                f.astype(dtype) if isinstance(f, jax.Array) else f
                for f in (self.even, self.odd)
            )
            return replace(self, even=even, odd=odd, computed=dtype, dtype=dtype)
        return replace(self, dtype=dtype)


class _Walk:
    """Runs a traced function, and keeps what is a half of a rotation."""

    def __init__(self, function: jax.extend.core.ClosedJaxpr) -> None:
        self._function = function
        self._values: dict[Any, Any] = {}
        self._halves: dict[Any, _Half] = {}
        # Before they were broadcast, with dims of 1.
        self._small: dict[Any, Any] = {}

    def run(self, *arrays: Any) -> list[Any]:
        jaxpr = self._function.jaxpr
        known = zip(jaxpr.constvars, self._function.consts, strict=True)
        self._values = dict(known) | dict(zip(jaxpr.invars, arrays, strict=True))
        for eqn in jaxpr.eqns:
            outs = self._joined(eqn)
            if outs is None:
                inputs = [self._read(x) for x in eqn.invars if not _is_literal(x)]
                outs = jax.extend.core.jaxpr_as_fun(_alone(self._function, eqn))(
                    *inputs
                )
            self._values |= dict(zip(eqn.outvars, outs, strict=True))
            self._note(eqn)
        return [self._read(x) for x in jaxpr.outvars]

    def _read(self, x: Any) -> Any:
        return x.val if _is_literal(x) else self._values[x]

    def _half(self, x: Any) -> _Half | None:
        return None if _is_literal(x) else self._halves.get(x)

    def _factor(self, x: Any) -> Any:
        if _is_literal(x):
            return x.val
        return self._small.get(x, self._values[x])

    def _note(self, eqn: Any) -> None:
        """Keep what an equation says of its results."""
        name, out = eqn.primitive.name, eqn.outvars[0]
        if eqn.params.get("name") == pairs_apart.__name__:
            x = self._read(eqn.invars[0])
            even = _Half(x, 1, None, x.dtype, x.dtype)
            self._halves[out] = even
            self._halves[eqn.outvars[1]] = replace(even, even=None, odd=1)
        elif name == "broadcast_in_dim" and not _is_literal(eqn.invars[0]):
            given, shape = self._factor(eqn.invars[0]), [1] * len(eqn.params["shape"])
            for dim, size in zip(
                eqn.params["broadcast_dimensions"], given.shape, strict=True
            ):
                shape[dim] = size
            self._small[out] = given.reshape(shape)
        elif name in ("mul", "neg", "convert_element_type", *_ADDED):
            half = self._combined(name, eqn)
            if half is not None:
                self._halves[out] = half
            elif name == "convert_element_type" and eqn.invars[0] in self._small:
                small = self._small[eqn.invars[0]]
                self._small[out] = small.astype(eqn.params["new_dtype"])

    def _combined(self, name: str, eqn: Any) -> _Half | None:
        halves = [self._half(x) for x in eqn.invars]
        one, two = halves[0], halves[-1]
        if name == "mul":
            if (one is None) == (two is None):
                return None
            half, other = (one, eqn.invars[1]) if one else (two, eqn.invars[0])
            assert half is not None
            rounded = half.dtype != half.computed
            return None if rounded else half.scaled(self._factor(other))
        if one is None or two is None or one.x is not two.x:
            return None
        if name == "convert_element_type":
            return one.as_type(eqn.params["new_dtype"])
        if one.dtype != one.computed or two.dtype != two.computed:
            return None
        return one.scaled(-1) if name == "neg" else one.plus(two, _ADDED[name])

    def _joined(self, eqn: Any) -> list[Any] | None:
        """The pairs that a rotation puts together; ``None`` for another equation."""
        if eqn.params.get("name") != pairs_together.__name__:
            return None
        first, second = map(self._half, eqn.invars)
        if first is None or second is None or first.x is not second.x:
            return None
        if (first.computed, first.dtype) != (second.computed, second.dtype):
            return None
        x = first.x
        size = x.shape[-1] // 2
        shape = (*(1 for _ in x.shape[1:]), size)
        own = _of_pairs([first.even, second.odd], shape, first.computed)
        other = _of_pairs([first.odd, second.even], shape, first.computed)
        turned = _is_turned(x)
        if turned:
            x, own, other = (_turn(array) for array in (x, own, other))
        swapped = _product(x, np.kron(np.eye(size), [[0, 1], [1, 0]]))
        terms = [
            values.astype(first.computed) * factors
            for values, factors in ((x, own), (swapped, other))
            if factors is not None
        ]
        out = sum(terms[1:], start=terms[0]).astype(first.dtype)
        return [_turn(out) if turned else out]


def _is_literal(x: Any) -> bool:
    return isinstance(x, jax.extend.core.Literal)


def _alone(
    function: jax.extend.core.ClosedJaxpr, eqn: Any
) -> jax.extend.core.ClosedJaxpr:
    """One equation of a function by itself, with the names of its scopes."""
    jaxpr = function.jaxpr.replace(
        constvars=[],
        invars=[x for x in eqn.invars if not _is_literal(x)],
        outvars=eqn.outvars,
        eqns=[eqn],
        effects=eqn.effects,
        debug_info=function.jaxpr.debug_info.with_unknown_names(),
    )
    return jax.extend.core.ClosedJaxpr(jaxpr, [])


def _of_pairs(factors: Sequence[Any], least: tuple[int, ...], dtype: Any) -> Any:
    """Factors of the first and the second elements as factors of [..., 2 N].

    Args:
        least: a shape that the factors broadcast with; dims of 1, then N.
    """
    if all(factor is None for factor in factors):
        return None
    arrays = [jnp.asarray(0 if f is None else f, dtype) for f in factors]
    shape = jnp.broadcast_shapes(least, *(array.shape for array in arrays))
    return pairs_together(*(jnp.broadcast_to(array, shape) for array in arrays))


def _product(x: jax.Array, moved: np.ndarray) -> jax.Array:
    turned = _is_turned(x)
    out: jax.Array = jnp.einsum(
        "...i,ij->...j",
        _turn(x) if turned else x,
        moved.astype(x.dtype),
        precision=jax.lax.Precision.HIGHEST,
    )
    return _turn(out) if turned else out


def _is_turned(x: jax.Array) -> bool:
    """Whether heads come before tokens in a product, as attention takes them."""
    return x.ndim > 3 and x.shape[-3] > x.shape[-2]


def _turn(x: Any) -> Any:
    return None if x is None else x.swapaxes(-2, -3)


def _apart(size: int) -> np.ndarray:
    """[2 N, 2 N]: a one from 2 i to i, and from 2 i + 1 to N + i."""
    moved = np.eye(2 * size, dtype=np.float32).reshape(size, 2, 2 * size)
    return moved.swapaxes(0, 1).reshape(2 * size, 2 * size).T
