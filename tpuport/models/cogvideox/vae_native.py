"""CogVideoX's autoencoder blocks on TPU, from the project's kernels.

Computation and weights are upstream's, on tensors [B, C, T, Y, X] as upstream holds
them; see :mod:`tpuport.core.layers.video_layers`. Norm, modulation and SiLU are one
pass. A convolution reads the frames of the chunk before, and the rows and columns of
other devices, without joining arrays first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.core.layers.video_layers import (
    LANES,
    PRODUCT,
    convolve,
    enlarged_convolution,
    group_norm,
    has_kernels,
    marked_picture,
    modulation_maps,
)
from tpuport.core.tracing.context import Active, current
from tpuport.core.tracing.convolution_notes import note

Cache = dict[str, Any]

#: Frames that a convolution of three looks back at.
KEPT = 2


def applies(channels: int) -> bool:
    """Whether blocks of so many channels have a native form where this is traced."""
    return has_kernels(current().context) and channels % LANES == 0


def channels_last(x: jax.Array) -> jax.Array:
    """[B, C, T, Y, X] -> [B, T, Y, X, C]."""
    return jnp.transpose(x, (0, 2, 3, 4, 1))


def channels_first(x: jax.Array) -> jax.Array:
    """[B, T, Y, X, C] -> [B, C, T, Y, X]."""
    return jnp.transpose(x, (0, 4, 1, 2, 3))


def causal_convolution(
    module: Any, inputs: torch.Tensor, cache: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``CogVideoXCausalConv3d.forward`` with a kernel of 3 x 3 x 3.

    Raises:
        NotImplementedError: the kernels cannot.
    """
    active = current()
    x = channels_last(active.arrays(inputs))
    kept = None if cache is None else channels_last(active.arrays(cache))
    out, kept = _causal(active, module, x, kept)
    first = (channels_first(array) for array in (out, kept))
    output, cache = (active.tensors(array) for array in first)
    assert cache is not None
    return output, cache


def _causal(
    active: Active,
    module: Any,
    x: jax.Array,
    cache: jax.Array | None,
    kept: jax.Array | None = None,
    **added: Any,
) -> tuple[jax.Array, jax.Array]:
    """On arrays [B, T, Y, X, C]: the output, and the frames for the next chunk.

    ``kept`` has the last frames of ``x``, where there is an array of them already;
    ``added`` is :func:`~tpuport.core.layers.video_layers.convolve`'s ``residual`` or
    ``shortcut``.
    """
    conv = module.conv
    frames = module.time_kernel_size - 1
    if module.pad_mode == "replicate" or frames != 2 or conv.dilation[0] != 1:
        raise NotImplementedError(f"{module.pad_mode} padding of {frames} frames")
    if tuple(conv.stride) != (1, 1, 1):
        raise NotImplementedError(f"a stride of {tuple(conv.stride)}")
    before = jnp.repeat(x[:, :1], frames, axis=1) if cache is None else cache
    weight, bias = active.arrays((conv.weight, conv.bias))
    out = convolve(active.context, x, before, weight, bias, **added)
    if x.shape[1] < frames:
        return out, jnp.concatenate([before, x], axis=1)[:, -frames:]
    return out, x[:, -frames:] if kept is None else kept


def norm(
    module: Any, features: torch.Tensor, latents: torch.Tensor | None, *, silu: bool
) -> torch.Tensor:
    """``CogVideoXSpatialNorm3D.forward``, or a group norm without ``latents``.

    ``silu`` says whether to end with SiLU, which in upstream's code comes after it.
    """
    active = current()
    x = channels_last(active.arrays(features))
    z = None if latents is None else channels_last(active.arrays(latents))
    found, _ = _norm(active, module, x, z, silu=silu)
    out: torch.Tensor = active.tensors(channels_first(found))
    return out


def _norm(
    active: Active,
    module: Any,
    x: jax.Array,
    z: jax.Array | None,
    *,
    silu: bool,
    kept: int = 0,
) -> tuple[jax.Array, jax.Array | None]:
    """On arrays [B, T, Y, X, C]; and the last ``kept`` frames by themselves."""
    maps = None
    layer = module
    if z is not None:
        layer = module.norm_layer
        convs = (module.conv_y.conv, module.conv_b.conv)
        weights, biases = (
            tuple(active.arrays(getattr(conv, name)) for conv in convs)
            for name in ("weight", "bias")
        )
        maps = modulation_maps(z, x.shape[3], weights, biases)
        maps = marked_picture(active.context, "a modulation", maps, z)
        for _ in convs:
            note(active.context, PRODUCT)
    weight, bias = active.arrays((layer.weight, layer.bias))
    return group_norm(
        active.context,
        x,
        layer.num_groups,
        weight,
        bias,
        layer.eps,
        maps,
        silu=silu,
        kept=kept,
    )


def resnet_block(
    module: Any,
    inputs: torch.Tensor,
    latents: torch.Tensor | None,
    cache: Cache,
) -> tuple[torch.Tensor, Cache]:
    """``CogVideoXResnetBlock3D.forward`` without a time embedding.

    Raises:
        NotImplementedError: the kernels cannot.
    """
    if not isinstance(module.nonlinearity, torch.nn.SiLU):
        raise NotImplementedError(f"{type(module.nonlinearity).__name__} between")
    if module.use_conv_shortcut and module.in_channels != module.out_channels:
        raise NotImplementedError("a shortcut of 3 x 3 x 3")
    active = current()
    x = channels_last(active.arrays(inputs))
    z = None if latents is None else channels_last(active.arrays(latents))
    kept = {
        name: channels_last(active.arrays(cache[name]))
        for name in ("conv1", "conv2")
        if name in cache
    }
    # What the convolutions hand on to the next chunk, where a chunk has as much.
    last = KEPT if x.shape[1] >= KEPT else 0
    hidden, frames = _norm(active, module.norm1, x, z, silu=True, kept=last)
    before = kept.get("conv1")
    hidden, first = _causal(active, module.conv1, hidden, before, kept=frames)
    hidden, frames = _norm(active, module.norm2, hidden, z, silu=True, kept=last)
    added: dict[str, Any] = {"residual": x}
    if module.in_channels != module.out_channels:
        short = module.conv_shortcut
        added = {"shortcut": (x, *active.arrays((short.weight, short.bias)))}
    before = kept.get("conv2")
    hidden, second = _causal(active, module.conv2, hidden, before, kept=frames, **added)
    output = active.tensors(channels_first(hidden))
    found: Cache = {"conv1": first, "conv2": second}
    return output, {k: active.tensors(channels_first(v)) for k, v in found.items()}


def upsample(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    """``CogVideoXUpsample3D.forward``; frames are repeated once they are convolved.

    Upstream repeats them first: each is convolved by itself, so that it is the same
    work twice.

    Raises:
        NotImplementedError: the kernels cannot.
    """
    conv = module.conv
    known = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)
    if known != ((3, 3), (1, 1), (1, 1), (1, 1), 1):
        raise NotImplementedError(f"a convolution of {known}")
    active = current()
    x = channels_last(active.arrays(inputs))
    frames = x.shape[1]
    copies = 2 if module.compress_time and frames > 1 else 1
    weight, bias = active.arrays((conv.weight, conv.bias))
    out = enlarged_convolution(active.context, x, weight, bias, copies)
    if copies > 1 and frames % 2:
        # Of an odd number the first stands for itself.
        out = out[:, 1:]
    output: torch.Tensor = active.tensors(channels_first(out))
    return output
