"""Transformer blocks on one joint sequence, in the layouts that a TPU wants.

Letters: B batch, L tokens with padding, E width, H heads, D head dim.

Upstream keeps text and video tokens apart and joins and parts them in every block,
holds pairs of rotary elements next to each other, and turns arrays around every
attention.
Here all tokens are in one array that is split over the sequence axis of the mesh, what
differs between text and video is chosen per token, and queries, keys and values have
their tokens last on a TPU. The functions take and give JAX arrays; statistics, rotation
and modulation are in float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpuport.core.sequence_parallel import (
    degrees_of,
    padded_length,
    sequence_attention,
)

if TYPE_CHECKING:
    import jax

    from tpuport.core.active import Active


@dataclass(frozen=True, eq=False)
class JointSequence:
    """Where the tokens of a joint sequence are.

    Attributes:
        active: what is being traced.
        text: tokens of text.
        length: tokens in all, without padding, which comes last.
        padded: tokens with padding, a multiple of the sequence axis.
        text_first: whether text comes before video.
        divided: whether its tokens are split over the sequence axis.
    """

    active: Active
    text: int
    length: int
    padded: int
    text_first: bool = True
    divided: bool = True

    @classmethod
    def of(
        cls,
        active: Active,
        *,
        text: int,
        length: int,
        batch: int,
        heads: int,
        head_dim: int,
        text_first: bool = True,
    ) -> JointSequence:
        """A sequence padded for the mesh and the chip that is being traced for.

        Args:
            active: what is being traced.
            text: tokens of text.
            length: tokens in all.
            batch, heads, head_dim: of its attention.
            text_first: whether text comes before video.
        """
        context = active.context
        padded = padded_length(
            length,
            active.axis_size(context.attention.sequence),
            platform=context.platform,
            head_dim=head_dim,
            chip=context.chip,
            ring=degrees_of(active, batch, heads).ring,
        )
        return cls(active, text, length, padded, text_first)

    @property
    def feature_major(self) -> bool:
        """Whether queries, keys and values have their tokens last."""
        return self.active.context.platform == "tpu"

    @property
    def sums_partial_products(self) -> bool:
        """Whether products of weights whose columns are split are parts of a sum.

        These go through the network between the devices of the head axis: in the
        weights' dtype, as those of any other linear layer, not in float32.
        """
        return self.active.axis_size(self.active.context.attention.heads) > 1

    def split(self, x: jax.Array) -> jax.Array:
        """``x`` [B, L, ...] with its tokens split over the sequence axis."""
        if not self.divided:
            return self.whole(x)
        return self._constrain(x, self.active.context.attention.sequence)

    def whole(self, x: jax.Array) -> jax.Array:
        """``x`` [B, L, ...] with all its tokens on every device of the axis."""
        return self._constrain(x, None)

    def pad(self, x: jax.Array) -> jax.Array:
        """[B, tokens, E] with zeros for padding, split.

        What makes ``x`` runs whole on every device: a partitioner that joins tokens of
        uneven parts moves more than it saves, and takes minutes to compile.
        """
        from tpuport.kernels.padding import pad_dim

        return self.split(pad_dim(self.whole(x), 1, self.padded))

    def is_text(self) -> jax.Array:
        """Which tokens are text, bool [L]."""
        import jax.numpy as jnp

        index = jnp.arange(self.padded)
        if self.text_first:
            return index < self.text
        return (index >= self.length - self.text) & (index < self.length)

    def choose(self, text: jax.Array, video: jax.Array) -> jax.Array:
        """[B, L, E] with a row for all text tokens and one for all others.

        Args:
            text: of shape [B, E].
            video: of shape [B, E]; the very same array gives [B, 1, E].
        """
        import jax.numpy as jnp

        if text is video:
            return video[:, None]
        return jnp.where(self.is_text()[:, None], text[:, None], video[:, None])

    def _constrain(self, x: jax.Array, axis: str | None) -> jax.Array:
        from tpuport.core.module import constrain

        policy = self.active.context.attention
        sizes = self.active.axis_size
        batch = policy.batch if sizes(policy.batch) > 1 else None
        along = axis if sizes(axis) > 1 else None
        return constrain(self.active.context.mesh, x, batch, along)


def normalise(x: jax.Array, eps: float, axis: int = -1) -> jax.Array:
    """``x`` less its mean, over its standard deviation, in float32.

    Two passes, so that a mean far from 0 costs no digits.
    """
    import jax
    import jax.numpy as jnp

    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps)


def layer_norm(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, eps: float
) -> jax.Array:
    """A layer norm over the last dim, in float32; ``weight`` and ``bias`` are [E]."""
    import jax.numpy as jnp

    out = normalise(x, eps)
    if weight is not None:
        out = out * weight.astype(jnp.float32)
    return out if bias is None else out + bias.astype(jnp.float32)


def modulated_norm(
    sequence: JointSequence,
    x: jax.Array,
    *,
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: float,
    text: tuple[jax.Array, jax.Array],
    video: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """A layer norm and ``y * (1 + scale) + shift``, as one scale and one shift.

    Args:
        sequence: which tokens are text.
        x: of shape [B, L, E].
        weight, bias: of the norm, [E]; ``None`` where it has none.
        eps: of the norm.
        text: (shift, scale) of text tokens, each [B, E].
        video: those of all others.

    Returns:
        of the shape and dtype of ``x``.
    """
    import jax.numpy as jnp

    def folded(shift: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = 1 + scale.astype(jnp.float32)
        shift = shift.astype(jnp.float32)
        if bias is not None:
            shift = shift + scale * bias.astype(jnp.float32)
        if weight is not None:
            scale = scale * weight.astype(jnp.float32)
        return shift, scale

    shift, scale = folded(*video)
    text_shift, text_scale = shift, scale
    if any(one is not other for one, other in zip(text, video, strict=True)):
        text_shift, text_scale = folded(*text)
    out = normalise(x, eps)
    out = out * sequence.choose(text_scale, scale)
    return (out + sequence.choose(text_shift, shift)).astype(x.dtype)


def gated(
    sequence: JointSequence,
    x: jax.Array,
    update: jax.Array,
    *,
    text: jax.Array,
    video: jax.Array,
) -> jax.Array:
    """``x + gate * update`` with a gate [B, E] for text and one for video tokens."""
    import jax.numpy as jnp

    wide = update.astype(jnp.float32)
    gate = sequence.choose(text, video).astype(jnp.float32)
    return sequence.split((x.astype(jnp.float32) + gate * wide).astype(x.dtype))


def to_heads(
    sequence: JointSequence,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    head_dim: int,
) -> jax.Array:
    """A projection of [B, L, E] to heads, in float32.

    Args:
        sequence: tells the layout.
        x: of shape [B, L, E].
        weight: of shape [H D, E].
        bias: of shape [H D], or ``None``.
        head_dim: D.

    Returns:
        of shape [B, H, D, L] if ``sequence.feature_major``, else [B, H, L, D].
    """
    import jax.numpy as jnp

    heads = weight.shape[0] // head_dim
    split = weight.reshape(heads, head_dim, weight.shape[1])
    equation = "ble,hde->bhdl" if sequence.feature_major else "ble,hde->bhld"
    out = jnp.einsum(equation, x, split, preferred_element_type=jnp.float32)
    if bias is None:
        return out
    wide = bias.astype(jnp.float32).reshape(heads, head_dim)
    return out + (wide[:, :, None] if sequence.feature_major else wide[:, None])


def dense(
    sequence: JointSequence,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    row_parallel: bool = False,
) -> jax.Array:
    """A linear layer that is not rounded, for what is computed next in float32.

    Args:
        sequence: tells what partial products are summed up in.
        x: of shape [..., E].
        weight: of shape [F, E].
        bias: of shape [F], or ``None``.
        row_parallel: columns of the weight may be split between devices.

    Returns:
        float32 [..., F].
    """
    import jax.numpy as jnp

    narrow = row_parallel and sequence.sums_partial_products
    out = jnp.einsum(
        "...e,fe->...f",
        x,
        weight,
        preferred_element_type=x.dtype if narrow else jnp.float32,
    ).astype(jnp.float32)
    return out if bias is None else out + bias.astype(jnp.float32)


def from_heads(
    sequence: JointSequence,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    """The projection [B, L, E] of what attention gave.

    Args:
        sequence: tells the layout.
        x: as :func:`to_heads` gives it.
        weight: of shape [E, H D].
        bias: of shape [E], or ``None``.

    Returns:
        of shape [B, L, E]: float32, or the dtype of ``x`` where partial products of
        several devices are summed up.
    """
    import jax.numpy as jnp

    heads = x.shape[1]
    split = weight.reshape(weight.shape[0], heads, -1)
    equation = "bhdl,ehd->ble" if sequence.feature_major else "bhld,ehd->ble"
    kept = x.dtype if sequence.sums_partial_products else jnp.float32
    out = jnp.einsum(equation, x, split, preferred_element_type=kept)
    if bias is None:
        return out
    return out.astype(jnp.float32) + bias.astype(jnp.float32)


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """A layer norm, or an RMS norm, over the head dim.

    Attributes:
        weight, bias: of shape [D]; ``None`` where the norm has none.
        eps: of the norm.
        centre: take the mean off; without it this is an RMS norm.
    """

    weight: jax.Array | None
    bias: jax.Array | None
    eps: float
    centre: bool = True


def turned(
    sequence: JointSequence,
    x: jax.Array,
    norm: HeadNorm | None,
    tables: tuple[jax.Array, jax.Array] | None,
    dtype: Any,
) -> jax.Array:
    """Queries or keys: normed and rotated in float32, rounded once.

    Both halves of the head dim go their own way up to the end, so that no float32 array
    of all heads is held.

    Args:
        sequence: tells the layout.
        x: as :func:`to_heads` gives it, of weights in the order of halves.
        norm: over the head dim; of ``x`` as rounded to ``dtype``, as upstream norms
            what its projection was rounded to. ``None`` for none.
        tables: as :func:`rotary_tables` gives them; ``None`` for no rotation.
        dtype: of the result.
    """
    import jax
    import jax.numpy as jnp

    axis = 2 if sequence.feature_major else 3
    mean: Any = 0.0
    inverse: Any = 1.0
    if norm is not None:
        x = x.astype(dtype)
        wide = x.astype(jnp.float32)
        if norm.centre:
            mean = jnp.mean(wide, axis, keepdims=True)
        power = jnp.mean(jnp.square(wide - mean), axis, keepdims=True)
        inverse = jax.lax.rsqrt(power + norm.eps)

    def along(vector: jax.Array, half: int) -> jax.Array:
        part = jnp.split(vector.astype(jnp.float32), 2)[half]
        return part[:, None] if sequence.feature_major else part

    def normed(part: jax.Array, half: int) -> jax.Array:
        out = (part.astype(jnp.float32) - mean) * inverse
        if norm is not None and norm.weight is not None:
            out = out * along(norm.weight, half)
        if norm is not None and norm.bias is not None:
            out = out + along(norm.bias, half)
        return out

    if norm is None and tables is None:
        return x.astype(dtype)
    first, second = (
        normed(part, half) for half, part in enumerate(jnp.split(x, 2, axis))
    )
    if tables is not None:
        (cos, cos_2), (sin, sin_2) = (jnp.split(t, 2, axis - 2) for t in tables)
        first, second = first * cos - second * sin, second * cos_2 + first * sin_2
    return jnp.concatenate([first.astype(dtype), second.astype(dtype)], axis)


def norm_bound(
    head_dim: int, weight: jax.Array | None, bias: jax.Array | None
) -> jax.Array:
    """What the length of a vector that a :class:`HeadNorm` gives does not exceed.

    Normed elements have squares of at most D in all, whatever the input; rotation does
    not change a length. What rounding adds is allowed for.
    """
    import jax.numpy as jnp

    length = jnp.float32(head_dim**0.5 * 1.02)
    if weight is not None:
        length = length * jnp.abs(weight.astype(jnp.float32)).max()
    if bias is not None:
        length = length + 1.02 * jnp.linalg.norm(bias.astype(jnp.float32))
    return length


def rotary_tables(
    sequence: JointSequence, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Tables for all tokens, in the order of halves; text and padding do not turn.

    Args:
        sequence: where the video tokens are.
        cos, sin: of the video tokens, [tokens, D] with neighbours as pairs.

    Returns:
        cos and sin, float32 [D, L] if ``sequence.feature_major``, else [L, D].
    """
    import jax.numpy as jnp

    from tpuport.core.module import constrain

    def table(x: jax.Array, rest: float) -> jax.Array:
        x = constrain(sequence.active.context.mesh, x.astype(jnp.float32), None, None)
        halves = x.reshape(x.shape[0], -1, 2).swapaxes(1, 2).reshape(x.shape)
        before = sequence.text if sequence.text_first else 0
        after = sequence.padded - before - halves.shape[0]
        full = jnp.pad(halves, ((before, after), (0, 0)), constant_values=rest)
        full = constrain(sequence.active.context.mesh, full, None, None)
        return full.T if sequence.feature_major else full

    return table(cos, 1.0), table(sin, 0.0)


def attend(
    sequence: JointSequence,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dtype: Any,
    *,
    kv_lengths: jax.Array | None = None,
    bounds: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Attention of all tokens on those that are no padding.

    Args:
        sequence: tells the layout, the lengths and the mesh.
        q, k, v: as :func:`to_heads` gives them.
        dtype: what they are rounded to.
        kv_lengths: integers [B]: only so many leading tokens of an item count.
        bounds: of the lengths of queries and of keys, see :func:`norm_bound`; ``None``
            where there are none.

    Returns:
        of the shape of ``q``, in ``dtype``.
    """
    import jax.numpy as jnp

    if sequence.padded > sequence.length or kv_lengths is not None:
        index = jnp.arange(sequence.padded)
        counts = (index < sequence.length)[None]
        if kv_lengths is not None:
            counts = counts & (index < kv_lengths[:, None])
        shape = (-1, 1, 1, sequence.padded)
        if not sequence.feature_major:
            shape = (-1, 1, sequence.padded, 1)
        v = jnp.where(counts.reshape(shape), v, 0)
    bound = None
    if bounds is not None:
        head_dim = q.shape[2 if sequence.feature_major else 3]
        bound = bounds[0] * bounds[1] / head_dim**0.5
    return sequence_attention(
        sequence.active,
        q.astype(dtype),
        k.astype(dtype),
        v.astype(dtype),
        kv_len=sequence.length,
        kv_lengths=kv_lengths,
        score_bound=bound,
        feature_major=sequence.feature_major,
    )
