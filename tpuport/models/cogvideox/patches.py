"""Patches that only CogVideoX needs.

On a TPU blocks of the autoencoder run as the layers of
:mod:`tpuport.models.cogvideox.flax_vae`, on tensors [B, C, T, Y, X] as upstream
holds them. Elsewhere, and where these layers cannot, they are upstream's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tpuport.core.layers.video_layers import LANES, has_kernels
from tpuport.core.tracing.context import current
from tpuport.core.tracing.patching import Patch
from tpuport.models.cogvideox import flax_vae
from tpuport.patches.diffusers import MODULATED_NORMS, diffusers_patch

#: What takes over, in reports; the convolutions in it are noted one by one.
UPSTREAM = "upstream's code"


def _fits(channels: int = LANES) -> bool:
    """Whether kernels run here, and blocks of so many channels in them."""
    return has_kernels(current().context) and channels % LANES == 0


def _as_layer(
    kind: Callable[[Any], Any], call: str, module: Any, *tensors: Any, **options: Any
) -> Any:
    """What the layer of a kind makes of tensors; ``None`` if it cannot, which is noted.

    Args:
        call: what upstream's module is, in reports.
        module: the layer's weights are its.
    """

    def run() -> Any:
        return flax_vae.on_tensors(kind(module), *tensors, **options)

    return current().context.tried(call, UPSTREAM, run)


def _causal_convolution(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return no cache from a causal convolution that never reads one."""

    def forward(
        self: Any, inputs: torch.Tensor, conv_cache: torch.Tensor | None = None
    ) -> Any:
        if self.time_kernel_size == 1:
            return original(self, inputs, conv_cache)[0], None
        found = None
        if _fits():
            given = (inputs, conv_cache)
            found = _as_layer(flax_vae.CausalConv, "causal convolution", self, *given)
        return found or original(self, inputs, conv_cache)

    return forward


def _norm_at_latent_size(original: Callable[..., Any]) -> Callable[..., Any]:
    """Apply the pointwise convolutions to the latents before they are enlarged.

    Enlarging by nearest neighbour copies elements and a pointwise convolution treats
    each by itself, so the order does not change a single product or sum.
    """

    def forward(
        self: Any,
        f: torch.Tensor,
        zq: torch.Tensor,
        conv_cache: dict[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, dict[str, None]]:
        if self.conv_y.time_kernel_size != 1 or self.conv_b.time_kernel_size != 1:
            raise NotImplementedError("the norm's convolutions are not pointwise")
        channels, empty = f.shape[1], {"conv_y": None, "conv_b": None}
        if _fits(channels):
            silu = getattr(self, _WITH_SILU, False)
            found = _as_layer(flax_vae.Norm, "norm", self, f, zq, silu=silu, kept=0)
            return found[0], empty
        modulation = torch.cat([self.conv_y.conv(zq), self.conv_b.conv(zq)], dim=1)
        if f.shape[2] > 1 and f.shape[2] % 2 == 1:
            # The first frame stands for itself, see the causal convolutions.
            first = F.interpolate(modulation[:, :, :1], size=f[:, :, :1].shape[-3:])
            rest = F.interpolate(modulation[:, :, 1:], size=f[:, :, 1:].shape[-3:])
            modulation = torch.cat([first, rest], dim=2)
        else:
            modulation = F.interpolate(modulation, size=f.shape[-3:])
        scaled = self.norm_layer(f) * modulation[:, :channels]
        return scaled + modulation[:, channels:], empty

    return forward


#: Set on a norm while it is to end with the SiLU that follows it.
_WITH_SILU = "tpuport_with_silu"


def _activation_in_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let the kernel of the decoder's last norm apply the SiLU after it as well."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm, activation = self.norm_out, self.conv_act
        known = isinstance(activation, torch.nn.SiLU)
        if not known or not _fits(norm.norm_layer.num_channels):
            return original(self, *args, **kwargs)
        self.conv_act = torch.nn.Identity()
        setattr(norm, _WITH_SILU, True)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.conv_act = activation
            delattr(norm, _WITH_SILU)

    return forward


def _resnet_block(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any,
        inputs: torch.Tensor,
        temb: torch.Tensor | None = None,
        zq: torch.Tensor | None = None,
        conv_cache: dict[str, torch.Tensor] | None = None,
    ) -> Any:
        found = None
        if temb is None and _fits(self.in_channels) and _fits(self.out_channels):
            given = (inputs, zq, conv_cache or {})
            found = _as_layer(flax_vae.ResnetBlock, "resnet block", self, *given)
        return found or original(self, inputs, temb, zq, conv_cache)

    return forward


def _upsample(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, inputs: torch.Tensor) -> Any:
        found = None
        if _fits(inputs.shape[1]):
            found = _as_layer(flax_vae.Upsample, "upsampler", self, inputs)
        return original(self, inputs) if found is None else found

    return forward


_VAE = "models.autoencoders.autoencoder_kl_cogvideox"

PATCHES: tuple[Patch, ...] = (
    MODULATED_NORMS[0],
    diffusers_patch(
        "cogvideox-upsample",
        "models.upsampling:CogVideoXUpsample3D.forward",
        _upsample,
        "on a TPU rows and columns are repeated within the convolution's kernel "
        "and frames after it, so that nothing is convolved or stored twice; elsewhere "
        "nothing changes",
        wraps=True,
    ),
    diffusers_patch(
        "cogvideox-resnet-block",
        f"{_VAE}:CogVideoXResnetBlock3D.forward",
        _resnet_block,
        "on a TPU norm, modulation and SiLU are one pass, and convolutions run "
        "in the project's kernel; elsewhere nothing changes",
        wraps=True,
    ),
    diffusers_patch(
        "cogvideox-activation-in-norm",
        f"{_VAE}:CogVideoXDecoder3D.forward",
        _activation_in_norm,
        "on a TPU the last norm and the SiLU after it are one pass over frames "
        "of the full size; elsewhere nothing changes",
        wraps=True,
    ),
    diffusers_patch(
        "cogvideox-norm-at-latent-size",
        f"{_VAE}:CogVideoXSpatialNorm3D.forward",
        _norm_at_latent_size,
        "the decoder's norms enlarge the latents to the size of the features "
        "and then convolve them pointwise: up to 256 times the work, same numbers",
        wraps=True,
    ),
    diffusers_patch(
        "cogvideox-pointwise-conv-cache",
        f"{_VAE}:CogVideoXCausalConv3d.forward",
        _causal_convolution,
        "a convolution of temporal size 1 keeps its whole input as a cache that "
        "is never read: it costs memory, and its shape depends on the chunk length, so "
        "the third chunk of a decode would compile once more",
        wraps=True,
    ),
)
