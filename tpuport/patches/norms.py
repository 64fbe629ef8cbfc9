"""Normalisation in float32, whatever the weights' dtype.

torchax rounds the mean, the variance and every product of a norm to the dtype of its
input, so a bfloat16 model loses its norms. Here statistics are two-pass and everything
is float32 until the result is cast back.

Legend: N batch, C channels, G groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.mesh.picture_marks import Mark, marked
from tpuport.core.mesh.spatial_split import Space
from tpuport.core.tracing.context import OpContext
from tpuport.core.tracing.op_overrides import OpOverride


def layer_norm(
    input: jax.Array,
    normalized_shape: int | Sequence[int],
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
) -> jax.Array:
    """``torch.nn.functional.layer_norm`` over the trailing ``normalized_shape`` dims.

    Returns an array of the shape and dtype of ``input``.

    Raises:
        ValueError: the trailing dims of ``input`` are not ``normalized_shape``.
    """
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    dims = tuple(normalized_shape)
    if tuple(input.shape[input.ndim - len(dims) :]) != dims:
        raise ValueError(f"layer_norm over {dims} of an input of shape {input.shape}")
    return _native_layer_norm(input, dims, weight, bias, eps)[0]


def group_norm(
    input: jax.Array,
    num_groups: int,
    weight: jax.Array | None = None,
    bias: jax.Array | None = None,
    eps: float = 1e-5,
    *,
    space: Space | None = None,
) -> jax.Array:
    """``torch.nn.functional.group_norm`` of an array of shape [N, C, ...].

    Returns an array of the shape and dtype of ``input``. With a ``space`` its last two
    dims are a device's rows and columns of a picture, and statistics are of the whole.

    Raises:
        ValueError: ``num_groups`` does not divide C.
    """
    batch, channels, *rest = input.shape
    if channels % num_groups:
        raise ValueError(f"group_norm: {channels} channels in {num_groups} groups")
    per_channel = (1, channels) + (1,) * len(rest)
    mean, variance = (
        jnp.repeat(x, channels // num_groups, axis=1).reshape(batch, *per_channel[1:])
        for x in _moments(input, num_groups, space)
    )
    out = (input.astype(jnp.float32) - mean) / jnp.sqrt(variance + eps)
    if weight is not None:
        out = out * weight.astype(jnp.float32).reshape(per_channel)
    if bias is not None:
        out = out + bias.astype(jnp.float32).reshape(per_channel)
    return _marked(space, out.astype(input.dtype), input)


def _marked(space: Space | None, made: jax.Array, input: jax.Array) -> jax.Array:
    """A norm of a picture, or what is whole of it; marked in a split program."""
    if space is None:
        return made
    dims = (input.ndim - 2, input.ndim - 1)
    of_picture = dims if made.ndim == input.ndim else None
    return marked(Mark(name="a group norm", dims=of_picture, given=dims), made, input)


def _moments(
    input: jax.Array, num_groups: int, space: Space | None
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance of the groups of [N, C, ...], each [N, G].

    First of every channel, which leaves the channels along the lanes where they are,
    and then of each group, by the law of total variance.
    """
    batch, channels = input.shape[:2]
    axes = tuple(range(2, input.ndim))
    if space is not None:
        dims = (input.ndim - 2, input.ndim - 1)
        means, variances = space.moments(input, dims, axes)
    else:
        x = input.astype(jnp.float32)
        means = jnp.mean(x, axis=axes, keepdims=True)
        variances = jnp.mean(jnp.square(x - means), axis=axes)
    means, variances = (
        x.reshape(batch, num_groups, channels // num_groups) for x in (means, variances)
    )
    mean = jnp.mean(means, axis=2)
    apart = jnp.square(means - mean[..., None])
    return mean, jnp.mean(variances + apart, axis=2)


def _native_group_norm(
    space: Space | None,
    input: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``aten.native_group_norm``: (output, mean [N, G], reciprocal std [N, G])."""
    mean, variance = _moments(input, group, space)
    out = group_norm(input, group, weight, bias, eps, space=space)
    deviation = 1 / jnp.sqrt(variance + eps)
    return out, _marked(space, mean, input), _marked(space, deviation, input)


def _native_layer_norm(
    input: jax.Array,
    normalized_shape: Sequence[int],
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``aten.native_layer_norm``: (output, mean, reciprocal std)."""
    axes = tuple(range(input.ndim - len(normalized_shape), input.ndim))
    x = input.astype(jnp.float32)
    mean = jnp.mean(x, axis=axes, keepdims=True)
    centred = x - mean
    variance = jnp.mean(jnp.square(centred), axis=axes, keepdims=True)
    deviation = jnp.sqrt(variance + eps)
    out = centred / deviation
    if weight is not None:
        out = out * weight.astype(jnp.float32)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(input.dtype), mean, 1 / deviation


def _override(
    target: str, make: Callable[[OpContext], Callable[..., Any]]
) -> OpOverride:
    return OpOverride(
        targets=(target,),
        make=make,
        owner="tpuport.patches.norms",
        reason="norm statistics in float32, two-pass",
    )


FLOAT32_NORMS: tuple[OpOverride, ...] = (
    _override("torch.nn.functional.layer_norm", lambda context: layer_norm),
    _override(
        "torch.nn.functional.group_norm",
        lambda context: functools.partial(group_norm, space=context.space),
    ),
    _override("torch.ops.aten.native_layer_norm", lambda context: _native_layer_norm),
    _override(
        "torch.ops.aten.native_group_norm",
        lambda context: functools.partial(_native_group_norm, context.space),
    ),
)
"""Override claims a model port lists to get float32 norms."""
