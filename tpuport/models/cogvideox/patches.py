"""Patches that only CogVideoX needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tpuport.core.patching import Patch

if TYPE_CHECKING:
    import torch


def _forget_pointwise_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return no cache from a causal convolution that never reads one."""

    def forward(
        self: Any, inputs: torch.Tensor, conv_cache: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, cache = original(self, inputs, conv_cache)
        return output, None if self.time_kernel_size == 1 else cache

    return forward


def _positions_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Compute sin-cos positions with torch on the host, in float64 as upstream does."""

    def _get_positional_embeddings(
        self: Any,
        sample_height: int,
        sample_width: int,
        sample_frames: int,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        import torch

        from tpuport.core.tracing import outside_torchax

        with outside_torchax() as lift:
            table = original(
                self, sample_height, sample_width, sample_frames, torch.device("cpu")
            )
            return lift(table)

    return _get_positional_embeddings


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="cogvideox-pointwise-conv-cache",
        target="diffusers.models.autoencoders.autoencoder_kl_cogvideox"
        ":CogVideoXCausalConv3d.forward",
        replacement=_forget_pointwise_cache,
        wraps=True,
        reason="a convolution of temporal size 1 keeps its whole input as a cache that "
        "is never read: it costs memory, and its shape depends on the chunk length, so "
        "the third chunk of a decode would compile once more",
        upstream="diffusers>=0.42,<0.43",
        link="https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/"
        "models/autoencoders/autoencoder_kl_cogvideox.py",
    ),
    Patch(
        name="cogvideox-sincos-positions",
        target="diffusers.models.embeddings"
        ":CogVideoXPatchEmbed._get_positional_embeddings",
        replacement=_positions_on_host,
        wraps=True,
        reason="positions for a size other than the trained one are computed in "
        "float64 inside forward; traced, they would be float32",
        upstream="diffusers>=0.42,<0.43",
        link="https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/"
        "models/embeddings.py",
    ),
)
