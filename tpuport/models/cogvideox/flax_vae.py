"""CogVideoX's autoencoder in Flax (NNX), channels last.

Upstream's loop calls the encoder or the decoder with a chunk of frames, and hands on
what the causal convolutions need.

Each layer is made from upstream's module inside a trace, and holds the arrays of that
module as upstream has them. On a TPU convolutions and norms run in the kernels of
:mod:`tpuport.core.layers.video_layers`: norm, modulation and SiLU are one pass, and a
convolution reads the frames of the chunk before, and the rows and columns of other
devices, without joining arrays first. What the kernels cannot, and all on a CPU, runs
as torch's operators do (:mod:`tpuport.patches`).

The whole autoencoder is made of them with ``--vae flax``, and its blocks on a TPU
otherwise (:mod:`tpuport.models.cogvideox.patches`).

Legend: N videos, T/Y/X frames, rows, columns, C/I/O channels, Z latent channels, t/y/x
the latents' own frames, rows and columns. Source: diffusers 0.42
``autoencoder_kl_cogvideox.py``, ``upsampling.py``, ``downsampling.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from flax import nnx

from tpuport.core.layers import video_layers as video
from tpuport.core.layers.video_layers import (
    LANES,
    PRODUCT,
    has_kernels,
    marked_picture,
)
from tpuport.core.tracing.context import OpContext, current
from tpuport.patches import conv, norms, padding
from tpuport.plugin import NativeForm, diffusers_patch, parameters

#: Frames that a convolution of three looks back at.
KEPT = 2


def refuse(known: bool, what: str) -> None:
    """Refuse what upstream's classes have and the Flax layers have not.

    Raises:
        NotImplementedError: with ``what`` it is, unless ``known``.
    """
    if not known:
        raise NotImplementedError(f"the Flax layers have no {what}")


def channels_last(x: jax.Array) -> jax.Array:
    """[N, C, T, Y, X] -> [N, T, Y, X, C]."""
    return jnp.transpose(x, (0, 2, 3, 4, 1))


def channels_first(x: jax.Array) -> jax.Array:
    """[N, T, Y, X, C] -> [N, C, T, Y, X]."""
    return jnp.transpose(x, (0, 4, 1, 2, 3))


def on_tensors(layer: nnx.Module, *tensors: Any, **options: Any) -> Any:
    """What a layer makes of trees of upstream's tensors [N, C, T, Y, X], as such."""
    active = current()
    given = jax.tree.map(channels_last, active.arrays(tensors))
    found = layer(active.context, *given, **options)
    return active.tensors(jax.tree.map(channels_first, found))


class Weights(nnx.Module):
    """A weight and a bias in upstream's layout."""

    def __init__(self, upstream: Any) -> None:
        self.weight, self.bias = map(nnx.Param, parameters(upstream))

    @property
    def both(self) -> tuple[jax.Array, jax.Array]:
        return self.weight[...], self.bias[...]


def convolve(
    context: OpContext,
    x: jax.Array,
    before: jax.Array | None,
    weights: Weights,
    residual: jax.Array | None = None,
    shortcut: tuple[jax.Array, Weights] | None = None,
) -> jax.Array:
    """A convolution that keeps rows and columns, with zeros around the picture.

    Args:
        x: [N, T, Y, X, I].
        before: [N, K - 1, Y, X, I], the frames before; ``None`` with K = 1.
        weights: [O, I, K, 3, 3] and [O].
        residual: [N, T, Y, X, O], added to the result.
        shortcut: what to make it of: [N, T, Y, X, J], and [O, J, 1, 1, 1].

    Returns:
        [N, T, Y, X, O] in the dtype of ``x``.
    """
    if has_kernels(context):
        known = len(context.convolutions)
        short = None if shortcut is None else (shortcut[0], *shortcut[1].both)
        try:
            return video.convolve(context, x, before, *weights.both, residual, short)
        except NotImplementedError:
            del context.convolutions[known:]  # torch's operator notes why
    if shortcut is not None:
        residual = pointwise(context, *shortcut)
    whole = x if before is None else jnp.concatenate([before, x], axis=1)
    out = _as_torch(context, channels_first(whole), weights, 1, (0, 1, 1))
    return out if residual is None else out + residual


def _as_torch(
    context: OpContext, x: jax.Array, weights: Weights, stride: int, pads: Any
) -> jax.Array:
    """[N, C, T, Y, X] through torch's convolution -> [N, T', Y', X', O]."""
    run = conv.CONVOLUTION.make(context)
    weight, bias = weights.both
    weight = weight if weight.ndim == 5 else weight[:, :, None]
    steps, one = (1, stride, stride), (1, 1, 1)
    out = run(x, weight, bias, steps, pads, one, False, (0, 0, 0), 1)
    return channels_last(out)


def pointwise(context: OpContext, x: jax.Array, weights: Weights) -> jax.Array:
    """[N, T, Y, X, I] through a convolution of one element, [O, I, 1, 1, 1]."""
    out = video.pointwise(context, x, *weights.both)
    return marked_picture(context, "a product", out, x)


class CausalConv(Weights):
    """Taps in time reach back only: to the chunk before, or its first frame again.

    Source: ``CogVideoXCausalConv3d`` with ``pad_mode="first"``, 3x3x3.
    """

    def __init__(self, upstream: Any) -> None:
        inner = upstream.conv
        known = (upstream.pad_mode, inner.kernel_size, inner.stride, inner.dilation)
        one = (1, 1, 1)
        refuse(
            known == (known[0], (3, 3, 3), one, one) and known[0] != "replicate",
            f"causal convolution of {known}",
        )
        super().__init__(inner)

    def __call__(
        self,
        context: OpContext,
        x: jax.Array,
        before: jax.Array | None,
        last: jax.Array | None = None,
        **added: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """[N, T, Y, X, I] -> [N, T, Y, X, O], and the frames for the next chunk.

        ``last`` has the last frames of ``x``, where there is an array of them already;
        ``added`` is the ``residual`` or the ``shortcut`` of :func:`convolve`.
        """
        if before is None:
            before = jnp.concatenate([x[:, :1]] * KEPT, axis=1)
        out = convolve(context, x, before, self, **added)
        if last is None:
            # Cut from the chunk's own frames where there are enough: less to wait for.
            whole = x.shape[1] >= KEPT
            last = x if whole else jnp.concatenate([before, x], axis=1)
            last = last[:, -KEPT:]
        return out, last


class Norm(nnx.Module):
    """A group norm of a chunk's frames and the whole picture, and SiLU after it.

    The latents scale and shift the result by pixel where upstream's norm has maps.
    Upstream enlarges the latents by nearest neighbours and convolves them with 1x1x1;
    here the other way round, which is the same and far less work.
    Sources: ``CogVideoXSpatialNorm3D``, ``torch.nn.GroupNorm``.
    """

    def __init__(self, upstream: Any) -> None:
        layer = getattr(upstream, "norm_layer", upstream)
        self.weights = Weights(layer)
        self.groups, self.epsilon = layer.num_groups, layer.eps
        self.channels = layer.num_channels
        self.maps = nnx.List([])
        if layer is not upstream:
            maps = (upstream.conv_y, upstream.conv_b)
            refuse({one.time_kernel_size for one in maps} == {1}, "map of 3 frames")
            self.maps = nnx.List([Weights(one.conv) for one in maps])

    def __call__(
        self,
        context: OpContext,
        x: jax.Array,
        z: jax.Array | None,
        *,
        silu: bool = True,
        kept: int = KEPT,
    ) -> tuple[jax.Array, jax.Array | None]:
        """x [N, T, Y, X, C], z [N, t, y, x, Z]: the same as x, and its last frames.

        The ``kept`` frames are ``None`` where they are no array of their own.
        """
        spatial = bool(self.maps) and z is not None
        if not has_kernels(context) or self.channels % LANES:
            return self._as_torch(context, x, z if spatial else None, silu), None
        maps = None
        if spatial:
            weights, biases = zip(*(one.both for one in self.maps), strict=True)
            maps = video.modulation_maps(z, x.shape[3], weights, biases)
            maps = marked_picture(context, "a modulation", maps, z)
            for _ in weights:
                context.note(PRODUCT)
        return video.group_norm(
            context,
            x,
            self.groups,
            *self.weights.both,
            self.epsilon,
            maps,
            silu=silu,
            kept=kept if x.shape[1] >= kept else 0,
        )

    def _as_torch(
        self, context: OpContext, x: jax.Array, z: jax.Array | None, silu: bool
    ) -> jax.Array:
        """In float32, rounded at the end."""
        wide = channels_first(x.astype(jnp.float32))
        out = norms.group_norm(
            wide, self.groups, *self.weights.both, self.epsilon, space=context.space
        )
        out = channels_last(out)
        if z is not None:
            factor, shift = (
                enlarged(context, pointwise(context, z, one), x.shape[1:4])
                for one in self.maps
            )
            out = out * factor + shift
        return (jax.nn.silu(out) if silu else out).astype(x.dtype)


def enlarged(context: OpContext, z: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """[N, t, y, x, C] by nearest neighbours -> [N, T, Y, X, C].

    The first of an odd number of frames stands for itself.
    """
    frames, rows, columns = size
    wide = jnp.repeat(z, rows // z.shape[2], axis=2)
    wide = jnp.repeat(wide, columns // z.shape[3], axis=3)
    return marked_picture(context, "an enlargement", repeat_frames(wide, frames), z)


def repeat_frames(x: jax.Array, frames: int) -> jax.Array:
    """[N, T, ...] with every frame repeated to make ``frames``.

    If both are odd, the first frame stays single: it is the first of the video.
    """
    if frames == x.shape[1]:
        return x
    single = frames % 2
    rest = x[:, single:]
    wide = jnp.repeat(rest, (frames - single) // rest.shape[1], axis=1)
    return jnp.concatenate([x[:, :1], wide], axis=1) if single else wide


class ResnetBlock(nnx.Module):
    """Norm, silu, convolution, twice, added to the input.

    Source: ``CogVideoXResnetBlock3D`` without dropout and time embedding.
    """

    def __init__(self, upstream: Any) -> None:
        refuse(isinstance(upstream.nonlinearity, torch.nn.SiLU), "other activation")
        self.norm1, self.norm2 = Norm(upstream.norm1), Norm(upstream.norm2)
        self.conv1 = CausalConv(upstream.conv1)
        self.conv2 = CausalConv(upstream.conv2)
        self.shortcut = nnx.List([])
        if upstream.in_channels != upstream.out_channels:
            refuse(not upstream.use_conv_shortcut, "shortcut of 3 x 3 x 3")
            self.shortcut = nnx.List([Weights(upstream.conv_shortcut)])

    def __call__(
        self, context: OpContext, x: jax.Array, z: jax.Array | None, cache: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """[N, T, Y, X, I] -> [N, T, Y, X, O], and what the next chunk needs."""
        h, last = self.norm1(context, x, z)
        h, first = self.conv1(context, h, cache.get("conv1"), last)
        h, last = self.norm2(context, h, z)
        added: dict[str, Any] = {"residual": x}
        if self.shortcut:
            added = {"shortcut": (x, self.shortcut[0])}
        h, second = self.conv2(context, h, cache.get("conv2"), last, **added)
        return h, {"conv1": first, "conv2": second}


class Upsample(Weights):
    """Twice the rows, columns and, where ``in_time``, frames, then 3x3.

    Source: ``CogVideoXUpsample3D``. The convolution is of single frames, so it runs
    before they are repeated.
    """

    def __init__(self, upstream: Any) -> None:
        super().__init__(upstream.conv)
        self.in_time = bool(upstream.compress_time)
        conv = upstream.conv
        known = (conv.kernel_size, conv.stride, conv.padding)
        refuse(known == ((3, 3), (1, 1), (1, 1)), f"upsampler of {known}")

    def __call__(self, context: OpContext, x: jax.Array) -> jax.Array:
        """[N, T, Y, X, C] -> [N, T', 2Y, 2X, C]."""
        _, frames, rows, columns, _ = x.shape
        copies = 2 if self.in_time and frames > 1 else 1
        if has_kernels(context):
            known = len(context.convolutions)
            try:
                out = video.enlarged_convolution(context, x, *self.both, copies)
                # Of an odd number the first stands for itself.
                return out[:, 1:] if copies > 1 and frames % 2 else out
            except NotImplementedError:
                del context.convolutions[known:]  # torch's operator notes why
        wide = enlarged(context, x, (frames, 2 * rows, 2 * columns))
        out = _as_torch(context, channels_first(wide), self, 1, (0, 1, 1))
        return repeat_frames(out, copies * frames - (copies - 1) * (frames % 2))


class Downsample(Weights):
    """Half the rows and columns by 3x3, after means of two frames where ``in_time``.

    Source: ``CogVideoXDownsample3D``.
    """

    def __init__(self, upstream: Any) -> None:
        super().__init__(upstream.conv)
        self.in_time = bool(upstream.compress_time)
        known = (upstream.conv.stride, upstream.conv.padding)
        refuse(known == ((2, 2), (0, 0)), f"downsampler of {known}")

    def __call__(self, context: OpContext, x: jax.Array) -> jax.Array:
        """[N, T, Y, X, C] -> [N, T', Y / 2, X / 2, C]."""
        x = _halved(x) if self.in_time else x
        wide = padding.pad(
            channels_first(x), (0, 1, 0, 1), space=context.space, padded=context.padded
        )
        return _as_torch(context, wide, self, 2, (0, 0, 0))


def _halved(x: jax.Array) -> jax.Array:
    """Means of two frames; of an odd number the first one stays as it is."""
    single = x.shape[1] % 2
    rest = x[:, single:].astype(jnp.float32)
    rest = ((rest[:, ::2] + rest[:, 1::2]) / 2).astype(x.dtype)
    return jnp.concatenate([x[:, :1], rest], axis=1) if single else rest


Cache = dict[str, Any]
"""The last two frames of every causal convolution's input, by layer."""


class Half(nnx.Module):
    """The encoder or the decoder: levels of blocks between two convolutions.

    Args:
        upstream: ``CogVideoXEncoder3D`` or ``CogVideoXDecoder3D``.

    Raises:
        NotImplementedError: an option that the Flax VAE does not have.
    """

    def __init__(self, upstream: Any) -> None:
        refuse(isinstance(upstream.conv_act, torch.nn.SiLU), "other activation")
        self.conv_in = CausalConv(upstream.conv_in)
        self.decodes = hasattr(upstream, "up_blocks")
        middle = [*map(ResnetBlock, upstream.mid_block.resnets)]
        steps: list[nnx.Module] = middle if self.decodes else []
        for level in upstream.up_blocks if self.decodes else upstream.down_blocks:
            steps += map(ResnetBlock, level.resnets)
            name = "upsamplers" if self.decodes else "downsamplers"
            kind = Upsample if self.decodes else Downsample
            steps += map(kind, getattr(level, name) or ())
        self.steps = nnx.List(steps if self.decodes else [*steps, *middle])
        self.norm_out = Norm(upstream.norm_out)
        self.conv_out = CausalConv(upstream.conv_out)

    def __call__(
        self, context: OpContext, x: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """A chunk through all levels, and the next chunk's cache.

        Args:
            x: pixels [N, F, 8Y, 8X, 3], or latents [N, T, Y, X, C]; of a device's part
                where the picture is split.
            cache: of the chunk before; empty for the first one.

        Returns:
            moments [N, T, Y, X, 2C], or pixels, in the dtype of ``x``.
        """
        z = x if self.decodes else None
        kept: Cache = {}
        h, kept["conv_in"] = self.conv_in(context, x, cache.get("conv_in"))
        for number, step in enumerate(self.steps):
            if isinstance(step, ResnetBlock):
                name = f"step_{number}"
                h, kept[name] = step(context, h, z, cache.get(name, {}))
            else:
                h = step(context, h)
        h, last = self.norm_out(context, h, z)
        h, kept["conv_out"] = self.conv_out(context, h, cache.get("conv_out"), last)
        return h, kept


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any,
        sample: torch.Tensor,
        temb: torch.Tensor | None = None,
        conv_cache: Cache | None = None,
    ) -> tuple[torch.Tensor, Cache]:
        try:
            refuse(temb is None, "time embedding")
            half = Half(self)
        except NotImplementedError as error:
            raise NotImplementedError(f"{error}; use --vae torchax") from None
        found: tuple[torch.Tensor, Cache] = on_tensors(half, sample, conv_cache or {})
        return found

    return forward


FLAX = NativeForm(
    patches=tuple(
        diffusers_patch(
            f"cogvideox-flax-{kind.lower()}",
            f"models.autoencoders.autoencoder_kl_cogvideox:CogVideoX{kind}3D.forward",
            _forward,
            "--vae flax: channels last, norms and convolutions by kernels, in Flax",
            wraps=True,
        )
        for kind in ("Encoder", "Decoder")
    )
)
