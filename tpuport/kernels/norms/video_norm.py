"""Group norm of video for TPU, in two passes over it.

The first gives mean and spread of every channel in blocks of rows, which a few numbers
then join; the second applies norm, modulation and SiLU. XLA reads the video once more
for the variance, and writes an enlarged modulation as large as the video.

Legend: N batch, T frames, Y rows, X columns, C channels; t and y the frames and rows of
the modulation, S channels of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32

from tpuport.kernels.phantoms import Real, told

#: Elements of a step: what it costs besides is then small, and the program is short.
STEP_ELEMENTS = 2**18


def rows_per_step(rows: int, columns: int, channels: int) -> int:
    """The largest divisor of ``rows`` whose block has at most STEP_ELEMENTS."""
    most = max(STEP_ELEMENTS // (columns * channels), 1)
    return max(n for n in range(1, min(most, rows) + 1) if rows % n == 0)


def channel_moments(
    x: Float[Array, "n t y x c"],
    real: Real | None = None,
    *,
    vmem_limit: int,
    interpret: bool = False,
) -> tuple[Float32[Array, "n c"], Float32[Array, "n c"]]:
    """Mean of every channel, and the sum of squares about it.

    Args:
        x: [N, T, Y, X, C].
        real: how many of the rows and of the columns belong to the picture; those after
            are left out, whatever is in them. ``None`` for all of both.
        vmem_limit: bytes of VMEM that the kernel may take.
        interpret: run on the CPU, for tests.

    Returns:
        float32 [N, C] each, zeros where nothing is real. Blocks have their own, joined
        by Chan's formula: no difference of large numbers anywhere.
    """
    count, frames, rows, columns, channels = x.shape
    block = rows_per_step(rows, columns, channels)
    blocks = rows // block
    some, counted = told(real, (rows, columns))
    in_specs = [
        pl.BlockSpec((1, 1, block, columns, channels), lambda n, t, y: (n, t, y, 0, 0))
    ]
    if counted:
        in_specs.insert(0, pl.BlockSpec(memory_space=pltpu.SMEM))
    parts = pl.pallas_call(
        functools.partial(_moments_body, some=some),
        grid=(count, frames, blocks),
        in_specs=in_specs,
        out_specs=pl.BlockSpec((1, 1, 1, 2, channels), lambda n, t, y: (n, t, y, 0, 0)),
        out_shape=jax.ShapeDtypeStruct(
            (count, frames, blocks, 2, channels), jnp.float32
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3, vmem_limit_bytes=vmem_limit
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * x.size, transcendentals=0, bytes_accessed=x.nbytes
        ),
        interpret=interpret,
        name="tpuport_moments",
    )(*counted, x)
    means, spreads = parts[..., 0, :], parts[..., 1, :]
    if real is not None and counted:
        starts = block * jnp.arange(blocks)
        counts = jnp.clip(real[0] - starts, 0, block) * real[1]
        return joined(counts[None, None, :, None], means, spreads, (1, 2))[1:]
    mean = jnp.mean(means, axis=(1, 2))
    apart = jnp.sum(jnp.square(means - mean[:, None, None]), axis=(1, 2))
    return mean, jnp.sum(spreads, axis=(1, 2)) + block * columns * apart


def joined(
    counts: jax.Array, means: jax.Array, spreads: jax.Array, axes: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Count, mean and sum of squares about it of the parts along ``axes`` together.

    Chan's formula (Chan, Golub and LeVeque 1979). A part of no elements counts for
    nothing, and zeros come of such parts alone. ``counts`` broadcasts to the float32
    means and spreads.
    """
    counts = jnp.broadcast_to(counts.astype(jnp.float32), means.shape)
    count = jnp.sum(counts, axes)
    mean = jnp.sum(counts * means, axes) / jnp.maximum(count, 1)
    apart = jnp.square(means - jnp.expand_dims(mean, axes))
    return count, mean, jnp.sum(spreads + counts * apart, axes)


def _moments_body(*refs: Any, some: tuple[bool, bool]) -> None:
    """One block; ``some`` tells of rows and columns whether some are left out."""
    *real_ref, x_ref, out_ref = refs
    x = x_ref[0, 0].astype(jnp.float32)
    size: Any = x.shape[0] * x.shape[1]
    counts: list[Any] = []
    if real_ref:
        starts = (pl.program_id(2) * x.shape[0], 0)
        counts = [
            jnp.clip(real_ref[0][dim] - start, 0, x.shape[dim])
            for dim, start in enumerate(starts)
        ]
        size = jnp.maximum(counts[0] * counts[1], 1).astype(jnp.float32)

    def kept(values: jax.Array, dim: int) -> jax.Array:
        if not some[dim]:
            return values
        place = jax.lax.broadcasted_iota(jnp.int32, values.shape, dim)
        return jnp.where(place < counts[dim], values, 0)

    def total(values: jax.Array) -> jax.Array:
        values = kept(values, 0)
        if some[1]:
            # Columns are left out of sums over the rows, which are far fewer.
            values = kept(jnp.sum(values, axis=0, keepdims=True), 1)
        return jnp.sum(values, axis=(0, 1), keepdims=True)

    mean = total(x) / size
    out_ref[0, 0, 0, 0:1] = mean[0]
    out_ref[0, 0, 0, 1:2] = total(jnp.square(x - mean))[0]


def apply_norm(
    x: Float[Array, "n t y x c"],
    mean: Float32[Array, "n c"],
    scale: Float32[Array, "n c"],
    shift: Float32[Array, "n c"],
    modulation: Float[Array, "_ _ _ _ _"] | None = None,
    *,
    silu: bool,
    kept: int = 0,
    vmem_limit: int,
    interpret: bool = False,
) -> tuple[Float[Array, "n t y x c"], Float[Array, "n kept y x c"] | None]:
    """``(x - mean) * scale + shift``, modulated, through SiLU.

    Args:
        x: [N, T, Y, X, C]; ``mean``, ``scale`` and ``shift`` are float32 [N, C].
        modulation: [N, t, y, X, 2 C]: factors and summands. Y is a multiple of y, and T
            of t; where T is odd and more than 1, its first frame has the first of t,
            and the others the rest.
        kept: how many of the last frames to write once more, as an array of their own:
            cut out afterwards they would be read first. At most T.
        vmem_limit, interpret: as of :func:`channel_moments`.

    Returns:
        of the shape and dtype of ``x``, in float32 until the end; and
        [N, kept, Y, X, C], ``None`` for none.

    Raises:
        ValueError: the modulation does not fit, or there are fewer frames.
    """
    count, frames, rows, columns, channels = x.shape
    if kept > frames:
        raise ValueError(f"{kept} frames to keep of {frames}")
    vectors = jnp.stack([mean, scale, shift], axis=1)
    in_specs = [pl.BlockSpec((1, 3, channels), lambda n, t, y: (n, 0, 0))]
    arguments = [vectors]
    if modulation is None:
        repeats, block = 1, rows_per_step(rows, columns, channels)
    else:
        several, spec = _modulation_spec(x, modulation)
        repeats = rows // modulation.shape[2]
        block = several * repeats
        in_specs.append(spec)
        arguments.append(modulation)
    whole = pl.BlockSpec(
        (1, 1, block, columns, channels), lambda n, t, y: (n, t, y, 0, 0)
    )
    first = frames - kept
    shapes = [x.shape, (count, kept, rows, columns, channels)]
    specs = [whole, _kept_spec(whole.block_shape, first)]
    outputs, over = (2, "arbitrary") if kept else (1, "parallel")
    found = pl.pallas_call(
        functools.partial(
            _apply_body,
            silu=silu,
            repeats=repeats,
            modulated=modulation is not None,
            kept_from=first if kept else None,
        ),
        grid=(count, frames, rows // block),
        in_specs=[*in_specs, whole],
        out_specs=specs[:outputs],
        out_shape=[jax.ShapeDtypeStruct(s, x.dtype) for s in shapes[:outputs]],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", over, over),
            vmem_limit_bytes=vmem_limit,
        ),
        cost_estimate=pl.CostEstimate(
            flops=8 * x.size,
            transcendentals=x.size if silu else 0,
            bytes_accessed=2 * x.nbytes,
        ),
        interpret=interpret,
        name="tpuport_norm",
    )(*arguments, x)
    return found[0], found[1] if kept else None


def _modulation_spec(x: jax.Array, modulation: jax.Array) -> tuple[int, pl.BlockSpec]:
    """Rows of the modulation that a step reads, and the block of them."""
    count, frames, rows, columns, channels = x.shape
    times, lines = modulation.shape[1:3]
    wanted = (count, times, lines, columns, 2 * channels)
    if modulation.shape != wanted or rows % lines:
        raise ValueError(f"modulation {modulation.shape} of {x.shape}")
    several = rows_per_step(lines, rows // lines * columns, channels)
    return several, pl.BlockSpec(
        (1, 1, several, columns, 2 * channels),
        lambda n, t, y: (n, latent_frame(t, frames, times), y, 0, 0),
    )


def _kept_spec(shape: Any, first: int) -> pl.BlockSpec:
    """Blocks of the frames from ``first`` on, as an array of their own."""

    def place(n: Any, t: Any, y: Any) -> tuple[Any, ...]:
        # One place until the first of them: nothing is written back before.
        late = t >= first
        return n, jnp.where(late, t - first, 0), jnp.where(late, y, 0), 0, 0

    return pl.BlockSpec(shape, place)


def latent_frame(t: Any, frames: int, times: int) -> Any:
    """Which of ``times`` frames of a modulation belongs to frame t of ``frames``."""
    if frames > 1 and frames % 2:
        # The first one stands for itself.
        if times < 2 or (frames - 1) % (times - 1):
            raise ValueError(f"a modulation of {times} frames for {frames}")
        each = (frames - 1) // (times - 1)
        return (t + each - 1) // each
    if frames % times:
        raise ValueError(f"a modulation of {times} frames for {frames}")
    return t // (frames // times)


def _apply_body(
    vectors_ref: Any,
    *refs: Any,
    silu: bool,
    repeats: int,
    modulated: bool,
    kept_from: int | None,
) -> None:
    *given, out_ref = refs
    kept_ref: Any = None
    if kept_from is not None:
        *given, out_ref, kept_ref = refs
    *modulation, x_ref = given
    mean, scale, shift = (vectors_ref[0, i][None, None] for i in range(3))
    channels = x_ref.shape[-1]

    def some(start: Any, count: int, line: Any) -> None:
        """``count`` rows from ``start``, which share a line of the modulation."""
        rows = pl.ds(start, count)
        x = x_ref[0, 0, rows].astype(jnp.float32)
        x = (x - mean) * scale + shift
        if modulated:
            both = modulation[0][0, 0, pl.ds(line, 1)].astype(jnp.float32)
            x = x * both[..., :channels] + both[..., channels:]
        if silu:
            x = x / (1 + jnp.exp(-x))
        out_ref[0, 0, rows] = x.astype(out_ref.dtype)

    rows = x_ref.shape[2]
    # A loop keeps the program short.
    each = repeats if modulated else 1
    body: Callable[[Any, None], None] = lambda i, _: some(i * each, each, i)  # noqa: E731
    jax.lax.fori_loop(0, rows // each, body, None)

    def keep() -> None:
        kept_ref[...] = out_ref[...]

    if kept_from is not None:
        pl.when(pl.program_id(1) >= kept_from)(keep)
