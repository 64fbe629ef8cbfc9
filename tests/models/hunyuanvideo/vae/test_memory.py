"""What decode is estimated to take of a device, for both HunyuanVideo autoencoders."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tpuport
from tests.models.conftest import BUFFERS
from tpuport.core.mesh.device_memory import planned_bytes, program_room
from tpuport.core.plan.abstract_programs import abstract_programs
from tpuport.core.spec.tiling import TilingDecision, decide
from tpuport.models.hunyuanvideo import published, vae_memory
from tpuport.models.hunyuanvideo.vae_memory import MARGIN

MIB = 2**20
#: More columns than a tile has: of eight devices each has 5 of the latents of 1.5.
SIZES = {"dp=1": (64, 320), "sp=8": (128, 640)}


#: Form, frames and program: of 1.5 the chunk that is not the first; of 13b the whole,
#: or tiles in time and the seam that they hand on.
PROGRAMS = [
    ("1.5", 13, "next uint8"),
    ("13b", 13, "whole uint8"),
    ("13b", 25, "tile uint8"),
]
#: Each dtype, each mesh and each program once; the rest are sums of the same parts.
SHORT = {
    ("next uint8", "sp=8", "bfloat16"),
    ("whole uint8", "dp=1", "bfloat16"),
    ("tile uint8", "sp=8", "float32"),
}


@pytest.mark.parametrize(
    ("form", "frames", "name", "mesh", "dtype"),
    [
        pytest.param(
            *(form, frames, name, mesh, dtype),
            marks=() if (name, mesh, dtype) in SHORT else pytest.mark.sweep,
        )
        for form, frames, name in PROGRAMS
        for mesh in SIZES
        for dtype in ("float32", "bfloat16")
    ],
)
def test_the_estimate_is_of_the_size_of_the_compiled_program(
    form: str,
    frames: int,
    name: str,
    mesh: str,
    dtype: str,
    hunyuanvideo_folders: dict[str, Path],
    cache_dir: Path,
) -> None:
    decided: list[TilingDecision] = []
    height, width = SIZES[mesh]
    with tpuport.load(
        "hunyuanvideo",
        weights=hunyuanvideo_folders[form],
        cache_dir=cache_dir,
        mesh=mesh,
    ) as session:
        programs = abstract_programs(
            session.port,
            session.variant,
            session.checkpoint,
            session.request(prompt="a", height=height, width=width, num_frames=frames),
            session.mesh,
            dtype=dtype,
            stages=["decode"],
            vae_tiling="off",
            decided=decided.append,
        )
        # Of tiles in time the first one; the last is shorter.
        program = next(p for p in [*programs] if p.program == name)
        compiled = planned_bytes(program.lowered().compile(BUFFERS)) or 0
    (found,) = decided
    assert not found.tiled
    # Never much below, and no wild guess above.
    assert (1 - MARGIN) * compiled <= found.chosen.bytes <= 2 * compiled
    assert found.other is not None
    assert "1 x " in found.other.tiles


def test_a_seam_of_13b_is_counted_by_device() -> None:
    """Four frames of pixels, of the rows and columns that one of eight devices has."""
    shape = (1, 5, 9, 16)
    alone = vae_memory.decoder_13b(published.VAE_13B, shape, 8)
    handed = vae_memory.decoder_13b(published.VAE_13B, shape, 8, 4)
    assert alone.past == 0
    # 9 x 2 latents.
    assert handed.past == 3 * 4 * 72 * 16
    more = (parts.bytes(2, 2, 5.0) for parts in (handed, alone))
    assert next(more) - next(more) == 2 * handed.past


# --- published sizes on chips that are not there


def published_vae(form: str) -> Any:
    """The autoencoder of a form without data."""
    import diffusers

    cls = (
        "AutoencoderKLHunyuanVideo15" if form == "1.5" else "AutoencoderKLHunyuanVideo"
    )
    config = published.VAE_15 if form == "1.5" else published.VAE_13B
    with torch.device("meta"):
        return getattr(diffusers, cls)(
            **{k: v for k, v in config.items() if not k.startswith("_")}
        )


def decision(
    form: str, chips: int, height: int, width: int, frames: int
) -> TilingDecision:
    """What ``auto`` decides in bfloat16 on that many chips of v6e."""

    def described() -> Any:
        raise NotImplementedError

    devices = [
        SimpleNamespace(
            platform="tpu", device_kind="TPU v6 lite", memory_stats=described
        )
    ] * chips
    module = published_vae(form)
    request = SimpleNamespace(
        batch_size=1, num_frames=frames, height=height, width=width
    )
    context: Any = SimpleNamespace(
        request=request, dtype="bfloat16", module=lambda name: module
    )
    footprint = vae_memory.footprint_15 if form == "1.5" else vae_memory.footprint_13b
    untiled, tiled = (footprint(context, tiles, devices) for tiles in (False, True))
    return decide("decode", "auto", untiled, tiled, program_room(devices))


def test_the_estimate_is_of_the_size_of_a_program_for_v6e() -> None:
    # By the compiler for eight chips.
    for form, size, compiled in (
        ("1.5", (720, 1280, 121), 6357 * MIB),
        ("13b", (320, 1024, 9), 1374 * MIB),
    ):
        found = decision(form, 8, *size)
        assert not found.tiled
        assert (1 - MARGIN) * compiled <= found.chosen.bytes <= 2 * compiled


@pytest.mark.parametrize("form", ["1.5", "13b"])
def test_720p_is_whole_on_eight_chips_and_tiled_on_one(form: str) -> None:
    eight, one = (decision(form, chips, 720, 1280, 121) for chips in (8, 1))
    assert not eight.tiled
    assert eight.fits
    assert one.tiled
    assert one.other is not None
    assert one.limit is not None
    assert one.other.bytes > one.limit
    assert one.chosen.tiles == "4 x 7 tiles of up to 256 x 256 pixels"
    # The tiles of 1.5 are whole in time: 121 frames of them may not fit either.
    assert one.fits == (form == "13b")


def test_480p_of_1_5_is_whole_on_one_chip() -> None:
    found = decision("1.5", 1, 480, 832, 121)
    assert not found.tiled
    assert found.fits
    # A tile is whole in time, and not the smaller program on one chip.
    assert found.other is not None
    assert found.other.bytes > found.chosen.bytes
