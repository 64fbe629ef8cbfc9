"""Small HunyuanVideo autoencoders with random weights, and how tests run them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.core.tracing.patching import Patch
from tpuport.core.tracing.ported_module import BoundModule, PortedModule
from tpuport.models.hunyuanvideo import vae as ours
from tpuport.models.hunyuanvideo.vae_patches import VAE_13B, VAE_15
from tpuport.patches.conv import CONVOLUTION
from tpuport.patches.norms import FLOAT32_NORMS
from tpuport.patches.padding import PADDING
from tpuport.patches.resize import NEAREST_RESIZE
from tpuport.patches.torchax_slices import SLICE_ASSIGNMENT

ATOL = TOLERANCES["component float32"]

#: Of each autoencoder, the smallest that has every part, and another legal one.
CONFIGS: dict[str, dict[str, Any]] = {
    "15": {"block_out_channels": (16, 16, 16, 16, 16), "layers_per_block": 1},
    "15 wider": {
        "block_out_channels": (16, 32, 32, 64),
        "layers_per_block": 2,
        "spatial_compression_ratio": 8,
        "upsample_match_channel": False,
    },
    "13b": {
        "block_out_channels": (8, 8, 8, 8),
        "layers_per_block": 1,
        "norm_num_groups": 4,
    },
    "13b without attention": {
        "block_out_channels": (8, 8, 16, 16),
        "layers_per_block": 2,
        "norm_num_groups": 8,
        "spatial_compression_ratio": 4,
        "mid_block_add_attention": False,
    },
    # The fewest blocks, for programs that take long to compile.
    "15 small": {
        "block_out_channels": (8, 8, 8),
        "layers_per_block": 1,
        "spatial_compression_ratio": 4,
    },
    "13b small": {
        "block_out_channels": (8, 8, 8),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "spatial_compression_ratio": 4,
        "down_block_types": ("HunyuanVideoDownBlock3D",) * 3,
        "up_block_types": ("HunyuanVideoUpBlock3D",) * 3,
    },
}


def is_15(name: str) -> bool:
    return name.startswith("15")


@functools.cache
def frozen_vae(name: str) -> torch.nn.Module:
    import diffusers

    torch.manual_seed(0)
    cls = "AutoencoderKLHunyuanVideo15" if is_15(name) else "AutoencoderKLHunyuanVideo"
    vae = getattr(diffusers, cls)(latent_channels=4, **CONFIGS[name]).eval()
    vae.requires_grad_(False)
    if not is_15(name):
        # A trained decoder ends in [-1, 1]; this one ends in [-3, 3], where the
        # rounding of upstream's own float32 run is over half the tolerance.
        vae.decoder.conv_out.conv.weight.mul_(0.3)
        vae.decoder.conv_out.conv.bias.mul_(0.3)
    return vae


def make_vae(name: str) -> Any:
    """A small autoencoder whose settings a test may change."""
    vae = frozen_vae(name)
    again = type(vae).from_config(vae.config).eval().requires_grad_(False)
    again.load_state_dict(vae.state_dict())
    return again


class Bound:
    """An autoencoder with its weights: calls run under jit, on and to torch tensors."""

    def __init__(
        self, vae: torch.nn.Module, patches: Sequence[Patch], mesh: Any = None
    ) -> None:
        self.runtime = model_runtime(
            mesh=mesh,
            platform="cpu",
            patches=(*SLICE_ASSIGNMENT, *patches),
            overrides=(*FLOAT32_NORMS, NEAREST_RESIZE, CONVOLUTION, PADDING),
            matmul_precision="highest",
        )
        self.ported = ported = PortedModule(vae, self.runtime)
        tensors = dict(vae.named_parameters())
        self.weights = {n: to_numpy(tensors[n]) for n in ported.names.stored}

        def program(fn: Callable[..., Any], weights: Any, x: Any) -> Any:
            return fn(BoundModule(ported, weights), x)

        self.program = jax.jit(program, static_argnums=0)

    def __call__(self, fn: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        """``fn(model, x)``."""
        return to_torch(self.program(fn, self.weights, to_numpy(x)))

    def lowered(self, fn: Callable[..., Any], x: torch.Tensor) -> str:
        """The program's text."""
        return str(self.program.lower(fn, self.weights, to_numpy(x)).as_text())


def patches_of(name: str) -> tuple[Patch, ...]:
    return VAE_15 if is_15(name) else VAE_13B


@functools.cache
def shared_run(name: str) -> Bound:
    return Bound(frozen_vae(name), patches_of(name))


def decode_tile(name: str) -> Callable[..., Any]:
    return ours.decode_tile_15 if is_15(name) else ours.decode_tile_13b


def encode_mode(name: str) -> Callable[..., Any]:
    return ours.encode_mode_15 if is_15(name) else _encode_mode_13b


def _encode_mode_13b(model: BoundModule, x: Any) -> Any:
    """No stage encodes with 13b; its encoder runs from the patches all the same."""
    moments = model(model(x, method="encoder"), method="quant_conv")
    return moments[:, : moments.shape[1] // 2]


def upstream_decode(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """Upstream's own video; its 1.5 takes one at a time."""
    rows = z.split(1) if is_15_module(vae) else [z]
    return torch.cat([vae.decode(row).sample for row in rows])


def upstream_mode(vae: Any, x: torch.Tensor) -> torch.Tensor:
    """Upstream's own mode of the latents."""
    rows = x.split(1) if is_15_module(vae) else [x]
    return torch.cat([vae.encode(row).latent_dist.mode() for row in rows])


def is_15_module(vae: Any) -> bool:
    return type(vae).__name__ == "AutoencoderKLHunyuanVideo15"


def latents(vae: Any, batch: int, frames: int, rows: int, columns: int) -> torch.Tensor:
    channels = vae.config.latent_channels
    return torch.randn(
        batch,
        channels,
        frames,
        rows,
        columns,
        generator=torch.Generator().manual_seed(1),
    )


def pixels(batch: int, frames: int, height: int, width: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.rand(batch, 3, frames, height, width, generator=draw) * 2 - 1


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert float((found - expected).abs().max()) <= ATOL


def tile_settings(name: str, height: int, width: int) -> dict[str, Any]:
    """Arguments of ``enable_tiling`` for tiles of that many latent rows, columns."""
    vae = frozen_vae(name)
    ratio: Any = vae.spatial_compression_ratio
    settings = {
        "tile_sample_min_height": height * ratio,
        "tile_sample_min_width": width * ratio,
    }
    if is_15(name):
        return settings | {
            "tile_latent_min_height": height,
            "tile_latent_min_width": width,
        }
    return settings | {
        "tile_sample_min_num_frames": 8,
        "tile_sample_stride_height": (height - 1) * ratio,
        "tile_sample_stride_width": (width - 1) * ratio,
        "tile_sample_stride_num_frames": 4,
    }
