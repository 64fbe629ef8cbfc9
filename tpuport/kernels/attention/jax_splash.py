"""Attention on TPU through jax's own splash kernel, with padding that is exact.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq queries, Lk keys),
D head dim.

Why keys are masked through an extra feature
--------------------------------------------
The kernel wants lengths that its blocks divide. Zero keys appended to get there have
score 0, not weight 0, and keys beyond ``kv_lengths`` have any score. The kernel can
mask them by segment ids or by a function of the indices, but does so on every score
of every block. Here each query gets one more feature that is 1, and each key one that
is 0 if it counts and ``FAR`` if it does not: the matrix unit then adds 0 or ``FAR``
to the score, and exp(FAR - maximum) is exactly 0.

Instructions (bundles) of the kernel's forward program, blocks 2048/2048/512, bf16,
compiled for v6e with jax 0.10.2 and libtpu 0.0.42.1:

    head dim   unmasked   this feature   index function   segment ids
    64         12663      12683          13632            13836
    128        12815      12990          13775            14043

The feature costs memory only where D is a multiple of 128: q and k are then stored
128 wider. Below that the width is padded anyway. It also takes lengths that are known
only when the program runs, which an index function cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from tpuport.kernels.attention.problem import Problem, describe, resolve_scale
from tpuport.kernels.padding import ceil_div, pad_dim, round_up

LANES = 128
# Far below any score, far above the kernel's own mask value (-2.4e38), and finite in
# bfloat16, so that a batch item without any key gives a finite result to replace.
FAR = -1e30


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSizes:
    """Tokens per step of the kernel.

    ``q`` queries meet ``kv`` keys held in VMEM, ``kv_compute`` keys at a time. The
    lengths are padded to multiples of ``q`` and ``kv``.
    """

    q: int
    kv: int
    kv_compute: int

    def __post_init__(self) -> None:
        for name in ("q", "kv", "kv_compute"):
            size = getattr(self, name)
            if size < LANES or size % LANES:
                raise ValueError(
                    f"block size {name}={size} must be a positive multiple of {LANES}"
                )
        if self.kv % self.kv_compute:
            raise ValueError(
                f"block size kv={self.kv} must be a multiple of "
                f"kv_compute={self.kv_compute}"
            )


def default_blocks(
    q_len: int,
    kv_len: int,
    head_dim: int,
    *,
    itemsize: int = 2,
    chip: str = "v6e",
) -> BlockSizes:
    """Large blocks that waste little padding, from the sizes and the chip's name.

    The fewest blocks below a maximum that cover the length, and of those the
    smallest. The maxima are those, of a few tried, with the fewest bundles on v6e;
    beyond a width of 128, and for float32 (``itemsize`` 4 bytes), they are smaller so
    that the blocks fit VMEM, and on chips that give a kernel less of it. The attached
    device is never asked, so a program can be compiled for another one.

    Raises:
        ValueError: a size below 1.
    """
    if min(q_len, kv_len, head_dim) < 1:
        raise ValueError(
            "block sizes need lengths and a head dim of at least 1; got "
            f"q_len={q_len}, kv_len={kv_len}, head_dim={head_dim}"
        )
    computes: tuple[int, ...]
    if head_dim <= 64 and itemsize <= 2:
        most_q, most_kv, computes = 3328, 2816, (256, 128)
    else:
        shrink = ceil_div(head_dim, LANES) * ceil_div(itemsize, 2)
        most = max(256, round_up(2048 // shrink, 256))
        most_q, most_kv, computes = most, most, (1024, 512, 256, 128)
    while True:
        q = _even_block(q_len, most_q, LANES)
        kv = _even_block(kv_len, most_kv, LANES if kv_len <= LANES else 256)
        compute = next(size for size in computes if kv % size == 0)
        blocks = BlockSizes(q=q, kv=kv, kv_compute=compute)
        taken = TAKEN * vmem_bytes(blocks, head_dim, head_dim, itemsize=itemsize)
        if taken <= vmem_limit(chip) or max(q, kv) <= 256:
            return blocks
        most_q, most_kv = max(most_q - 256, 256), max(most_kv - 256, 256)


#: What the compiler takes, over :func:`vmem_bytes`: seen were 2.0 for 3328/2816/256 at
#: head dim 64 and 2.5 for 2048/2048/1024 at 128 (v5p, libtpu 0.0.42.1).
TAKEN = 2.6


def vmem_bytes(
    blocks: BlockSizes, head_dim: int, v_dim: int, *, itemsize: int = 2
) -> int:
    """Bytes of VMEM that the kernel takes at least: blocks that come and go, sums.

    Source: jax 0.10.2, ``_splash_attention_forward``; maxima, sums and the output are
    blocks of float32, 128 wide or more.
    """
    # With the feature that hides keys.
    width, v_width = round_up(head_dim + 1, LANES), round_up(v_dim, LANES)
    moving = (blocks.q + blocks.kv) * (width + v_width) * itemsize
    return 2 * moving + blocks.q * (2 * LANES + v_width) * 4


def vmem_limit(chip: str) -> int:
    """Bytes of VMEM that a kernel may take that names no limit, as this one.

    Seen in the compiler's words; libtpu 0.0.42.1.
    """
    return (32 if chip in ("v6e", "v7x") else 16) << 20


def jax_splash_refusal(problem: Problem) -> str | None:
    """Why splash attention cannot do this exactly, or None if it can."""
    if problem.platform != "tpu" and not problem.interpret:
        return (
            f"jax's splash compiles for TPU only, not for {problem.platform!r} "
            "(interpret=True runs it anywhere, slowly)"
        )
    if problem.window is not None:
        return "this wrapper of jax's kernel takes no local window"
    if problem.mask_shape is not None:
        kind = "bool" if problem.mask_is_bool else "float"
        return (
            f"jax's splash takes no mask array, got a {kind} mask of shape "
            f"{list(problem.mask_shape)}; it takes is_causal and kv_lengths"
        )
    if problem.v_dim != problem.head_dim:
        return (
            "jax's splash needs values as wide as keys, got head dim "
            f"{problem.head_dim} and value dim {problem.v_dim}"
        )
    if problem.dtype not in ("bfloat16", "float32"):
        return f"jax's splash takes bfloat16 and float32, got {problem.dtype}"
    if 0 in (problem.batch, problem.heads, problem.q_len, problem.kv_len):
        return "jax's splash takes no empty arrays"
    return None


def jax_splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    kv_lengths: jax.Array | None = None,
    window: tuple[int, int] | None = None,
    blocks: BlockSizes | None = None,
    platform: str = "tpu",
    interpret: bool = False,
) -> jax.Array:
    """Same contract as ``reference_attention`` for what it does not refuse.

    The scale is multiplied into q, so bfloat16 queries are rounded once more unless
    it is a power of two (head dims 64 and 256 by default).

    Args:
        mask: refused unless None.
        window: refused unless None.
        blocks: block sizes; None means ``default_blocks``.
        platform: where the program will run; only "tpu" unless ``interpret``.
        interpret: run the kernel's program op by op, on any platform.

    Raises:
        NotImplementedError: see ``jax_splash_refusal``.
        ValueError: shapes or dtypes that do not fit together.
    """
    problem = describe(
        q,
        k,
        v,
        mask=mask,
        is_causal=is_causal,
        kv_lengths=kv_lengths,
        window=window,
        platform=platform,
        interpret=interpret,
    )
    if refusal := jax_splash_refusal(problem):
        raise NotImplementedError(refusal)
    blocks = blocks or default_blocks(
        problem.q_len, problem.kv_len, problem.head_dim, itemsize=q.dtype.itemsize
    )
    q_len = round_up(problem.q_len, blocks.q)
    kv_len = round_up(problem.kv_len, blocks.kv)

    factor = resolve_scale(scale, problem.head_dim)
    q = (q.astype(jnp.float32) * factor).astype(q.dtype)
    if _hides_keys(problem, kv_len):
        q, k = _with_key_feature(q, k, kv_lengths)
        k = _far_beyond(k, kv_len)
    width, v_width = _width(q.shape[3]), _width(problem.head_dim)
    # The batch is folded into the heads: batch item b's query head h is head b H + h,
    # whose key/value head, by the same division, is b Hkv + h // (H / Hkv).
    q = pad_dim(pad_dim(_fold(q), 1, q_len), 2, width)
    k = pad_dim(pad_dim(_fold(k), 1, kv_len), 2, width)
    v = pad_dim(pad_dim(_fold(v), 1, kv_len), 2, v_width)

    kernel = splash_attention_kernel.make_splash_mha_single_device(
        # One mask for all heads; the kernel never looks at how many there are.
        splash_attention_mask.MultiHeadMask([_TileMask(q_len, kv_len, is_causal)]),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=blocks.q,
            block_kv=blocks.kv,
            block_kv_compute=blocks.kv_compute,
        ),
        interpret=interpret,
    )
    # A TPU multiplies float32 in one bfloat16 pass unless told otherwise; the kernel
    # takes its precision from this context.
    exact = problem.dtype == "float32"
    with jax.default_matmul_precision("float32") if exact else nullcontext():
        out = kernel(q, k, v)
    out = out.reshape(problem.batch, problem.heads, q_len, v_width)
    out = out[:, :, : problem.q_len, : problem.head_dim]
    if kv_lengths is not None:
        # With no key at all every score is FAR and the weights are even.
        empty = (kv_lengths <= 0)[:, None, None, None]
        out = jnp.where(empty, jnp.zeros((), out.dtype), out)
    return out


class _TileMask(splash_attention_mask.Mask):
    """The full or the causal mask, known per tile from the tile's corners.

    jax's own masks are filled in element by element while tracing, which takes
    seconds at 40,000 tokens. The kernel's set-up only asks of a tile whether any and
    whether all of it is allowed, which its two extreme corners answer.
    """

    def __init__(self, q_len: int, kv_len: int, is_causal: bool) -> None:
        self._shape = (q_len, kv_len)
        self._is_causal = is_causal
        if is_causal:
            # The kernel applies a mask by function where these two are there.
            self.q_sequence = np.arange(q_len, dtype=np.int32)
            self.mask_function: Callable[..., jax.Array] = _causal

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        rows, cols = idx
        if not self._is_causal:
            return np.array([[True]])
        # Rows times columns as (first, last): the bottom left corner is the most
        # allowed, the top right one the least.
        q_ids = np.array([rows.start, rows.stop - 1])
        k_ids = np.array([cols.start, cols.stop - 1])
        return k_ids[None, :] <= q_ids[:, None]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _TileMask)
            and self._shape == other._shape
            and self._is_causal == other._is_causal
        )

    def __hash__(self) -> int:
        return hash((self._shape, self._is_causal))


def _causal(q_ids: jax.Array, k_ids: jax.Array) -> jax.Array:
    return q_ids >= k_ids


def _hides_keys(problem: Problem, padded_len: int) -> bool:
    """Whether some keys of the padded array must get weight 0 by the feature."""
    if problem.has_lengths:
        return True
    # Query i < Lq <= Lk never sees a key >= Lk when causal.
    covered = problem.is_causal and problem.q_len <= problem.kv_len
    return padded_len > problem.kv_len and not covered


def _with_key_feature(
    q: jax.Array, k: jax.Array, kv_lengths: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """q and k one feature wider; its product is 0, or FAR beyond ``kv_lengths``."""
    feature = jnp.zeros((*k.shape[:3], 1), k.dtype)
    if kv_lengths is not None:
        beyond = jnp.arange(k.shape[2]) >= kv_lengths[:, None]
        feature = jnp.where(
            beyond[:, None, :, None], jnp.asarray(FAR, k.dtype), feature
        )
    ones = jnp.ones((*q.shape[:3], 1), q.dtype)
    return jnp.concatenate([q, ones], 3), jnp.concatenate([k, feature], 3)


def _far_beyond(k: jax.Array, kv_len: int) -> jax.Array:
    """k padded to ``kv_len`` keys that are zero but for FAR as the last feature."""
    missing = kv_len - k.shape[2]
    far = jnp.zeros((*k.shape[:2], missing, k.shape[3]), k.dtype).at[..., -1].set(FAR)
    return jnp.concatenate([k, far], 2)


def _width(head_dim: int) -> int:
    """The width the kernel is given: 64, or a multiple of 128."""
    return 64 if head_dim <= 64 else round_up(head_dim, LANES)


def _fold(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _even_block(length: int, most: int, granule: int) -> int:
    count = ceil_div(length, most)
    return round_up(ceil_div(length, count), granule)
