"""Both autoencoders, ported by their plugins, are upstream's.

``tests/models/shared/test_vaes_in_space.py`` has meshes whose sides do not divide.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tpuport
from tests.models.hunyuanvideo.vaes import CONFIGS, latents, make_vae
from tests.models.jaxprs import arrays_in, squares
from tests.tolerances import TOLERANCES
from tpuport.core.seam.ported import seam_of

ATOL = TOLERANCES["component float32"]


def upstream(vae: Any, z: torch.Tensor) -> torch.Tensor:
    """Upstream's own video; the mask of its 1.5 fits one at a time."""
    rows = z.split(1) if "15" in type(vae).__name__ else [z]
    return torch.cat([vae.decode(row).sample for row in rows])


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= ATOL
    assert float(expected.std()) > 100 * ATOL


@pytest.mark.parametrize(
    ("name", "frames"),
    [
        *((name, 3) for name in CONFIGS),
        *(("15 small", frames) for frames in (1, 2, 6)),
    ],
)
def test_decode_is_upstreams(name: str, frames: int) -> None:
    vae = make_vae(name)
    z = latents(vae, 2, frames, 3, 4)
    check(tpuport.port(vae).decode(z).sample, upstream(vae, z))


def test_chunks_of_a_split_picture_are_upstreams() -> None:
    vae = make_vae("15 wider")
    z = latents(vae, 1, 5, 3, 16)
    check(tpuport.port(vae, mesh="sp=8").decode(z).sample, vae.decode(z).sample)


def test_memory_of_chunks_is_that_of_one() -> None:
    """Nothing grows with the number of frames but what is small, and the video."""

    def largest(chunks: int) -> int:
        vae = make_vae("15 small")
        ported = tpuport.port(vae)
        ported.decode(latents(vae, 1, chunks, 8, 8))
        (entry,) = seam_of(ported).entries.values()
        (program,) = entry.programs
        return max(math.prod(shape) for shape in arrays_in(program.traced.jaxpr))

    video = 3 * (12 * 4) * 32 * 32
    assert largest(12) == max(largest(3), video)


@pytest.mark.parametrize("name", ["15 small", "13b small"])
def test_attention_has_no_array_of_all_tokens_by_all(name: str) -> None:
    """Upstream makes a mask of 2,160 x 2,160 here."""
    vae = make_vae(name)
    frames, rows, columns = 3, 24, 30
    ported = tpuport.port(vae, mesh="sp=2")
    ported.decode(latents(vae, 1, frames, rows, columns))
    programs = [p for e in seam_of(ported).entries.values() for p in e.programs]
    assert programs
    for program in programs:
        assert squares(program.traced.jaxpr, frames * rows * columns) == []


@pytest.mark.parametrize("name", ["15 small", "13b small"])
def test_tiles_are_upstreams(name: str) -> None:
    """Upstream's loops drive, in space and of 13b in time; tiles at the ends differ."""
    vae = make_vae(name)
    sides = {"tile_sample_min_height": 12, "tile_sample_min_width": 16}
    if name.startswith("15"):
        sides |= {"tile_latent_min_height": 3, "tile_latent_min_width": 4}
    else:
        sides |= {
            "tile_sample_min_num_frames": 8,
            "tile_sample_stride_height": 8,
            "tile_sample_stride_width": 12,
            "tile_sample_stride_num_frames": 4,
        }
    ported = tpuport.port(vae)
    for one in (vae, ported):
        one.enable_tiling(**sides)
    z = latents(vae, 1, 4, 5, 6)
    check(ported.decode(z).sample, vae.decode(z).sample)
