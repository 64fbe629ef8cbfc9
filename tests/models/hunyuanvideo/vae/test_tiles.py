"""Both HunyuanVideo autoencoders in tiles against upstream's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.core.layers.test_tiles import assemble, sizes
from tests.models.hunyuanvideo.vae.vaes import (
    ATOL,
    assert_close,
    decode_tile,
    latents,
    make_vae,
    shared_run,
    tile_settings,
)
from tpuport.core.arrays import to_numpy
from tpuport.core.layers.tiles import TilePlan
from tpuport.errors import UsageError
from tpuport.models.hunyuanvideo import vae as ours


def through_tiles(name: str, fn: Any, plan: TilePlan, x: torch.Tensor) -> torch.Tensor:
    run = shared_run(name)
    return torch.from_numpy(assemble(plan, (run(fn, t.cut(x)) for t in plan.tiles)))


#: Latent sizes of four tiles: by rows and columns, and by frames and rows.
TILED = [("15 small", (3, 5, 5)), ("13b small", (3, 5, 3))]


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


def test_13b_decodes_long_videos_in_pieces_also_without_tiling() -> None:
    vae = make_vae("13b small")
    z = latents(vae, 2, 7, 2, 3)
    plan = ours.plan_decode(vae, z.shape, tiling=False)
    # Upstream's own settings; the seventh frame's piece adds nothing, and is not run.
    assert [(t.slices[0].start, t.slices[0].stop) for t in plan.tiles] == [
        (0, 5),
        (3, 7),
    ]
    found = through_tiles("13b small", ours.decode_tile_13b, plan, z)
    assert_close(found, vae.decode(z).sample)


class Scramble(torch.nn.Module):
    """Stands in for a decoder: resizes as it does, and tells tiles apart."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.time, self.space = ours._lengths(vae)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames, rows, columns = x.shape[2:]
        size = (self.time(frames), self.space(rows), self.space(columns))
        grown = torch.nn.functional.interpolate(x, size=size)
        ramp = torch.arange(grown[0, 0].numel()).reshape(grown.shape[2:])
        return (grown * (1 + x.mean()) + ramp.sin() * x.std()).to(x.dtype)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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
    name: str, setting: int, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Also where upstream blends in bfloat16, with its roundings."""
    vae = make_vae(name)
    vae.enable_tiling(**SETTINGS[name][setting])
    same = torch.nn.Identity()
    vae.post_quant_conv = same
    vae.decoder = Scramble(vae)
    frames, rows, columns = size
    z = latents(vae, 1, frames, rows, columns).to(dtype)
    plan = ours.plan_decode(vae, z.shape, tiling=True)
    outputs = (to_numpy(vae.decoder(t.cut(z))) for t in plan.tiles)
    expected = vae.decode(z.clone()).sample.float().numpy()
    assert np.array_equal(assemble(plan, outputs), expected)


@pytest.mark.parametrize("name", ["15", "13b"])
def test_one_tile_when_upstream_does_not_tile(name: str) -> None:
    vae = make_vae(name)
    big, small = (1, 4, 4, 60, 60), (1, 4, 4, 16, 16)
    for shape, tiling in ((big, False), (small, True)):
        plan = ours.plan_decode(vae, shape, tiling=tiling)
        assert sizes(plan) == [shape[2:]]
    assert len(ours.plan_decode(vae, big, tiling=True).tiles) > 1


@pytest.mark.parametrize(
    ("name", "shape", "count", "output"),
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
    count: int,
    output: tuple[int, int, int],
) -> None:
    plan = ours.plan_decode(make_vae(name), (1, 4, *shape), tiling=True)
    assert len(sizes(plan)) == count
    assert plan.output == output


def test_another_autoencoder_is_refused() -> None:
    with pytest.raises(UsageError, match="no tile plan for Linear"):
        ours.plan_decode(torch.nn.Linear(1, 1), (1, 4, 1, 8, 8), tiling=True)
