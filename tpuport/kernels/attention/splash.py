"""Attention on TPU through our own Pallas kernel, with exact padding.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq queries, Lk keys),
D head dim of queries and keys, Dv head dim of values.

The kernel itself and how it is written: ``splash_kernel.py``. Here a call is checked,
its arrays are brought into the shapes that the kernel takes, and back.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tpuport.kernels.attention.problem import (
    KeyOptions,
    Options,
    Problem,
    describe,
    describe_feature_major,
)
from tpuport.kernels.attention.splash_blocks import (
    RESERVED,
    SplashBlocks,
    default_blocks,
    default_lag,
    padded_dim,
    vmem_bytes,
    vmem_limit,
)
from tpuport.kernels.attention.splash_kernel import Plan, run
from tpuport.kernels.padding import ceil_div, pad_dim

LOG2_E = math.log2(math.e)
# Beyond this the contraction takes more than two passes of the matrix unit and the
# blocks get small; nothing was measured there.
MOST_HEAD_DIM = 256
MOST_KEYS = 1 << 22


def splash_refusal(
    problem: Problem,
    *,
    blocks: SplashBlocks | None = None,
    chip: str = "v6e",
) -> str | None:
    """Why the kernel cannot do this exactly, or None if it can.

    Raises:
        ValueError: an unknown chip.
    """
    if problem.platform != "tpu" and not problem.interpret:
        return (
            f"splash compiles for TPU only, not for {problem.platform!r} "
            "(interpret=True runs it anywhere, slowly)"
        )
    if problem.mask_shape is not None:
        kind = "bool" if problem.mask_is_bool else "float"
        return (
            f"splash takes no mask array, got a {kind} mask of shape "
            f"{list(problem.mask_shape)}; it takes is_causal, window and kv_lengths"
        )
    if problem.dtype not in ("bfloat16", "float32"):
        return f"splash takes bfloat16 and float32, got {problem.dtype}"
    if 0 in (
        problem.batch,
        problem.heads,
        problem.q_len,
        problem.kv_len,
        problem.v_dim,
    ):
        return "splash takes no empty arrays"
    widest = max(problem.head_dim, problem.v_dim)
    if widest > MOST_HEAD_DIM:
        return f"splash takes head dims up to {MOST_HEAD_DIM}, got {widest}"
    if problem.kv_len > MOST_KEYS:
        return f"splash takes up to {MOST_KEYS} keys, got {problem.kv_len}"
    limit = vmem_limit(chip)
    if blocks is not None:
        size = vmem_bytes(
            blocks, problem.head_dim, problem.v_dim, itemsize=_itemsize(problem)
        )
        if size > limit:
            return (
                f"{blocks} take {size} bytes of VMEM at head dim {problem.head_dim}; "
                f"{chip} has {limit} for them"
            )
    return None


def splash_attention(
    q: Float[Array, "b h lq d"],
    k: Float[Array, "b hkv lk d"],
    v: Float[Array, "b hkv lk dv"],
    *,
    window: tuple[int, int] | None = None,
    blocks: SplashBlocks | None = None,
    chip: str = "v6e",
    platform: str = "tpu",
    interpret: bool = False,
    **options: Unpack[Options],
) -> Float[Array, "b h lq dv"]:
    """Same contract as ``reference_attention`` for what it does not refuse.

    Args:
        q, k, v: [B, H, Lq, D], [B, Hkv, Lk, D] and [B, Hkv, Lk, Dv], bfloat16 or
            float32; the products of float32 are float32 products.
        window: (left, right): query i sees keys i - left .. i + right; combines with
            the options.
        blocks: tiles; None means ``default_blocks``.
        chip: what the program is for: "v5e", "v5p", "v6e", "v7x".
        platform: where the program will run; only "tpu" unless ``interpret``.
        interpret: run the kernel's program op by op, on any platform.

    Returns:
        [B, H, Lq, Dv], in the dtype of ``q``; 0 where no key is allowed.

    Raises:
        NotImplementedError: see ``splash_refusal``.
        ValueError: shapes or dtypes that do not fit together, a negative window, an
            unknown chip.
    """
    problem = describe(
        q, k, v, window=window, platform=platform, interpret=interpret, **options
    )
    if _bounds(problem) == (None, None) and not problem.has_lengths:
        # Nothing is turned or padded outside of the kernel.
        lengths = jnp.full((problem.batch,), problem.kv_len, jnp.int32)
        given = (problem, q, k, v, lengths)
        return _call(*given, blocks=blocks, chip=chip, token_major=True)
    out = splash_feature_major(
        q.swapaxes(2, 3),
        k.swapaxes(2, 3),
        v.swapaxes(2, 3),
        window=window,
        blocks=blocks,
        chip=chip,
        platform=platform,
        interpret=interpret,
        **options,
    )
    return out.swapaxes(2, 3)


def _call(
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    blocks: SplashBlocks | None,
    chip: str,
    kv_len: int | None = None,
    **order: Any,
) -> jax.Array:
    """The kernel on arrays of any order, with a head dim that is a multiple of 16.

    Args:
        lengths: how many keys count, int32 [B].
        order: fields of the plan that say where tokens and features lie.
    """
    if refusal := splash_refusal(problem, blocks=blocks, chip=chip):
        raise NotImplementedError(refusal)
    blocks = blocks or default_blocks(
        problem.q_len,
        problem.kv_len,
        max(problem.head_dim, problem.v_dim),
        chip=chip,
        itemsize=_itemsize(problem),
    )
    q, factor = with_factor(q, problem.scale)
    plan = splash_plan(problem, blocks, factor, chip=chip, kv_len=kv_len)
    plan = replace(plan, **order)
    features = q.ndim - (1 if plan.token_major else 2)

    def keys(x: jax.Array, size: int) -> jax.Array:
        x = pad_dim(x, features, padded_dim(size))
        # The last block of queries may be short: what the kernel makes of the rest of
        # it meets nothing else and is never written.
        return x if order else pad_dim(x, 3, plan.kv_blocks * blocks.kv)

    out = run(
        plan,
        lengths,
        pad_dim(q, features, padded_dim(problem.head_dim)),
        keys(k, problem.head_dim),
        keys(v, problem.v_dim),
        vmem_limit=vmem_limit(chip) + RESERVED,
        interpret=problem.interpret,
    )
    made = problem.v_dim
    return out[..., :made] if plan.token_major else out[..., :made, :]


def splash_feature_major(
    q: Float[Array, "b h d lq"],
    k: Float[Array, "b hkv d lk"],
    v: Float[Array, "b hkv dv lk"],
    *,
    window: tuple[int, int] | None = None,
    blocks: SplashBlocks | None = None,
    chip: str = "v6e",
    platform: str = "tpu",
    interpret: bool = False,
    **options: Unpack[KeyOptions],
) -> Float[Array, "b h dv lq"]:
    """``splash_attention`` on arrays as the kernel takes them, head dim before tokens.

    Arrays whose head dim is a multiple of 16 and whose keys fill whole blocks are not
    copied.

    Returns:
        [B, H, Dv, Lq], in the dtype of ``q``; 0 where no key is allowed.
    """
    problem = describe_feature_major(
        q, k, v, window=window, platform=platform, interpret=interpret, **options
    )
    kv_len = options.get("kv_len")
    kv_len = problem.kv_len if kv_len is None else kv_len
    v, lengths = _hide_values(v, options, kv_len)
    given = (problem, q, k, v, lengths)
    return _call(*given, blocks=blocks, chip=chip, kv_len=kv_len)


def splash_in_parts(
    q: Float[Array, "p b h d l"],
    k: Float[Array, "p b hkv d l"],
    v: Float[Array, "p b hkv dv l"],
    *,
    blocks: SplashBlocks,
    chip: str = "v6e",
    platform: str = "tpu",
    interpret: bool = False,
    **options: Unpack[KeyOptions],
) -> Float[Array, "p b h dv l"]:
    """``splash_feature_major`` of tokens that lie in P arrays, which nobody joins.

    Args:
        blocks: tiles that divide the tokens of an array.
        options: with ``hidden``: ``v`` is zero where a key does not count.
    """

    def joined(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[1:4], len(x) * x.shape[4]), x.dtype)

    problem = describe_feature_major(
        joined(q), joined(k), joined(v), platform=platform, interpret=interpret,
        **options,
    )  # fmt: skip
    kv_len = options.get("kv_len")
    kv_len = problem.kv_len if kv_len is None else kv_len
    given = (problem, q, k, v, _lengths(problem.batch, options, kv_len))
    return _call(*given, blocks=blocks, chip=chip, kv_len=kv_len, parts=len(q))


def with_factor(q: jax.Array, scale: float) -> tuple[jax.Array, float]:
    """q [B, H, D, Lq] and what its scores are multiplied by to be exponents of 2.

    The factor is above 0, since the kernel takes the maximum of the scores before. A
    sign goes to ``q``, and so does a scale of 0.
    """
    factor = scale * LOG2_E
    if factor > 0:
        return q, factor
    return (q * 0, 1.0) if factor == 0 else (-q, -factor)


def splash_plan(
    problem: Problem,
    blocks: SplashBlocks,
    factor: float,
    *,
    chip: str,
    kv_len: int | None = None,
    partial: bool = False,
) -> Plan:
    """The static part of a call; see :class:`Plan`. ``kv_len`` None counts all keys."""
    left, right = _bounds(problem)
    kv_blocks = ceil_div(problem.kv_len, blocks.kv)
    return Plan(
        blocks=blocks,
        groups=problem.groups,
        factor=factor,
        left=left,
        right=right,
        has_lengths=problem.has_lengths,
        kv_len=problem.kv_len if kv_len is None else kv_len,
        q_blocks=ceil_div(problem.q_len, blocks.q),
        kv_blocks=kv_blocks,
        lag=default_lag(max(problem.head_dim, problem.v_dim), chip),
        partial=partial,
    )


def _bounds(problem: Problem) -> tuple[int | None, int | None]:
    """How far to the left and right of its own index a query sees; None for any."""
    left, right = problem.window or (None, None)
    if problem.is_causal:
        right = 0
    # A window that reaches over everything is none.
    if left is not None and left >= problem.q_len - 1:
        left = None
    if right is not None and right >= problem.kv_len - 1:
        right = None
    return left, right


def _hide_values(
    v: jax.Array, options: KeyOptions, kv_len: int
) -> tuple[jax.Array, jax.Array]:
    """v [B, Hkv, Dv, Lk] that is 0 where a key does not count, and how many count."""
    batch, _, _, size = v.shape
    lengths = _lengths(batch, options, kv_len)
    all_count = options.get("kv_lengths") is None and kv_len == size
    if not (all_count or options.get("hidden")):
        counts = (jnp.arange(size) < lengths[:, None])[:, None, None, :]
        v = jnp.where(counts, v, 0)
    return v, lengths


def _lengths(batch: int, options: KeyOptions, kv_len: int) -> jax.Array:
    """How many keys count, int32 [B]."""
    kv_lengths = options.get("kv_lengths")
    if kv_lengths is None:
        return jnp.full((batch,), kv_len, jnp.int32)
    return jnp.clip(kv_lengths, 0, kv_len).astype(jnp.int32)


def _itemsize(problem: Problem) -> int:
    return jnp.dtype(problem.dtype).itemsize
