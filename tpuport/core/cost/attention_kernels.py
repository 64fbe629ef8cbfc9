"""The attention kernels that ``bench attention`` compares: ours, and jax's beside it.

jax's splash is the baseline, on full attention without options and nothing else; no run
takes it. Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq queries, Lk
keys), D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from tpuport.core.cost.attention_case import AttentionCase, Blocks
from tpuport.kernels.attention.splash import splash_attention
from tpuport.kernels.attention.splash_blocks import SplashBlocks
from tpuport.kernels.padding import ceil_div, pad_dim, round_up

# Far below any score and finite in bfloat16; exp(FAR - maximum) is 0.
FAR = -1e30
LANES = 128


def build(
    case: AttentionCase,
) -> tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct]]:
    """The call of a case whose blocks are chosen, and the arrays it takes.

    Raises:
        NotImplementedError: a dtype that is not costed of this kernel.
    """
    blocks = case.blocks
    assert blocks is not None
    q, k, v = (
        jax.ShapeDtypeStruct((1, case.heads, length, case.head_dim), case.dtype)
        for length in (case.q_len, case.kv_len, case.kv_len)
    )
    if case.implementation == "tpuport":
        tiles = SplashBlocks(**asdict(blocks))
        ours = functools.partial(splash_attention, blocks=tiles, chip=case.chip)
        return ours, [q, k, v]
    if case.dtype != "bfloat16":
        raise NotImplementedError("of jax's splash only bfloat16 is costed")
    return functools.partial(jax_splash, blocks=blocks), [q, k, v]


def jax_splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: Blocks,
    *,
    interpret: bool = False,
) -> jax.Array:
    """jax's splash kernel on full attention, on lengths that its blocks do not divide.

    Keys of the padding get a score of ``FAR`` by one feature more, 1 in each query: the
    matrix unit adds it, which takes fewer bundles than the kernel's own masks.

    Args:
        q: of shape [B, H, Lq, D].
        k, v: of shape [B, Hkv, Lk, D].
        blocks: tokens of its tiles.
        interpret: run the kernel's program op by op, on any platform.

    Returns:
        of shape [B, H, Lq, D].
    """
    batch, heads, q_len, dim = q.shape
    q_whole, kv_whole = round_up(q_len, blocks.q), round_up(k.shape[2], blocks.kv)
    q = (q.astype(jnp.float32) * dim**-0.5).astype(q.dtype)
    if missing := kv_whole - k.shape[2]:
        q = jnp.concatenate([q, jnp.ones((*q.shape[:3], 1), q.dtype)], 3)
        far = jnp.zeros((*k.shape[:2], missing, dim + 1), k.dtype).at[..., -1].set(FAR)
        k = jnp.concatenate([pad_dim(k, 3, dim + 1), far], 2)

    def whole(x: jax.Array, length: int) -> jax.Array:
        """[B Hkv, L, D], with lengths and widths that the kernel takes."""
        width = 64 if x.shape[3] <= 64 else round_up(x.shape[3], LANES)
        x = x.reshape(-1, *x.shape[2:])
        return pad_dim(pad_dim(x, 1, length), 2, width)

    kernel = splash_attention_kernel.make_splash_mha_single_device(
        # One mask for all heads; the kernel never looks at how many there are.
        splash_attention_mask.MultiHeadMask(
            [splash_attention_mask.FullMask((q_whole, kv_whole))]
        ),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=blocks.q,
            block_kv=blocks.kv,
            block_kv_compute=blocks.kv_compute,
        ),
        interpret=interpret,
    )
    out = kernel(whole(q, q_whole), whole(k, kv_whole), whole(v, kv_whole))
    return out.reshape(batch, heads, q_whole, -1)[:, :, :q_len, :dim]


def jax_blocks(case: AttentionCase) -> Blocks:
    """Large blocks that waste little padding and fit the VMEM that jax's kernel has.

    The maxima are those, of a few tried, with the fewest bundles on v6e.
    """
    computes: tuple[int, ...] = (1024, 512, 256, 128)
    most_q = most_kv = max(256, round_up(2048 // ceil_div(case.head_dim, LANES), 256))
    if case.head_dim <= 64:
        most_q, most_kv, computes = 3328, 2816, (256, 128)
    # Seen in the compiler's words; libtpu 0.0.42.1.
    limit = (32 if case.chip in ("v6e", "v7x") else 16) << 20
    while True:
        q = _even(case.q_len, most_q, LANES)
        kv = _even(case.kv_len, most_kv, LANES if case.kv_len <= LANES else 256)
        # Blocks that come and go and sums in float32; the compiler took 2.0 to 2.5
        # times as much (v5p).
        width, rows = (round_up(case.head_dim + more, LANES) for more in (1, 0))
        taken = 4 * (q + kv) * (width + rows) + 4 * q * (2 * LANES + rows)
        if 2.6 * taken <= limit or max(q, kv) <= 256:
            compute = next(size for size in computes if kv % size == 0)
            return Blocks(q=q, kv=kv, kv_compute=compute)
        most_q, most_kv = max(most_q - 256, 256), max(most_kv - 256, 256)


def _even(length: int, most: int, granule: int) -> int:
    """The smallest block of which as few cover a length as of ``most`` tokens."""
    return round_up(ceil_div(length, ceil_div(length, most)), granule)
