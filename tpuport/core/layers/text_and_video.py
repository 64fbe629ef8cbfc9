"""Text and video tokens with weights of their own, joined for attention.

Letters: B batch, L tokens of the joint sequence with padding, T tokens of text,
H heads, D head dim; M and N are L and D, or D and L where features come before tokens,
TM and TN are T and D, or D and T.

The joint sequence is split over the sequence axis and has places for the text after the
video. The text alone, a few hundred tokens, is whole on every device: its layers cost a
device about as much as exchanging parts of the text would. Before attention the text's
queries, keys and values are written into their places, a window of at most T tokens per
device. After attention the text's result is read out again.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.core.arrays import Array, Bool, Float, Int
from tpuport.core.layers import joint_sequence, token_norms
from tpuport.core.layers.feed_forward import (
    activated_product,
    added_product,
    is_kernels,
)
from tpuport.core.layers.joint_sequence import JointSequence
from tpuport.core.layers.sequence_parallel import sequence_attention
from tpuport.core.tracing.context import BATCH, HEADS, TOKENS, current
from tpuport.core.tracing.ported_module import on_devices

Heads = tuple[Float[Array, "b h m n"], Float[Array, "b h m n"], Float[Array, "b h m n"]]
"""Queries, keys and values."""
TextHeads = tuple[
    Float[Array, "b h tm tn"], Float[Array, "b h tm tn"], Float[Array, "b h tm tn"]
]
"""Queries, keys and values of the text alone."""


Pair = tuple["jax.Array", "jax.Array"]
"""For the tokens that are marked and for all others; one array where none are."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Where the tokens of a stream are, and which take values of their own.

    Attributes:
        tokens: their layout.
        marked: the same with the tokens that take the first of a pair as its "text".
    """

    tokens: JointSequence
    marked: JointSequence

    @classmethod
    def of(cls, tokens: JointSequence, first: int = 0) -> Stream:
        """A stream whose ``first`` tokens are marked."""
        return cls(tokens, replace(tokens, text=first, text_first=True))

    def norm(
        self,
        norm: Any,
        x: jax.Array,
        shift: Pair | None = None,
        scale: Pair | None = None,
    ) -> jax.Array:
        """``x`` [B, L, E] normed, and modulated if there are a shift and a scale.

        A norm that was left out is an ``Identity``.
        """
        if isinstance(norm, torch.nn.Identity):
            return x
        weight, bias = parameters(norm)
        if shift is None or scale is None:
            shift = scale = (jnp.zeros(x.shape[::2], jnp.float32),) * 2
        y = token_norms.modulated_norm(
            self.marked,
            x,
            weight=weight,
            bias=bias,
            eps=norm.eps,
            text=(shift[0], scale[0]),
            video=(shift[1], scale[1]),
        )
        # Once, not within every projection that reads it.
        return jax.lax.optimization_barrier(self.tokens.split(y))

    def add(self, x: jax.Array, update: jax.Array, gate: Pair) -> jax.Array:
        """``x + gate * update``, [B, L, E]."""
        return joint_sequence.gated(self.marked, x, update, text=gate[0], video=gate[1])

    @classmethod
    def whole(cls, sequence: JointSequence, count: int) -> Stream:
        """A stream of ``count`` other tokens, whole on every device."""
        return cls.of(text_alone(replace(sequence, text=count)))

    def behind(self, x: jax.Array, *linears: Any) -> tuple[jax.Array, list[Any]]:
        """``x`` once the weights of layers are there, and these layers.

        The exchange of heads for tokens waits for ``x``, and so does not hold up the
        links while weights that are held in parts are gathered.
        """
        weights, biases = zip(*map(parameters, linears), strict=True)
        x, weights = jax.lax.optimization_barrier((x, weights))
        pairs = zip(weights, biases, strict=True)
        return x, [SimpleNamespace(weight=w, bias=b) for w, b in pairs]

    def heads(self, linear: Any, y: jax.Array, count: int) -> jax.Array:
        """A projection of ``y`` [B, L, E] to ``count`` heads, in float32."""
        weight, bias = parameters(linear)
        head_dim = weight.shape[0] // count
        return joint_sequence.to_heads(self.tokens, y, weight, bias, head_dim)

    def turned(
        self, linear: Any, norm: Any, y: jax.Array, count: int, tables: Any = None
    ) -> jax.Array:
        """Queries or keys: projected, normed and rotated by ``tables``."""
        given = None
        if norm is not None:
            weight, bias = parameters(norm)
            width = math.prod(norm.weight.shape) if weight is not None else 0
            head_dim = linear.weight.shape[0] // count
            given = token_norms.HeadNorm(
                weight, bias, norm.eps, _centres(norm), across=width > head_dim
            )
        found = self.heads(linear, y, count)
        return token_norms.turned(self.tokens, found, given, tables, y.dtype)

    def output(self, linear: Any, out: jax.Array) -> jax.Array:
        """The projection [B, L, E] of what attention gave."""
        return joint_sequence.from_heads(self.tokens, out, *parameters(linear))

    def add_output(
        self, x: jax.Array, linear: Any, out: jax.Array, gate: Pair | None = None
    ) -> jax.Array:
        """``x + gate * output(linear, out)``, [B, L, E]; no gate is one of 1."""
        if gate is None:
            gate = (jnp.ones(x.shape[::2], jnp.float32),) * 2
        if is_kernels(self.marked, (held := parameters(linear))[0], gate):
            with contextlib.suppress(NotImplementedError):
                inner = out.reshape(out.shape[0], -1, out.shape[3])
                return added_product(self.marked, x, inner, held, gate)
        return self.add(x, self.output(linear, out), gate)

    def feed_forward(self, ff: Any, y: jax.Array) -> jax.Array:
        """Both layers with a GELU between them, in float32."""
        first, _, last = ff.net[:3]
        inner = self.hidden(first.proj, y, first.approximate)
        weight, bias = parameters(last)
        return joint_sequence.dense(self.tokens, inner, weight, bias, row_parallel=True)

    def add_feed_forward(
        self, x: jax.Array, ff: Any, y: jax.Array, gate: Pair
    ) -> jax.Array:
        """``x + gate * feed_forward(ff, y)``, [B, L, E], rounded once."""
        first, _, last = ff.net[:3]
        wide = parameters(first.proj)
        if is_kernels(self.marked, wide[0], gate):
            with contextlib.suppress(NotImplementedError):
                gelu = _gelu(first.approximate)
                inner = activated_product(self.marked, y, wide, gelu)
                return added_product(self.marked, x, inner, parameters(last), gate)
        return self.add(x, self.feed_forward(ff, y), gate)

    def hidden(self, linear: Any, y: jax.Array, approximate: str = "tanh") -> jax.Array:
        """A layer and a GELU, rounded once.

        Args:
            approximate: the form of GELU, as torch has it.
        """
        wide = joint_sequence.dense(self.tokens, y, *parameters(linear))
        inner = _gelu(approximate)(wide).astype(y.dtype)
        # Without the barrier XLA computes this product again in each block of the next.
        return jax.lax.optimization_barrier(inner)


def _gelu(approximate: str) -> Callable[..., Any]:
    return functools.partial(jax.nn.gelu, approximate=approximate == "tanh")


def parameters(module: Any) -> tuple[Any, Any]:
    """Weight and bias as arrays; ``None`` where there is none."""
    arrays = current().arrays
    weight, bias = module.weight, getattr(module, "bias", None)
    return (
        None if weight is None else arrays(weight),
        None if bias is None else arrays(bias),
    )


def _centres(norm: Any) -> bool:
    """Whether a norm of queries or keys takes the mean off."""
    from diffusers.models.normalization import RMSNorm

    if isinstance(norm, RMSNorm | torch.nn.RMSNorm):
        return False
    if isinstance(norm, torch.nn.LayerNorm):
        return True
    raise NotImplementedError(
        f"the native blocks have no {type(norm).__name__} of queries and keys; run "
        "with blocks='upstream'"
    )


def refuse_kwargs(attention_kwargs: Mapping[str, Any] | None) -> None:
    """Raise NotImplementedError where upstream would hand something to attention."""
    if attention_kwargs:
        raise NotImplementedError(
            "the native blocks take no attention_kwargs, got "
            f"{', '.join(attention_kwargs)}; run with blocks='upstream'"
        )


def text_alone(sequence: JointSequence) -> JointSequence:
    """The text of a joint sequence as a sequence without padding, whole everywhere."""
    return replace(sequence, length=sequence.text, padded=sequence.text, divided=False)


def put_text(
    sequence: JointSequence,
    x: Float[Array, "b *dims"],
    text: Float[Array, "b ..."],
    dim: int,
) -> Float[Array, "b *dims"]:
    """``x`` with ``text`` in the places of the text, which is after the video.

    Args:
        x: [B, L, ...] or [B, H, ...] with L at ``dim``, split over the sequence axis.
        text: shaped like ``x`` with T at ``dim``, whole on every device.
    """
    count = sequence.text

    def on_device(x: Array, text: Array) -> Array:
        width, window, shift, here = _window(sequence, x, dim)
        around = [(0, 0)] * x.ndim
        around[dim] = (width, width)
        mine = jax.lax.dynamic_slice_in_dim(
            jnp.pad(text, around),
            jnp.clip(shift + width, 0, count + width),
            width,
            dim,
        )
        before = jax.lax.dynamic_slice_in_dim(x, window, width, dim)
        return jax.lax.dynamic_update_slice_in_dim(
            x, jnp.where(here, mine, before), window, dim
        )

    return _mapped(sequence, on_device, (x, text), dim, out_split=True)


def take_text(
    sequence: JointSequence, x: Float[Array, "b ..."], dim: int
) -> Float[Array, "b ..."]:
    """The text's part of ``x``, whole on every device; see :func:`put_text`."""
    count, start = sequence.text, sequence.length - sequence.text
    axis = sequence.active.context.axis(TOKENS)
    if axis is None:
        return jax.lax.slice_in_dim(x, start, start + count, axis=dim)

    def on_device(x: Array) -> Array:
        width, window, shift, here = _window(sequence, x, dim)
        mine = jax.lax.dynamic_slice_in_dim(x, window, width, dim)
        around = [(0, 0)] * x.ndim
        around[dim] = (count, count)
        placed = jax.lax.dynamic_slice_in_dim(
            jnp.pad(jnp.where(here, mine, 0), around),
            jnp.clip(count - shift, 0, count + width),
            count,
            dim,
        )
        # Every token is on one device, and zeros add nothing.
        return jax.lax.psum(placed, axis)

    return _mapped(sequence, on_device, (x,), dim, out_split=False)


def attend_streams(
    sequence: JointSequence,
    video: Heads,
    text: TextHeads,
    lengths: Int[Array, "b"],
    dtype: Any,
) -> tuple[Float[Array, "b h m n"], Float[Array, "b h tm tn"]]:
    """Attention of text and video tokens on all tokens that count.

    Args:
        sequence: with text after video.
        video: q, k and v of the joint sequence, in the layout of
            :func:`tpuport.core.layers.joint_sequence.to_heads`, with anything finite in
            the places of text and padding.
        text: q, k and v of the text alone. All are rounded to ``dtype``.
        lengths: number of leading text tokens that count, integers [B].

    Returns:
        The result for the joint sequence, and for the text alone, each in the layout of
        its queries and in ``dtype``.
    """
    dim = 3 if sequence.feature_major else 2
    count = sequence.length - sequence.text

    def counted(v: Float[Array, "b h _ _"], counts: Bool[Array, "#b _"]) -> Array:
        """``v``, 0 for tokens that do not count; ``counts`` is [1 or B, tokens]."""
        return jnp.where(jnp.expand_dims(counts, (1, 5 - dim)), v, 0)

    lengths = lengths.astype(jnp.int32)
    q, k, v = video
    v = counted(v, (jnp.arange(sequence.padded) < count)[None])
    text_q, text_k, text_v = text
    text_v = counted(text_v, jnp.arange(sequence.text) < lengths[:, None])
    q, k, v = (
        put_text(sequence, whole.astype(dtype), part.astype(dtype), dim)
        for whole, part in ((q, text_q), (k, text_k), (v, text_v))
    )
    out = sequence_attention(
        sequence.active,
        q,
        k,
        v,
        kv_len=sequence.length,
        kv_lengths=lengths + count,
        feature_major=sequence.feature_major,
    )
    return out, take_text(sequence, out, dim)


def _window(
    sequence: JointSequence, x: Float[Array, "b ..."], dim: int
) -> tuple[int, Any, Any, Bool[Array, "..."]]:
    """A window of a device's tokens that holds all its text.

    Returns:
        The window's width, its first index among the device's tokens, the index in the
        text of its first token, and which of its tokens are text, of one dim that is
        not 1.
    """
    width = min(sequence.text, x.shape[dim])
    axis = sequence.active.context.axis(TOKENS)
    first = 0 if axis is None else jax.lax.axis_index(axis) * x.shape[dim]
    start = sequence.length - sequence.text
    window = jnp.clip(start - first, 0, x.shape[dim] - width)
    shift = first + window - start
    index = shift + jnp.arange(width)
    others = tuple(d for d in range(x.ndim) if d != dim)
    here = jnp.expand_dims((index >= 0) & (index < sequence.text), others)
    return width, window, shift, here


def _mapped(
    sequence: JointSequence,
    run: Any,
    arrays: tuple[Float[Array, "b ..."], ...],
    dim: int,
    *,
    out_split: bool,
) -> Float[Array, "b ..."]:
    """``run`` on every device; the first of ``arrays`` is split along its tokens."""
    context = sequence.active.context
    first = arrays[0]
    whole: list[str | None] = [None] * first.ndim
    whole[0] = context.axis(BATCH, first.shape[0])
    if first.ndim == 4:
        whole[1] = context.axis(HEADS, first.shape[1])
    split = list(whole)
    split[dim] = context.axis(TOKENS)
    axes = [tuple(split), *(tuple(whole) for _ in arrays[1:])]
    result = tuple(split if out_split else whole)
    return on_devices(context.mesh, run, arrays, axes, result)
