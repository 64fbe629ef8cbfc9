"""Both HunyuanVideo autoencoders against upstream, whole and in tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.module import BoundModule, PortedModule
from tpuport.core.patching import Patch, applied, inspect_patches
from tpuport.core.runtime import Runtime
from tpuport.errors import UsageError
from tpuport.models.hunyuanvideo import vae as ours
from tpuport.models.hunyuanvideo.vae_patches import VAE_13B, VAE_15
from tpuport.patches.conv import CONVOLUTION
from tpuport.patches.norms import FLOAT32_NORMS
from tpuport.patches.padding import PADDING
from tpuport.patches.resize import NEAREST_RESIZE
from tpuport.patches.tiling import TilePlan, assemble
from tpuport.patches.tracing import SLICE_ASSIGNMENT

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
        self.runtime = Runtime(
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


def encode_moments(name: str) -> Callable[..., Any]:
    return ours.encode_moments_15 if is_15(name) else ours.encode_moments_13b


def encode_mode(name: str) -> Callable[..., Any]:
    return ours.encode_mode_15 if is_15(name) else ours.encode_mode_13b


def upstream_decode(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """Upstream's own video; its 1.5 takes one at a time."""
    rows = z.split(1) if is_15_module(vae) else [z]
    return torch.cat([vae.decode(row).sample for row in rows])


def upstream_moments(vae: Any, x: torch.Tensor) -> torch.Tensor:
    """Upstream's own mean and log variance."""
    rows = x.split(1) if is_15_module(vae) else [x]
    return torch.cat([vae.encode(row).latent_dist.parameters for row in rows])


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


# ----------------------------------------------------------------------- whole


#: Configuration, videos, latent frames: an image, a video, two videos.
CASES = [
    *((name, *case) for name in ("15", "13b") for case in ((1, 1), (1, 3), (2, 3))),
    ("15 wider", 2, 2),
    ("13b without attention", 2, 2),
]


@pytest.mark.parametrize(("name", "batch", "frames"), CASES)
def test_decode_is_upstreams(name: str, batch: int, frames: int) -> None:
    vae = frozen_vae(name)
    z = latents(vae, batch, frames, 4, 3)
    found = shared_run(name)(decode_tile(name), z)
    assert_close(found, upstream_decode(vae, z))


@pytest.mark.parametrize(("name", "batch", "frames"), CASES)
def test_encode_is_upstreams(name: str, batch: int, frames: int) -> None:
    vae = frozen_vae(name)
    x = pixels(batch, 4 * frames - 3, 48, 32)
    found = shared_run(name)(encode_moments(name), x)
    assert_close(found, upstream_moments(vae, x))


@pytest.mark.parametrize("name", ["15", "13b"])
def test_the_mode_is_the_distributions(name: str) -> None:
    vae = frozen_vae(name)
    x = pixels(1, 1, 32, 48)
    found = shared_run(name)(encode_mode(name), x)
    assert_close(found, vae.encode(x).latent_dist.mode())


@pytest.mark.parametrize("name", ["15", "13b"])
def test_decode_is_no_further_from_the_truth_than_upstream(name: str) -> None:
    vae = make_vae(name)
    z = latents(vae, 1, 3, 4, 3)
    found, upstream = shared_run(name)(decode_tile(name), z), vae.decode(z).sample
    truth = vae.double().decode(z.double()).sample
    error = float((found - truth).abs().max())
    assert error <= 2 * float((upstream - truth).abs().max())


@pytest.mark.parametrize("name", ["15", "13b"])
def test_bfloat16_weights_err_about_as_upstream_does(name: str) -> None:
    low = make_vae(name).to(torch.bfloat16)
    z = latents(low, 1, 3, 4, 3).to(torch.bfloat16)
    exact = make_vae(name).to(torch.bfloat16).float()
    truth = exact.decode(z.float()).sample
    found = Bound(low, patches_of(name))(decode_tile(name), z.float())
    assert found.dtype == torch.float32
    error = float((found - truth).abs().mean())
    upstream = low.decode(z).sample.float()
    assert error <= 1.1 * float((upstream - truth).abs().mean())


@pytest.mark.parametrize("name", ["15", "13b"])
def test_attention_goes_by_frames(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three frames and not one, as some ports have it, and not full attention.
    from tpuport.patches import attention

    vae, attend = frozen_vae(name), attention.attend
    z = latents(vae, 1, 3, 4, 3)
    expected = vae.decode(z).sample

    def full(*args: Any, frame_tokens: int | None = None, **kwargs: Any) -> Any:
        return attend(*args, **kwargs)

    monkeypatch.setattr(attention, "attend", full)
    found = Bound(vae, patches_of(name))(decode_tile(name), z)
    assert float((found - expected).abs().max()) > 100 * ATOL


def test_later_latents_do_not_reach_earlier_frames() -> None:
    run = shared_run("15")
    z = latents(frozen_vae("15"), 1, 3, 4, 3)
    changed = z.clone()
    changed[:, :, 2] += 1
    first, second = run(decode_tile("15"), z), run(decode_tile("15"), changed)
    assert torch.equal(first[:, :, :5], second[:, :, :5])
    assert not torch.equal(first[:, :, 5:], second[:, :, 5:])


# ----------------------------------------------------------------------- tiles


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


def through_tiles(name: str, fn: Any, plan: TilePlan, x: torch.Tensor) -> torch.Tensor:
    run = shared_run(name)
    return torch.from_numpy(assemble(plan, (run(fn, t.cut(x)) for t in plan.tiles)))


#: Latent sizes of four tiles: by rows and columns, and by frames and rows.
TILED = [("15", (3, 5, 5)), ("13b", (3, 5, 3))]


@pytest.mark.parametrize(("name", "size"), TILED, ids=["15", "13b"])
def test_tiled_decode_is_upstreams(name: str, size: tuple[int, int, int]) -> None:
    vae = make_vae(name)
    z = latents(vae, 1, *size)
    whole = vae.decode(z).sample
    vae.enable_tiling(**tile_settings(name, 4, 4))
    plan = ours.plan_decode(vae, z.shape, tiling=True)
    assert len(plan.tiles) == 4
    found = through_tiles(name, decode_tile(name), plan, z)
    assert_close(found, vae.decode(z).sample)
    assert float((found - whole).abs().max()) > 100 * ATOL


@pytest.mark.parametrize(("name", "size"), TILED, ids=["15", "13b"])
def test_tiled_encode_is_upstreams(name: str, size: tuple[int, int, int]) -> None:
    vae = make_vae(name)
    frames, height, width = size
    ratio = vae.spatial_compression_ratio
    x = pixels(1, 4 * frames - 3, height * ratio, width * ratio)
    whole = vae.encode(x).latent_dist.parameters
    vae.enable_tiling(**tile_settings(name, 4, 4))
    plan = ours.plan_encode(vae, x.shape, tiling=True)
    assert len(plan.tiles) == 4
    found = through_tiles(name, encode_moments(name), plan, x)
    assert_close(found, vae.encode(x).latent_dist.parameters)
    assert float((found - whole).abs().max()) > 100 * ATOL


def test_13b_decodes_long_videos_in_pieces_also_without_tiling() -> None:
    vae = make_vae("13b")
    z = latents(vae, 2, 7, 2, 3)
    plan = ours.plan_decode(vae, z.shape, tiling=False)
    # Upstream's own settings; the seventh frame's piece adds nothing, and is not run.
    assert [(t.slices[0].start, t.slices[0].stop) for t in plan.tiles] == [
        (0, 5),
        (3, 7),
    ]
    found = through_tiles("13b", ours.decode_tile_13b, plan, z)
    assert_close(found, vae.decode(z).sample)


class Scramble(torch.nn.Module):
    """Stands in for a coder: resizes as it does, and tells tiles apart."""

    def __init__(self, vae: Any, *, decode: bool) -> None:
        super().__init__()
        self.time, self.space = ours._lengths(vae, decode=decode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames, rows, columns = x.shape[2:]
        size = (self.time(frames), self.space(rows), self.space(columns))
        grown = torch.nn.functional.interpolate(x, size=size)
        ramp = torch.arange(grown[0, 0].numel()).reshape(grown.shape[2:])
        return grown * (1 + x.mean()) + ramp.sin() * x.std()


#: ``enable_tiling`` settings, {} for upstream's own.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "15": [
        {},
        {"tile_overlap_factor": 0.5},
        # Rows and columns differ, and latents do not match pixels.
        {
            "tile_sample_min_height": 64,
            "tile_latent_min_height": 5,
            "tile_latent_min_width": 7,
            "tile_overlap_factor": 0.3,
        },
    ],
    "13b": [
        {},
        {
            "tile_sample_min_height": 64,
            "tile_sample_stride_height": 24,
            "tile_sample_min_width": 96,
            "tile_sample_stride_width": 88,
            "tile_sample_min_num_frames": 12,
            "tile_sample_stride_num_frames": 4,
        },
        # No overlap, and gaps for which nothing can be done.
        {"tile_sample_min_height": 192, "tile_sample_min_width": 128},
    ],
}
#: Latent frames, rows and columns, on both sides of one tile.
SIZES = {
    "15": [(1, 16, 16), (1, 17, 8), (2, 13, 18), (1, 26, 20)],
    "13b": [(1, 32, 32), (5, 13, 33), (7, 33, 6), (9, 8, 16), (1, 50, 40)],
}


@pytest.mark.parametrize(
    ("name", "setting", "size"),
    [
        pytest.param(name, setting, size, id=f"{name}-{setting}-{size}")
        for name, settings in SETTINGS.items()
        for setting in range(len(settings))
        for size in SIZES[name]
    ],
)
def test_tiles_are_joined_bit_for_bit(
    name: str, setting: int, size: tuple[int, int, int]
) -> None:
    vae = make_vae(name)
    vae.enable_tiling(**SETTINGS[name][setting])
    same = torch.nn.Identity()
    vae.quant_conv = vae.post_quant_conv = same
    vae.decoder, vae.encoder = (Scramble(vae, decode=d) for d in (True, False))
    frames, rows, columns = size
    z = latents(vae, 1, frames, rows, columns)
    plan = ours.plan_decode(vae, z.shape, tiling=True)
    outputs = (vae.decoder(t.cut(z)).numpy() for t in plan.tiles)
    expected = vae.decode(z.clone()).sample.numpy()
    assert np.array_equal(assemble(plan, outputs), expected)

    ratio = vae.spatial_compression_ratio
    # 13b takes any number of pixels, and drops what makes no whole latent.
    odd = 0 if is_15(name) else 3
    x = torch.randn(1, 4, 4 * frames - 3, rows * ratio + odd, columns * ratio)
    plan = ours.plan_encode(vae, x.shape, tiling=True)
    outputs = (vae.encoder(t.cut(x)).numpy() for t in plan.tiles)
    expected = vae.encode(x.clone()).latent_dist.parameters.numpy()
    assert np.array_equal(assemble(plan, outputs), expected)


@pytest.mark.parametrize("name", ["15", "13b"])
def test_one_tile_when_upstream_does_not_tile(name: str) -> None:
    vae = make_vae(name)
    big, small = (1, 4, 4, 60, 60), (1, 4, 4, 16, 16)
    for shape, tiling in ((big, False), (small, True)):
        (tile,) = ours.plan_decode(vae, shape, tiling=tiling).tiles
        assert tile.size == shape[2:]
    assert len(ours.plan_decode(vae, big, tiling=True).tiles) > 1


@pytest.mark.parametrize(
    ("name", "shape", "sizes", "output"),
    [
        # 121 frames of 480x848 by 1.5, and 129 of 720x1280 by 13b.
        ("15", (31, 30, 53), 4, (121, 480, 848)),
        ("13b", (33, 90, 160), 8, (129, 720, 1280)),
    ],
    ids=["15", "13b"],
)
def test_published_sizes_take_few_programs(
    name: str,
    shape: tuple[int, int, int],
    sizes: int,
    output: tuple[int, int, int],
) -> None:
    plan = ours.plan_decode(make_vae(name), (1, 4, *shape), tiling=True)
    assert len(plan.sizes) == sizes
    assert plan.output == output


def test_another_autoencoder_is_refused() -> None:
    with pytest.raises(UsageError, match="no tile plan for Linear"):
        ours.plan_decode(torch.nn.Linear(1, 1), (1, 4, 1, 8, 8), tiling=True)


# --------------------------------------------------------------------- patches


def test_every_patch_applies_here_and_is_undone() -> None:
    from diffusers.models.autoencoders import autoencoder_kl_hunyuan_video as v13b
    from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as v15

    patches = (*VAE_15, *VAE_13B)
    states = {s.name: s.state for s in inspect_patches(patches).entries}
    assert states == {
        "hunyuanvideo15-vae-frame-causal-attention": "applicable",
        "hunyuanvideo15-vae-convolution-in-chunks": "applicable",
        "hunyuanvideo15-vae-upsampling-in-chunks": "applicable",
        "hunyuanvideo-vae-frame-causal-attention": "applicable",
    }
    owners = (v15.HunyuanVideo15AttnBlock, v13b.HunyuanVideoMidBlock3D)
    before = [vars(owner)["forward"] for owner in owners]
    with applied(patches):
        for owner, original in zip(owners, before, strict=True):
            assert vars(owner)["forward"] is not original
    assert [vars(owner)["forward"] for owner in owners] == before


def test_upstreams_15_fails_on_two_videos_and_the_patch_does_not() -> None:
    vae = frozen_vae("15")
    z = latents(vae, 2, 2, 4, 3)
    with pytest.raises(RuntimeError, match="shape"):
        vae.decode(z)
    with applied(VAE_15):
        patched = vae.decode(z).sample
    assert_close(patched, upstream_decode(vae, z))


def operations(name: str, patches: Sequence[Patch], z: torch.Tensor) -> str:
    return Bound(frozen_vae(name), patches).lowered(decode_tile(name), z)


def test_15_takes_no_operation_for_each_token() -> None:
    vae = frozen_vae("15")
    small, large = (latents(vae, 1, 3, 4, columns) for columns in (3, 6))
    added = {}
    for label, patches in (("upstream", ()), ("ours", VAE_15)):
        texts = [operations("15", patches, z) for z in (small, large)]
        added[label] = len(texts[1].splitlines()) - len(texts[0].splitlines())
    # 36 tokens more.
    assert added["upstream"] >= 36
    assert added["ours"] <= 0


@pytest.mark.parametrize("name", ["15", "13b"])
def test_no_array_is_tokens_by_tokens(name: str) -> None:
    z = latents(frozen_vae(name), 1, 3, 4, 5)
    square = "60x60xf32"
    assert square in operations(name, (), z)
    assert square not in operations(name, patches_of(name), z)
