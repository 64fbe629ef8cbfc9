"""One override of ``scaled_dot_product_attention``, and how it is split over a mesh.

Legend: B batch, H heads, L tokens (Lq queries, Lk keys), D head dim.

The contract is torch's, whole: boolean and additive masks that broadcast, ``is_causal``
aligned to the top left, ``scale``, grouped heads, any number of leading dims, and a row
without an allowed key gives 0. What cannot be honoured (dropout) is refused.
Source: torch/nn/functional.py, ``scaled_dot_product_attention``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tpuport.core import compat
from tpuport.core.ops import OpContext, OpOverride
from tpuport.errors import AttentionError

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPolicy:
    """Which mesh axis splits which dim of q, k and v; a model hands one in.

    ``None`` leaves the dim whole. Heads and batch are split where the axis divides
    them. Queries are split over ``sequence`` at any length: they are padded to the
    axis size and the padding is cut off again; keys and values are gathered.
    """

    batch: str | None = "dp"
    heads: str | None = "tp"
    sequence: str | None = "sp"


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRecord:
    """What one traced attention call runs as.

    Attributes:
        query: shape [B, H, Lq, D], without the padding of a split.
        key: shape [B, Hkv, Lk, D].
        implementation: the kernel that was chosen.
        reason: why, including what was passed over.
        split: mesh axis per dim of the query, ``None`` where whole.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    implementation: str
    reason: str
    split: tuple[str | None, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def _four_dims(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, tuple[int, ...]]:
    """q, k, v and the mask as four dims, and the leading dims of the result.

    The dims before the last three broadcast, as in torch, and are made one. The third
    last is the heads, also of an input of three dims: there torch counts the groups of
    ``enable_gqa`` too. Heads are left as they are.
    """
    import jax.numpy as jnp

    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise ValueError(
            "scaled_dot_product_attention needs at least [L, D]; got "
            f"{query.shape}, {key.shape}, {value.shape}"
        )
    rank = max(query.ndim, key.ndim, value.ndim)
    if mask is not None and mask.ndim > rank:
        raise ValueError(
            f"attn_mask of shape {mask.shape} does not broadcast to the scores of "
            f"query {query.shape} and key {key.shape}: it has more dims"
        )
    leading = jnp.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    batch = leading or (1,)

    def lift(x: jax.Array) -> jax.Array:
        return x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)

    def flatten(x: jax.Array) -> jax.Array:
        x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
        return x.reshape((math.prod(batch), *x.shape[-3:]))

    if mask is not None:
        mask = lift(mask)
        if all(size == 1 for size in mask.shape[:-3]):
            mask = mask.reshape((1, *mask.shape[-3:]))
        else:
            mask = flatten(mask)
    q, k, v = (flatten(lift(x)) for x in (query, key, value))
    return q, k, v, mask, leading


def _match_heads(
    q: jax.Array, k: jax.Array, v: jax.Array, *, enable_gqa: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[B, H, Lq, D], [B, Hkv, Lk, D], [B, Hkv, Lk, Dv] where Hkv divides H.

    Raises:
        ValueError: the head counts neither broadcast nor, with ``enable_gqa``, divide
            those of the query.
    """
    import jax.numpy as jnp

    heads, key_heads, value_heads = (x.shape[1] for x in (q, k, v))
    found = f"{heads} query heads on {key_heads} key and {value_heads} value heads"
    if enable_gqa:
        if 0 in (key_heads, value_heads) or heads % key_heads or heads % value_heads:
            raise ValueError(f"{found}: with enable_gqa=True both must divide")
    else:
        wanted = max(heads, key_heads, value_heads)
        if any(n not in (1, wanted) for n in (heads, key_heads, value_heads)):
            raise ValueError(f"{found}: pass enable_gqa=True for grouped heads")
        q = jnp.broadcast_to(q, (q.shape[0], wanted, *q.shape[2:]))
    if key_heads != value_heads:
        count = math.lcm(key_heads, value_heads)
        k, v = (jnp.repeat(x, count // x.shape[1], axis=1) for x in (k, v))
    return q, k, v


def _check(
    query: jax.Array,
    mask: jax.Array | None,
    dropout_p: float,
    is_causal: bool,
) -> None:
    import jax.numpy as jnp

    if dropout_p:
        raise AttentionError(
            f"scaled_dot_product_attention with dropout_p={dropout_p}: dropout draws "
            "random numbers that no port reproduces; call the module in eval mode"
        )
    if mask is not None and is_causal:
        raise RuntimeError(
            "scaled_dot_product_attention: attn_mask and is_causal exclude each other, "
            "as in torch"
        )
    if mask is not None and not (
        mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.floating)
    ):
        raise TypeError(
            f"attn_mask of dtype {mask.dtype}: expected bool or floating point, as in "
            f"torch (query is {query.dtype})"
        )


def scaled_dot_product_attention(
    context: OpContext,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attn_mask: jax.Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> jax.Array:
    """Attention of [..., H, Lq, D] queries on [..., Hkv, Lk, D] keys.

    Returns [..., H, Lq, Dv] in the dtype of ``query``.

    Raises:
        AttentionError: dropout was asked for, or the implementation named in the
            context cannot do this call.
        RuntimeError: ``attn_mask`` together with ``is_causal``, as torch does.
        TypeError: a mask that is neither bool nor floating point.
        ValueError: shapes or head counts do not fit together.
    """
    _check(query, attn_mask, dropout_p, is_causal)
    q, k, v, mask, leading = _four_dims(query, key, value, attn_mask)
    q, k, v = _match_heads(q, k, v, enable_gqa=enable_gqa)
    out = _split(context, q, k, v, mask, is_causal=is_causal, scale=scale)
    rank = max(query.ndim, key.ndim, value.ndim)
    if rank == 2:
        return out[0, 0]
    return out.reshape(*leading, *out.shape[1:])


def _split(
    context: OpContext,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> jax.Array:
    """Run the kernel on each device's part of q: [B, H, Lq, D]."""
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from tpuport.kernels.attention import attention

    def kernel(
        q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None
    ) -> jax.Array:
        return attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=is_causal,
            scale=scale,
            platform=context.platform,
            implementation=context.implementation,
        )

    sizes = dict(context.mesh.shape) if context.mesh is not None else {}
    policy = context.attention

    def axis(name: str | None, *counts: int) -> str | None:
        size = sizes.get(name, 1) if name else 1
        return name if size > 1 and all(n % size == 0 for n in counts) else None

    batch_axis = axis(policy.batch, q.shape[0])
    head_axis = axis(policy.heads, q.shape[1])
    # One key head serves all queries and is handed whole to every device.
    kv_head_axis = axis(policy.heads, k.shape[1]) if k.shape[1] > 1 else None
    if k.shape[1] > 1 and kv_head_axis is None:
        head_axis = None
    # A causal row needs its position, which a slice of the queries does not carry.
    sequence_axis = None if is_causal else axis(policy.sequence)
    length = q.shape[2]
    if sequence_axis:
        padding = -length % sizes[sequence_axis]
        q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
        if mask is not None and mask.shape[2] > 1:
            mask = jnp.pad(mask, ((0, 0), (0, 0), (0, padding), (0, 0)))
    split = (batch_axis, head_axis, sequence_axis, None)
    kv_split = (batch_axis, kv_head_axis, None, None)
    _record(
        context,
        (q, k, v, mask),
        length=length,
        is_causal=is_causal,
        split=split,
        kv_split=kv_split,
    )
    if not any(split):
        return kernel(q, k, v, mask)

    q_spec = PartitionSpec(*split)
    kv_spec = PartitionSpec(*kv_split)
    if mask is None:
        out = compat.shard_map(
            lambda q, k, v: kernel(q, k, v, None),
            mesh=context.mesh,
            in_specs=(q_spec, kv_spec, kv_spec),
            out_specs=q_spec,
        )(q, k, v)
    else:
        mask_spec = PartitionSpec(
            *(a if n > 1 else None for a, n in zip(split, mask.shape, strict=True))
        )
        out = compat.shard_map(
            kernel,
            mesh=context.mesh,
            in_specs=(q_spec, kv_spec, kv_spec, mask_spec),
            out_specs=q_spec,
        )(q, k, v, mask)
    return out[:, :, :length]


def _record(
    context: OpContext,
    arrays: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None],
    *,
    length: int,
    is_causal: bool,
    split: tuple[str | None, ...],
    kv_split: tuple[str | None, ...],
) -> None:
    """Note what this call runs as, once per distinct call.

    ``arrays`` are q, k, v and the mask as they are split; ``length`` is that of the
    queries without padding.
    """
    import jax

    from tpuport.kernels.attention import select
    from tpuport.kernels.problem import describe

    q, k, v, mask = arrays
    sizes = dict(context.mesh.shape) if context.mesh is not None else {}

    def local(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        shape = tuple(
            n // (sizes[a] if a else 1) if n > 1 else n
            for n, a in zip(x.shape, axes, strict=True)
        )
        return jax.ShapeDtypeStruct(shape, x.dtype)

    selection = select(
        describe(
            local(q, split),
            local(k, kv_split),
            local(v, kv_split),
            mask=None if mask is None else local(mask, split),
            is_causal=is_causal,
            kv_lengths=None,
            platform=context.platform,
            interpret=False,
        ),
        context.implementation,
    )
    reason = "; ".join(
        [selection.reason, *(f"not {n}: {why}" for n, why in selection.passed_over)]
    )
    record = AttentionRecord(
        query=(*q.shape[:2], length, q.shape[3]),
        key=tuple(k.shape),
        implementation=selection.implementation,
        reason=reason,
        split=split,
    )
    if record not in context.records:
        context.records.append(record)


def _make(context: OpContext) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return scaled_dot_product_attention(context, *args, **kwargs)

    return call


ATTENTION = OpOverride(
    targets=(
        "torch.nn.functional.scaled_dot_product_attention",
        "torch.ops.aten.scaled_dot_product_attention",
    ),
    make=_make,
    owner="tpuport.core.attention",
    reason="masks, lengths and splits honoured exactly; no Lq x Lk array",
)
"""The override every runtime installs."""
