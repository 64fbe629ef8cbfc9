"""Torch's operators on arrays of JAX, for arithmetic between the calls of modules.

Torch computes bfloat16 and float16 in float32 and rounds each result; so does this. The
shapes and dtypes of results are torch's own, asked of tensors without numbers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

aten = torch.ops.aten


Computes = Callable[..., jax.Array]
"""``computes(result, *arguments, **keywords)``; numbers are float32 arrays, and the
result has the shape and dtype that torch says."""


def _full(value: Any) -> Any:
    """Floats as float32."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(jnp.float32)
    return value


def _each(function: Callable[..., Any]) -> Computes:
    """An operator on each number by itself, or a reduction; in float32."""

    def computes(result: jax.ShapeDtypeStruct, *args: Any, **kwargs: Any) -> jax.Array:
        given = {name: _full(value) for name, value in kwargs.items()}
        found = function(*map(_full, args), **given)
        return jnp.asarray(found).astype(result.dtype)

    return computes


def _power(x: Any, exponent: Any) -> Any:
    """As torch, which computes some powers in another way than the rest."""
    exact = {
        2: lambda: x * x,
        3: lambda: x * x * x,
        0.5: lambda: jnp.sqrt(x),
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


def _compared(function: Callable[..., Any]) -> Computes:
    """A comparison; a number is rounded as the tensor is that it is compared with."""

    def computes(result: jax.ShapeDtypeStruct, x: Any, y: Any) -> jax.Array:
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


def _joined(
    result: jax.ShapeDtypeStruct, parts: Sequence[Any], dim: int = 0
) -> jax.Array:
    # Torch leaves out empty tensors of one axis.
    parts = [p.astype(result.dtype) for p in parts if p.shape != (0,)]
    return jnp.concatenate(parts, dim) if parts else jnp.zeros((0,), result.dtype)


def _padded(
    result: jax.ShapeDtypeStruct, x: Any, pad: Sequence[int], value: Any = 0
) -> jax.Array:
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    widths = [(0, 0, 0)] * (x.ndim - len(pairs)) + [(a, b, 0) for a, b in pairs]
    return jax.lax.pad(x, jnp.asarray(value).astype(x.dtype), widths)


def _chosen(result: jax.ShapeDtypeStruct, condition: Any, x: Any, y: Any) -> jax.Array:
    one, other = (jnp.asarray(v).astype(result.dtype) for v in (x, y))
    return jnp.where(condition.astype(bool), one, other)


#: Operators of torch that numpy has by the same name, and functions of networks.
_NUMPYS = (
    *("abs", "exp", "expm1", "log", "log1p", "sqrt", "sin", "cos", "tanh", "floor"),
    *("ceil", "isnan", "isinf", "logical_not", "logical_and", "logical_or"),
    *("maximum", "minimum"),
)
_NETWORKS = ("sigmoid", "silu", "relu")
_OF_NUMBERS: dict[Any, Callable[..., Any]] = {
    **{getattr(aten, name): getattr(jnp, name) for name in _NUMPYS},
    **{getattr(aten, name): getattr(jax.nn, name) for name in _NETWORKS},
    aten.neg: lambda x: -x,
    aten.rsqrt: jax.lax.rsqrt,
    aten.reciprocal: lambda x: 1 / x,
    aten.sign: lambda x: (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype),
    aten.add: lambda x, y, alpha=1: x + alpha * y,
    aten.sub: lambda x, y, alpha=1: x + -alpha * y,
    aten.rsub: lambda x, y, alpha=1: y - alpha * x,
    aten.mul: lambda x, y: x * y,
    aten.div: lambda x, y: x / y,
    aten.pow: _power,
    aten.clamp: _clamp,
    aten.clamp_min: jnp.maximum,
    aten.clamp_max: jnp.minimum,
    aten.lerp: lambda x, y, weight: jnp.where(
        weight < 0.5, x + weight * (y - x), y - (y - x) * (1 - weight)
    ),
    aten.addcmul: lambda x, y, z, value=1: x + value * y * z,
    aten.addcdiv: lambda x, y, z, value=1: x + value * y / z,
    aten.mean: _reduced(jnp.mean),
    aten.sum: _reduced(jnp.sum),
    aten.amax: _reduced(jnp.max),
    aten.amin: _reduced(jnp.min),
    aten.any: _reduced(jnp.any),
    aten.all: _reduced(jnp.all),
    aten.var: _variance,
    aten.std: lambda *args, **kwargs: jnp.sqrt(_variance(*args, **kwargs)),
    aten.linalg_vector_norm: _norm,
    aten.bmm: functools.partial(jnp.matmul, precision="highest"),
    aten.mm: functools.partial(jnp.matmul, precision="highest"),
}
_COMPARISONS: dict[Any, Computes] = {
    getattr(aten, name): _compared(getattr(operator, name))
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_OF_PLACES: dict[Any, Computes] = {
    **dict.fromkeys(
        (aten.view, aten._unsafe_view, aten.unsqueeze, aten.squeeze),
        lambda result, x, *_, **__: jnp.reshape(x, result.shape),
    ),
    aten.expand: lambda result, x, *_, **__: jnp.broadcast_to(x, result.shape),
    aten.permute: lambda _, x, dims: jnp.transpose(x, tuple(dims)),
    aten.transpose: lambda _, x, one, other: (
        jnp.swapaxes(x, one, other) if x.ndim else x
    ),
    aten.t: lambda _, x: x.T,
    aten.select: lambda _, x, dim, index: jax.lax.index_in_dim(
        x, index, dim % x.ndim, keepdims=False
    ),
    aten.slice: lambda _, x, dim=0, start=None, end=None, step=1: x[
        (slice(None),) * (dim % x.ndim) + (slice(start, end, step),)
    ],
    **dict.fromkeys(
        (aten.alias, aten.detach, aten.clone, aten._to_copy, aten.lift_fresh),
        lambda result, x, *_, **__: x.astype(result.dtype),
    ),
    aten.cat: _joined,
    aten.stack: lambda result, parts, dim=0: jnp.stack(
        [part.astype(result.dtype) for part in parts], dim
    ),
    aten.flip: lambda _, x, dims: jnp.flip(x, tuple(dims)),
    aten.roll: lambda _, x, by, dims=(): (
        jnp.roll(x, tuple(by), tuple(dims)) if dims else jnp.roll(x, by[0])
    ),
    aten.repeat: lambda _, x, times: jnp.tile(x, tuple(times)),
    aten.constant_pad_nd: _padded,
    aten.where: _chosen,
    aten.masked_fill: lambda result, x, mask, value: _chosen(result, mask, value, x),
    **dict.fromkeys(
        (aten.copy, aten.fill),
        lambda result, x, value, *_: jnp.broadcast_to(value, result.shape).astype(
            result.dtype
        ),
    ),
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


def computes(overload: Any) -> Computes | None:
    """What computes an overload of an operator; ``None`` if the host must."""
    packet = overload.overloadpacket
    if overload in _OTHERS:
        return None
    if packet in _OF_NUMBERS:
        return _each(_OF_NUMBERS[packet])
    return _COMPARISONS.get(packet) or _OF_PLACES.get(packet)


def counts(overload: Any) -> bool:
    """Whether an operator computes numbers, which of integers the host does."""
    packet = overload.overloadpacket
    return packet in _OF_NUMBERS or packet in _COMPARISONS
