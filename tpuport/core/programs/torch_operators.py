"""Torch's operators on arrays of JAX, for arithmetic between the calls of modules.

Torch computes bfloat16 and float16 in float32 and rounds each result; so does this. The
shapes and dtypes of results are torch's own, asked of tensors without numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

aten = torch.ops.aten


class Result(NamedTuple):
    """What torch says of a result.

    Attributes:
        shape, dtype: the dtype is JAX's.
    """

    shape: tuple[int, ...]
    dtype: Any


Computes = Callable[..., jax.Array]
"""``computes(result, *arguments, **keywords)``; numbers are float32 arrays."""


def _full(value: Any) -> Any:
    """Floats as float32."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(jnp.float32)
    return value


def _each(function: Callable[..., Any]) -> Computes:
    """An operator on each number by itself, or a reduction; in float32."""

    def computes(result: Result, *args: Any, **kwargs: Any) -> jax.Array:
        given = {name: _full(value) for name, value in kwargs.items()}
        found = function(*map(_full, args), **given)
        return jnp.asarray(found).astype(result.dtype)

    return computes


def _scaled(sign: int) -> Callable[..., Any]:
    def add(x: Any, y: Any, alpha: Any = None) -> Any:
        return x + sign * (y if alpha is None else alpha * y)

    return add


def _power(x: Any, exponent: Any) -> Any:
    exact = {2: lambda: x * x, 3: lambda: x * x * x, 0.5: lambda: jnp.sqrt(x)}
    exact |= {
        -1: lambda: 1 / x,
        -2: lambda: 1 / (x * x),
        -0.5: lambda: jax.lax.rsqrt(x),
    }
    if isinstance(exponent, int | float) and exponent in exact:
        return exact[exponent]()
    return jnp.power(x, exponent)


def _clamp(x: Any, least: Any = None, most: Any = None, **more: Any) -> Any:
    least, most = more.get("min", least), more.get("max", most)
    x = x if least is None else jnp.maximum(x, least)
    return x if most is None else jnp.minimum(x, most)


def _lerp(x: Any, y: Any, weight: Any) -> Any:
    return jnp.where(weight < 0.5, x + weight * (y - x), y - (y - x) * (1 - weight))


def _axes(dim: Any) -> Any:
    return tuple(dim) if isinstance(dim, Sequence) and len(dim) else dim or None


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(
        x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
    ) -> Any:
        axes = dim if isinstance(dim, int) else _axes(dim)
        if dtype is not None and not dtype.is_floating_point:
            x = x.astype(jnp.int32)  # torch casts before it adds
        return function(x, axis=axes, keepdims=keepdim)

    return reduce


def _variance(
    x: Any,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: Any = 1,
) -> Any:
    less = (1 if correction is None else correction) if unbiased else 0
    how: dict[str, Any] = {"axis": _axes(dim)}
    squares = (x - jnp.mean(x, keepdims=True, **how)) ** 2
    count = x.size / max(jnp.mean(x, **how).size, 1)
    return jnp.sum(squares, keepdims=keepdim, **how) / jnp.maximum(count - less, 0.0)


def _deviation(*args: Any, **kwargs: Any) -> Any:
    return jnp.sqrt(_variance(*args, **kwargs))


def _sign(x: Any) -> Any:
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _compared(function: Callable[..., Any]) -> Computes:
    """A comparison; a number is rounded as the tensor is that it is compared with."""

    def computes(result: Result, x: Any, y: Any) -> jax.Array:
        x, y = jnp.asarray(x), jnp.asarray(y)
        if x.ndim and not y.ndim:
            y = y.astype(x.dtype)
        elif y.ndim and not x.ndim:
            x = x.astype(y.dtype)
        return jnp.asarray(function(_full(x), _full(y)))

    return computes


def _norm(
    x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any
) -> Any:
    how, x = {"axis": _axes(dim), "keepdims": keepdim}, jnp.abs(x)
    if ord in (float("inf"), float("-inf")):
        return (jnp.max if ord > 0 else jnp.min)(x, **how)
    if ord == 0:
        return jnp.sum(x != 0, **how)
    if ord == 2:
        return jnp.sqrt(jnp.sum(x * x, **how))
    return jnp.sum(x**ord, **how) ** (1 / ord)


def _shaped(result: Result, x: Any, *_: Any, **__: Any) -> jax.Array:
    return jnp.reshape(x, result.shape)


def _spread_out(result: Result, x: Any, *_: Any, **__: Any) -> jax.Array:
    return jnp.broadcast_to(x, result.shape)


def _as(result: Result, x: Any, *_: Any, **__: Any) -> jax.Array:
    found: jax.Array = x.astype(result.dtype)
    return found


def _filled(result: Result, x: Any, value: Any, *_: Any) -> jax.Array:
    return jnp.broadcast_to(value, result.shape).astype(result.dtype)


def _permuted(result: Result, x: Any, dims: Sequence[int]) -> jax.Array:
    return jnp.transpose(x, tuple(dims))


def _exchanged(result: Result, x: Any, one: int = 0, other: int = 1) -> jax.Array:
    return jnp.swapaxes(x, one, other) if x.ndim > 1 else x


def _selected(result: Result, x: Any, dim: int, index: int) -> jax.Array:
    return jax.lax.index_in_dim(x, index, dim % x.ndim, keepdims=False)


def _sliced(
    result: Result,
    x: Any,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    part = slice(start, end, step)
    found: jax.Array = x[(slice(None),) * (dim % x.ndim) + (part,)]
    return found


def _joined(result: Result, parts: Sequence[Any], dim: int = 0) -> jax.Array:
    # Torch leaves out empty tensors of one axis.
    parts = [p.astype(result.dtype) for p in parts if p.shape != (0,)]
    return jnp.concatenate(parts, dim) if parts else jnp.zeros((0,), result.dtype)


def _stacked(result: Result, parts: Sequence[Any], dim: int = 0) -> jax.Array:
    return jnp.stack([p.astype(result.dtype) for p in parts], dim)


def _flipped(result: Result, x: Any, dims: Sequence[int]) -> jax.Array:
    return jnp.flip(x, tuple(dims))


def _rolled(result: Result, x: Any, by: Sequence[int], dims: Any = ()) -> jax.Array:
    return jnp.roll(x, tuple(by), tuple(dims)) if dims else jnp.roll(x, by[0])


def _repeated(result: Result, x: Any, times: Sequence[int]) -> jax.Array:
    return jnp.tile(x, tuple(times))


def _padded(result: Result, x: Any, pad: Sequence[int], value: Any = 0) -> jax.Array:
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    widths = [(0, 0, 0)] * (x.ndim - len(pairs)) + [(a, b, 0) for a, b in pairs]
    return jax.lax.pad(x, jnp.asarray(value).astype(x.dtype), widths)


def _chosen(result: Result, condition: Any, x: Any, y: Any) -> jax.Array:
    one, other = (jnp.asarray(v).astype(result.dtype) for v in (x, y))
    return jnp.where(condition.astype(bool), one, other)


def _masked(result: Result, x: Any, mask: Any, value: Any) -> jax.Array:
    return _chosen(result, mask, value, x)


def _product(x: Any, y: Any) -> Any:
    return jnp.matmul(x, y, precision="highest")


_OF_NUMBERS: dict[Any, Callable[..., Any]] = {
    aten.neg: lambda x: -x,
    aten.abs: jnp.abs,
    aten.exp: jnp.exp,
    aten.expm1: jnp.expm1,
    aten.log: jnp.log,
    aten.log1p: jnp.log1p,
    aten.sqrt: jnp.sqrt,
    aten.rsqrt: jax.lax.rsqrt,
    aten.sin: jnp.sin,
    aten.cos: jnp.cos,
    aten.tanh: jnp.tanh,
    aten.sigmoid: jax.nn.sigmoid,
    aten.silu: jax.nn.silu,
    aten.relu: jax.nn.relu,
    aten.reciprocal: lambda x: 1 / x,
    aten.sign: _sign,
    aten.floor: jnp.floor,
    aten.ceil: jnp.ceil,
    aten.isnan: jnp.isnan,
    aten.isinf: jnp.isinf,
    aten.logical_not: jnp.logical_not,
    aten.logical_and: jnp.logical_and,
    aten.logical_or: jnp.logical_or,
    aten.add: _scaled(1),
    aten.sub: _scaled(-1),
    aten.rsub: lambda x, y, alpha=1: y - alpha * x,
    aten.mul: lambda x, y: x * y,
    aten.div: lambda x, y: x / y,
    aten.pow: _power,
    aten.maximum: jnp.maximum,
    aten.minimum: jnp.minimum,
    aten.clamp: _clamp,
    aten.clamp_min: jnp.maximum,
    aten.clamp_max: jnp.minimum,
    aten.lerp: _lerp,
    aten.addcmul: lambda x, y, z, value=1: x + value * y * z,
    aten.addcdiv: lambda x, y, z, value=1: x + value * y / z,
    aten.mean: _reduced(jnp.mean),
    aten.sum: _reduced(jnp.sum),
    aten.amax: _reduced(jnp.max),
    aten.amin: _reduced(jnp.min),
    aten.any: _reduced(jnp.any),
    aten.all: _reduced(jnp.all),
    aten.var: _variance,
    aten.std: _deviation,
    aten.linalg_vector_norm: _norm,
    aten.bmm: _product,
    aten.mm: _product,
}
_COMPARISONS: dict[Any, Computes] = {
    aten.eq: _compared(lambda x, y: x == y),
    aten.ne: _compared(lambda x, y: x != y),
    aten.lt: _compared(lambda x, y: x < y),
    aten.le: _compared(lambda x, y: x <= y),
    aten.gt: _compared(lambda x, y: x > y),
    aten.ge: _compared(lambda x, y: x >= y),
}
_OF_PLACES: dict[Any, Computes] = {
    aten.view: _shaped,
    aten._unsafe_view: _shaped,
    aten.unsqueeze: _shaped,
    aten.squeeze: _shaped,
    aten.expand: _spread_out,
    aten.permute: _permuted,
    aten.transpose: _exchanged,
    aten.t: _exchanged,
    aten.select: _selected,
    aten.slice: _sliced,
    aten.alias: _as,
    aten.detach: _as,
    aten.clone: _as,
    aten._to_copy: _as,
    aten.lift_fresh: _as,
    aten.cat: _joined,
    aten.stack: _stacked,
    aten.flip: _flipped,
    aten.roll: _rolled,
    aten.repeat: _repeated,
    aten.constant_pad_nd: _padded,
    aten.where: _chosen,
    aten.masked_fill: _masked,
    aten.copy: _filled,
    aten.fill: _filled,
}
#: Overloads whose arguments mean something else than in the tables.
_OTHERS = frozenset(
    {
        aten.view.dtype,
        aten.div.Tensor_mode,
        aten.div.Scalar_mode,
        aten.where.default,
        aten.var.default,
        aten.std.default,
        aten.any.dims,
        aten.all.dims,
    }
)
#: Numbers that decide how a program computes.
STATIC = frozenset(
    {
        aten.pow.Tensor_Scalar,
        aten.linalg_vector_norm.default,
        aten.var.correction,
        aten.std.correction,
    }
)


def computes(operator: Any) -> Computes | None:
    """What computes an overload of an operator; ``None`` if the host must."""
    packet = operator.overloadpacket
    if operator in _OTHERS:
        return None
    if packet in _OF_NUMBERS:
        return _each(_OF_NUMBERS[packet])
    return _COMPARISONS.get(packet) or _OF_PLACES.get(packet)


def counts(operator: Any) -> bool:
    """Whether an operator computes numbers, which of integers the host does."""
    packet = operator.overloadpacket
    return packet in _OF_NUMBERS or packet in _COMPARISONS
