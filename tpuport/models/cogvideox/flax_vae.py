"""CogVideoX's autoencoder in Flax, for ``--vae flax``.

Upstream's loop calls the encoder or the decoder with a chunk of frames, and hands on
what the causal convolutions need. Both run as Flax modules, channels last, on arrays of
upstream's own modules.

Legend: N videos, T/Y/X latent frames, rows, columns, F frames, C latent channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch
from flax import nnx

from tpuport.core.tracing.context import OpContext
from tpuport.models.cogvideox.flax_layers import (
    CausalConv,
    Downsample,
    Norm,
    ResnetBlock,
    Upsample,
    on_tensors,
    refuse,
)
from tpuport.plugin import NativeForm, diffusers_patch

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
