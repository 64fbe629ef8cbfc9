"""Causal convolutions of both HunyuanVideo autoencoders, and the sums behind them.

Upstream repeats the first frame and the outermost rows and columns around a video, and
convolves that copy. On TPUs the project's kernel takes what lies around a device's part
as arrays of their own, and adds the residual.

Legend: B videos, C channels, T frames, Y rows, X columns; tensors are [B, C, T, Y, X].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F

from tpuport.core.layers.video_layers import convolve, has_kernels
from tpuport.core.tracing.context import current
from tpuport.core.tracing.patching import Patch
from tpuport.models.hunyuanvideo.vae_chunks import current_chunk
from tpuport.patches.diffusers import diffusers_patch


def _convolution(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The ``forward`` of a causal convolution of either form."""
    return _convolved(self, hidden_states, None)


def _residual_block(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The ``forward`` of a residual block of either form, without dropout."""
    x = self.conv1(self.nonlinearity(self.norm1(hidden_states)))
    x = self.nonlinearity(self.norm2(x))
    shortcut = self.conv_shortcut
    residual = hidden_states if shortcut is None else shortcut(hidden_states)
    return _convolved(self.conv2, x, residual)


def _convolved(
    module: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    """A causal convolution, added to ``residual``."""
    active, chunk = current(), current_chunk()
    context, conv = active.context, module.conv
    *around, lag, _ = module.time_causal_padding
    # Channels-last, as the kernels want them: so what is kept is not turned around.
    x = jnp.moveaxis(active.arrays(hidden_states), 1, -1)
    if chunk is None:
        before = jnp.repeat(x[:, :1], lag, axis=1)
    else:
        before = chunk.frames_before(x, lag)
    plain = conv.stride == (1, 1, 1) and conv.padding == (0, 0, 0)
    if has_kernels(context) and plain and conv.kernel_size == (3, 3, 3):
        weight, bias = active.arrays((conv.weight, conv.bias))
        added = residual
        if added is not None:
            added = jnp.moveaxis(active.arrays(added), 1, -1)
        noted = len(context.convolutions)
        try:
            out = convolve(context, x, before, weight, bias, added, border="edge")
            found: torch.Tensor = active.tensors(jnp.moveaxis(out, -1, 1))
            return found
        except NotImplementedError:
            del context.convolutions[noted:]
    if lag:
        x = jnp.concatenate([before, x], axis=1)
    both = active.tensors(jnp.moveaxis(x, -1, 1))
    out = conv(F.pad(both, (*around, 0, 0), mode=module.pad_mode))
    return out if residual is None else out + residual


def _enlarge(original: Callable[..., Any]) -> Callable[..., Any]:
    """``HunyuanVideo15Upsample.forward``: pixels and frames out of channels.

    The shortcut is added to the convolution before channels become pixels. In a chunk
    the first frame of the video makes twice the one frame that upstream makes of it.
    """

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        active, chunk = current(), current_chunk()
        times = 2 if self.add_temporal_upsample else 1
        if times == 2 and chunk is None:
            return original(self, x)
        given = jnp.moveaxis(active.arrays(x), 1, -1)
        batch, frames, rows, columns, channels = given.shape
        made = self.conv.conv.out_channels
        each = made // (4 * times)
        sources = jnp.arange(made) // self.repeats
        if chunk is not None and times == 2:
            # Of two times each pixel's channels, of which the second half is let go.
            pixel, channel = jnp.divmod(jnp.arange(made), 2 * each)
            once = jnp.minimum(channel, each - 1) // (self.repeats // 2)
            sources = jnp.where(chunk.first, pixel * (channels // 4) + once, sources)
        shortcut = active.tensors(jnp.moveaxis(_taken(given, sources), -1, 1))
        h = jnp.moveaxis(active.arrays(_convolved(self.conv, x, shortcut)), 1, -1)
        h = h.reshape(batch, frames, rows, columns, times, 2, 2, each)
        if chunk is not None and times == 2:
            kept = h.reshape(*h.shape[:4], 4, 2, each)[..., 0, :]
            twice = jnp.concatenate([kept, kept], axis=4).reshape(h.shape)
            h = jnp.where(chunk.first, twice, h)
        h = jnp.transpose(h, (0, 1, 4, 2, 5, 3, 6, 7))
        h = h.reshape(batch, frames * times, 2 * rows, 2 * columns, each)
        out: torch.Tensor = active.tensors(jnp.moveaxis(h, -1, 1))
        return out

    return forward


def _taken(x: jax.Array, sources: jax.Array) -> jax.Array:
    """Channels of [..., C], some of them several times, as a product of matrices.

    Exact: of each sum one product is not zero. XLA would repeat them one by one.
    """
    matrix = jnp.arange(x.shape[-1])[:, None] == sources
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(x, matrix.astype(x.dtype), precision=exact)


ENLARGE = diffusers_patch(
    "hunyuanvideo15-vae-upsampling",
    "models.autoencoders.autoencoder_kl_hunyuanvideo15:HunyuanVideo15Upsample.forward",
    _enlarge,
    "it makes one frame of the first and two of every other, and a later chunk has no "
    "first one; channels that are repeated one by one take a sixth of a decode",
    wraps=True,
)
"""Of the form of 1.5."""


def convolutions(name: str, convolution: str, block: str) -> tuple[Patch, Patch]:
    """Patches of a form's convolutions and residual blocks.

    Args:
        name: in front of theirs.
        convolution, block: module and class of each.
    """
    return (
        diffusers_patch(
            f"{name}-vae-convolution",
            f"{convolution}.forward",
            _convolution,
            "it repeats the first frame of whatever it is given, and a later chunk "
            "goes on from the frames before; to copy a video with a border around it "
            "takes two thirds of the time of the convolution",
        ),
        diffusers_patch(
            f"{name}-vae-residual-block",
            f"{block}.forward",
            _residual_block,
            "a sum of its own reads and writes a video once more; the kernel adds it",
        ),
    )
