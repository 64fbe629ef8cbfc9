"""One attention call as data: its sizes and options, checked, without its arrays.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq queries, Lk keys),
D head dim of queries and keys, Dv head dim of values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


class Options(TypedDict, total=False):
    """What a call of attention may have beside q, k and v.

    Keys:
        mask: bool (True = may attend) or float (added to the scores), [B, H, Lq, Lk];
            any dim may be 1.
        is_causal: query i sees keys 0..i (aligned top left); combines with ``mask``.
        scale: factor of the scores; None means 1/sqrt(D).
        kv_lengths: integers of shape [B]; keys at an index >= length have weight 0.
    """

    mask: Shaped[Array, "_ _ _ _"] | None
    is_causal: bool
    scale: float | None
    kv_lengths: Int[Array, " b"] | None


class KeyOptions(Options, total=False):
    """Options for arrays with the head dim before the tokens.

    Keys:
        kv_len: only keys before this index count; None for all.
        hidden: the caller has made ``v`` zero at the keys that do not count, so that
            nothing needs to be done about them.
    """

    kv_len: int | None
    hidden: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What an implementation needs to know to accept or refuse a call.

    ``dtype`` is the name of the common dtype of q, k and v. ``mask_shape`` is None
    without a mask, ``mask_is_bool`` then False. ``scale`` is the factor of the scores.
    """

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_dim: int
    dtype: str
    mask_shape: tuple[int, ...] | None = None
    mask_is_bool: bool = False
    is_causal: bool = False
    has_lengths: bool = False
    window: tuple[int, int] | None = None
    scale: float
    platform: str = "cpu"
    interpret: bool = False

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def scores_per_head(self) -> int:
        """Size of the score matrix of one head, Lq x Lk."""
        return self.q_len * self.kv_len


def describe(
    q: Any,
    k: Any,
    v: Any,
    *,
    window: tuple[int, int] | None = None,
    platform: str = "cpu",
    interpret: bool = False,
    **options: Unpack[Options],
) -> Problem:
    """The problem of a call; anything with ``shape`` and ``dtype`` will do.

    Args:
        q, k, v: [B, H, Lq, D], [B, Hkv, Lk, D] and [B, Hkv, Lk, Dv].
        window: (left, right): query i sees keys i - left .. i + right; combines with
            the options.
        platform: "tpu", "cpu", ...: where the program will run.
        interpret: whether Pallas kernels are interpreted rather than compiled.

    Raises:
        ValueError: shapes or dtypes that do not fit together; the message has them.
        TypeError: there is no such option.
    """
    if unknown := options.keys() - Options.__optional_keys__:
        raise TypeError(f"attention has no option {', '.join(sorted(unknown))}")
    mask, kv_lengths = options.get("mask"), options.get("kv_lengths")
    shapes = f"q {_show(q)}, k {_show(k)}, v {_show(v)}"
    if not (len(q.shape) == len(k.shape) == len(v.shape) == 4):
        raise ValueError(f"attention takes arrays of 4 dims; got {shapes}")
    batch, heads, q_len, head_dim = q.shape
    kv_heads, kv_len, v_dim = k.shape[1], k.shape[2], v.shape[3]
    if k.shape[0] != batch or v.shape[0] != batch:
        raise ValueError(f"q, k and v differ in batch; got {shapes}")
    if k.shape[3] != head_dim or head_dim == 0:
        raise ValueError(f"q and k must share a head dim of at least 1; got {shapes}")
    if v.shape[1:3] != k.shape[1:3]:
        raise ValueError(f"k and v differ in heads or length; got {shapes}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{kv_heads} key/value heads do not divide {heads} query heads; "
            f"got {shapes}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v differ in dtype; got {shapes}")
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"attention takes floating-point arrays; got {shapes}")
    if mask is not None:
        _check_mask(mask, (batch, heads, q_len, kv_len), shapes)
    if kv_lengths is not None and (
        tuple(kv_lengths.shape) != (batch,)
        or not jnp.issubdtype(kv_lengths.dtype, jnp.integer)
    ):
        raise ValueError(
            f"kv_lengths must be integers of shape [{batch}]; got "
            f"{_show(kv_lengths)} with {shapes}"
        )
    if window is not None and min(window) < 0:
        raise ValueError(f"a window reaches 0 or more keys to each side; got {window}")
    return Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        v_dim=v_dim,
        dtype=jnp.dtype(q.dtype).name,
        mask_shape=None if mask is None else tuple(mask.shape),
        mask_is_bool=mask is not None and mask.dtype == jnp.bool_,
        is_causal=options.get("is_causal", False),
        has_lengths=kv_lengths is not None,
        window=window,
        scale=resolve_scale(options.get("scale"), head_dim),
        platform=platform,
        interpret=interpret,
    )


def describe_feature_major(
    q: Any,
    k: Any,
    v: Any,
    *,
    window: tuple[int, int] | None = None,
    platform: str = "cpu",
    interpret: bool = False,
    **options: Unpack[KeyOptions],
) -> Problem:
    """``describe`` of arrays whose head dim comes before the tokens: [B, H, D, L].

    Raises:
        ValueError: see ``describe``; its message has the shapes with the tokens first.
    """

    def turned(x: Any) -> Any:
        if len(x.shape) != 4:
            return x
        return jax.ShapeDtypeStruct((*x.shape[:2], x.shape[3], x.shape[2]), x.dtype)

    options.pop("kv_len", None)
    options.pop("hidden", None)
    return describe(
        turned(q),
        turned(k),
        turned(v),
        window=window,
        platform=platform,
        interpret=interpret,
        **cast(Options, options),
    )


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """``scale``, or 1/sqrt(D) where it is None, as torch has it."""
    return 1.0 / math.sqrt(head_dim) if scale is None else scale


def _check_mask(mask: Any, full: tuple[int, ...], shapes: str) -> None:
    fits = len(mask.shape) == 4 and all(
        have in (1, want) for have, want in zip(mask.shape, full, strict=True)
    )
    if not fits:
        raise ValueError(
            f"a mask must have 4 dims, each 1 or that of {list(full)}; got "
            f"{_show(mask)} with {shapes}"
        )
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.floating):
        raise ValueError(
            "a mask must be bool (True = may attend) or floating (added to the "
            f"scores); got {_show(mask)}"
        )


def _show(x: Any) -> str:
    return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"
