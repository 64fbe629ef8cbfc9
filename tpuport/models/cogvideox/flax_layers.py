"""Convolutions and norms of the Flax VAE, channels last.

Flax's classes are bases here, so this file is imported inside functions only. A layer
holds its weights under the names of upstream's module tree and says in ``STORED``
what upstream calls them and how its dims are ordered there.

Legend: N strips (see :mod:`flax_grid`), T/Y/X frames, rows, columns, C/I/O channels, Z
latent channels, Tz/Yz/Xz the latents' own frames, rows and columns. Source: diffusers
0.42 ``autoencoder_kl_cogvideox.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from flax import nnx

from tpuport.models.cogvideox.flax_grid import Grid

if TYPE_CHECKING:
    import jax

Stored: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]
"""A weight's name here -> its name in upstream's module, and which of upstream's dims
stands at each of ours."""

#: [O, I, T, Y, X] -> [T, Y, X, I, O], and the same without time.
_SPATIOTEMPORAL = (2, 3, 4, 1, 0)
_SPATIAL = (2, 3, 1, 0)

Frames: TypeAlias = "jax.Array"
"""[2, Y, X, N, C]: the last frames of a causal convolution's input, in the order of
dims that the convolution reads them in."""

Moments: TypeAlias = "tuple[jax.Array, jax.Array]"
"""Mean and variance of an activation by groups of channels; see ``Grid.moments``."""


def _weight(*shape: int) -> nnx.Param[Any]:
    import jax.numpy as jnp

    return nnx.Param(jnp.zeros(shape))


def convolve(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array,
    grid: Grid,
    *,
    before: int,
    after: int,
    stride: int = 1,
    residual: jax.Array | None = None,
) -> jax.Array:
    """A convolution that keeps to the frames it has and pads rows and columns.

    Args:
        x: [N, T, Y, X, I].
        kernel: [Kt, Ky, Kx, I, O].
        bias: [O].
        before, after: rows and columns of zeros around the picture.
        stride: of rows and columns.
        residual: added to the result.

    Returns:
        [N, T - Kt + 1, Y', X', O] in the dtype of ``x``, rounded once at the end.
    """
    import jax
    import jax.numpy as jnp

    from tpuport.kernels.reference import matmul_precision

    dtype = x.dtype
    x, pads = grid.padded(x, before, after)
    taps = kernel.shape[0]
    count, length, *_ = x.shape
    frames = length - taps + 1
    options: dict[str, Any] = {
        "precision": matmul_precision(dtype),
        "preferred_element_type": jnp.float32,
    }
    if grid.fold_taps:
        x = jnp.concatenate([x[:, t : t + frames] for t in range(taps)], axis=-1)
        x = x.reshape(count * frames, *x.shape[2:])
        flat = kernel.transpose(1, 2, 0, 3, 4)
        flat = flat.reshape(*flat.shape[:2], -1, flat.shape[-1])
        numbers = ("NHWC", "HWIO", "NHWC")
        out = jax.lax.conv_general_dilated(
            x, flat, (stride,) * 2, pads, dimension_numbers=numbers, **options
        )
        out = out.reshape(count, frames, *out.shape[1:])
    else:
        out = jax.lax.conv_general_dilated(
            x,
            kernel,
            (1, stride, stride),
            ((0, 0), *pads),
            dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
            **options,
        )
    out = out + bias.astype(jnp.float32)
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    return out.astype(dtype)


class CausalConv(nnx.Module):
    """Taps in time reach back only: to the chunk before, or its first frame again.

    Source: ``CogVideoXCausalConv3d`` with ``pad_mode="first"``, 3x3x3.
    """

    STORED: ClassVar[Stored] = {
        "kernel": ("conv.weight", _SPATIOTEMPORAL),
        "bias": ("conv.bias", (0,)),
    }

    def __init__(self, inputs: int, outputs: int) -> None:
        self.kernel = _weight(3, 3, 3, inputs, outputs)
        self.bias = _weight(outputs)

    def __call__(
        self,
        x: jax.Array,
        cache: Frames | None,
        grid: Grid,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, Frames]:
        """[N, T, Y, X, I] -> [N, T, Y, X, O], and the frames for the next chunk."""
        import jax.numpy as jnp

        if cache is None:
            earlier = jnp.concatenate([x[:, :1]] * 2, axis=1)
        else:
            earlier = cache.transpose(3, 0, 1, 2, 4)
        joined = jnp.concatenate([earlier, x], axis=1)
        # Cut from the chunk's own frames where there are enough: less to wait for.
        last = x[:, -2:] if x.shape[1] >= 2 else joined[:, -2:]
        out = convolve(
            joined,
            self.kernel[...],
            self.bias[...],
            grid,
            before=1,
            after=1,
            residual=residual,
        )
        return out, last.transpose(1, 2, 3, 0, 4)


class FrameConv(nnx.Module):
    """3x3 on every frame by itself. Source: the ``Conv2d`` of the samplers."""

    STORED: ClassVar[Stored] = {
        "kernel": ("conv.weight", _SPATIAL),
        "bias": ("conv.bias", (0,)),
    }

    def __init__(self, channels: int) -> None:
        self.kernel = _weight(3, 3, channels, channels)
        self.bias = _weight(channels)


class Pointwise(nnx.Module):
    """A 1x1x1 convolution."""

    STORED: ClassVar[Stored] = {
        "kernel": ("weight", _SPATIOTEMPORAL),
        "bias": ("bias", (0,)),
    }

    def __init__(self, inputs: int, outputs: int) -> None:
        self.kernel = _weight(1, 1, 1, inputs, outputs)
        self.bias = _weight(outputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., I] -> [..., O] in float32."""
        import jax
        import jax.numpy as jnp

        from tpuport.kernels.reference import matmul_precision

        kernel = self.kernel[...][0, 0, 0]
        out = jax.lax.dot_general(
            x,
            kernel,
            (((x.ndim - 1,), (0,)), ((), ())),
            precision=matmul_precision(x.dtype),
            preferred_element_type=jnp.float32,
        )
        return out + self.bias[...].astype(jnp.float32)


class CausalPointwise(Pointwise):
    """The same where upstream wraps it as a causal convolution of one tap."""

    STORED: ClassVar[Stored] = {
        "kernel": ("conv.weight", _SPATIOTEMPORAL),
        "bias": ("conv.bias", (0,)),
    }


class GroupNorm(nnx.Module):
    """A group norm over a chunk's frames and the whole picture, and silu after it."""

    STORED: ClassVar[Stored] = {"scale": ("weight", (0,)), "bias": ("bias", (0,))}

    def __init__(self, channels: int, groups: int, epsilon: float) -> None:
        self.scale = _weight(channels)
        self.bias = _weight(channels)
        self.groups = groups
        self.epsilon = epsilon

    def __call__(self, x: jax.Array, moments: Moments) -> jax.Array:
        """[N, T, Y, X, C] of these moments -> the same, and silu."""
        import jax.numpy as jnp

        centred = x.astype(jnp.float32) - moments[0]
        out = centred * self.factor(moments) + self.bias[...].astype(jnp.float32)
        return silu(out, x.dtype)

    def factor(self, moments: Moments) -> jax.Array:
        """What a centred activation is multiplied by: [N, 1, 1, 1, C]."""
        import jax.numpy as jnp

        scale = self.scale[...].astype(jnp.float32)
        return scale / jnp.sqrt(moments[1] + self.epsilon)


class SpatialNorm(nnx.Module):
    """A group norm whose result the latents scale and shift by pixel, then silu.

    Source: ``CogVideoXSpatialNorm3D``. Upstream enlarges the latents by nearest
    neighbours and convolves them with 1x1x1; here the other way round, which is the
    same and far less work.
    """

    def __init__(self, channels: int, latents: int, groups: int) -> None:
        self.norm_layer = GroupNorm(channels, groups, 1e-6)
        self.conv_y = CausalPointwise(latents, channels)
        self.conv_b = CausalPointwise(latents, channels)

    def __call__(self, x: jax.Array, moments: Moments, z: jax.Array) -> jax.Array:
        """x [N, T, Y, X, C] and z [N, Tz, Yz, Xz, Z] -> silu of [N, T, Y, X, C]."""
        import jax
        import jax.numpy as jnp

        count, frames, rows, columns, channels = x.shape
        y, w = z.shape[2:4]
        factor = repeat_frames(self.conv_y(z), frames)
        shift = repeat_frames(self.conv_b(z), frames)
        mean, scale = moments[0], self.norm_layer.factor(moments)
        # Pixels by latent and place in it: a latent's factor and shift are broadcast
        # to its pixels as they are read. Without the barrier XLA moves the reshape
        # behind the arithmetic, and writes both out at the size of the picture.
        pixels = jax.lax.optimization_barrier(
            x.reshape(count, frames, y, rows // y, w, columns // w, channels)
        )
        out = pixels.astype(jnp.float32) - mean[:, :, :, None, :, None]
        out = out * scale[:, :, :, None, :, None]
        out = out + self.norm_layer.bias[...].astype(jnp.float32)
        out = out * factor[:, :, :, None, :, None] + shift[:, :, :, None, :, None]
        # Rounded before the reshape, lest it is written out in float32.
        return silu(out, x.dtype).reshape(x.shape)


def silu(x: jax.Array, dtype: Any) -> jax.Array:
    """x * sigmoid(x) in float32, rounded to ``dtype``."""
    import jax

    return (x * jax.nn.sigmoid(x)).astype(dtype)


def written_out(x: jax.Array) -> jax.Array:
    """A broadcast [..., C] that is to be an array, at the speed of memory.

    A TPU writes a bare broadcast at less than half the speed of arithmetic that
    broadcasts; the barriers keep XLA from seeing that this is a product with one.
    """
    import jax
    import jax.numpy as jnp

    one = jax.lax.optimization_barrier(jnp.ones(x.shape[-1:], x.dtype))
    return jax.lax.optimization_barrier(x * one)


def repeat_frames(x: jax.Array, frames: int) -> jax.Array:
    """[N, T, ...] with every frame repeated to make ``frames``.

    Of an odd number above one the first frame stays single: it is the video's own first
    one, as upstream has it.
    """
    import jax.numpy as jnp

    length = x.shape[1]
    if frames == length:
        return x
    single = frames % 2
    times = (frames - single) // (length - single)
    rest = x[:, single:]
    wide = (x.shape[0], length - single, times, *x.shape[2:])
    rest = written_out(jnp.broadcast_to(rest[:, :, None], wide))
    rest = rest.reshape(x.shape[0], frames - single, *x.shape[2:])
    return jnp.concatenate([x[:, :1], rest], axis=1) if single else rest
