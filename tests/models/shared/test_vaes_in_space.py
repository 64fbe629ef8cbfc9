"""Published autoencoders that a plugin splits in space, decoded by upstream's loops.

Compiling two programs for several devices takes most of the time of a case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.core.seam.test_space import latents
from tests.models.conftest import make_vae as cogvideox
from tests.models.hunyuanvideo.vaes import make_vae as hunyuanvideo
from tests.tolerances import TOLERANCES
from tpuport.core.enums import Blocks
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.spatial_split import SpatialSplit
from tpuport.core.seam.ported import port_module, seam_of
from tpuport.core.space import pictures as ways
from tpuport.core.spec.model_plugin import ModelPlugin, Module
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.weights.sharding import DEFAULT_LAYOUT
from tpuport.targets import general_target, place_for_port

ATOL = TOLERANCES["mesh float32"]
HUNYUAN = "tpuport.models.hunyuanvideo."
#: How a small one is made, and the model's patches.
VAES: dict[str, tuple[Callable[[], Any], str]] = {
    "cogvideox": (cogvideox, "tpuport.models.cogvideox.patches:PATCHES"),
    "15": (lambda: hunyuanvideo("15 small"), HUNYUAN + "patches:PATCHES"),
    "13b": (lambda: hunyuanvideo("13b small"), HUNYUAN + "patches_13b:PATCHES"),
}


def pair(name: str, mesh: str) -> tuple[Any, Any]:
    """Upstream's autoencoder, and its twin on a mesh."""
    make, patches = VAES[name]
    vae = make().requires_grad_(False).eval()
    plugin = ModelPlugin(
        "trial",
        "diffusers:CogVideoXPipeline",
        modules={type(vae).__name__: Module(split="space")},
        patches=patches,
    )
    general = general_target(place_for_port(MeshSpec.parse(mesh)), RunSettings())
    target = general.of_plugin(plugin, Blocks.UPSTREAM, DEFAULT_LAYOUT)
    return vae, port_module(vae, target)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= ATOL
    assert float(expected.std()) > 100 * ATOL


def are_split(module: Any) -> bool:
    """Whether no device has the whole of a picture, in any program."""
    programs = [p for entry in seam_of(module).entries.values() for p in entry.programs]
    return all(
        one.sharding.shard_shape(one.shape) != one.shape
        for program in programs
        for one in program.inputs
    )


sweep = pytest.mark.sweep


@pytest.mark.parametrize(
    ("name", "mesh", "rows", "columns"),
    [
        ("cogvideox", "sp=2", 5, 4),
        # 7 columns on three devices: two have phantoms after the last one.
        pytest.param("cogvideox", "sp=3", 4, 7, marks=sweep),
        ("cogvideox", "dp=2,sp=2,tp=2", 4, 17),
        pytest.param("15", "sp=2", 5, 4, marks=sweep),
        ("15", "sp=3", 4, 7),
        pytest.param("15", "dp=2,sp=2,tp=2", 4, 17, marks=sweep),
        pytest.param("13b", "sp=2", 5, 4, marks=sweep),
        ("13b", "sp=3", 4, 7),
        pytest.param("13b", "dp=2,sp=2,tp=2", 4, 17, marks=sweep),
    ],
)
def test_decode_is_upstreams(name: str, mesh: str, rows: int, columns: int) -> None:
    vae, ported = pair(name, mesh)
    z = latents(1, vae.config.latent_channels, 3, rows, columns)
    check(ported.decode(z).sample, vae.decode(z).sample)
    assert are_split(ported)


@pytest.mark.parametrize(
    ("name", "mesh", "size"),
    [
        # 17 frames are two chunks, the second of which goes on from caches.
        ("cogvideox", "sp=3", (17, 32, 56)),
        pytest.param("cogvideox", "dp=2,sp=2,tp=2", (17, 32, 136), marks=sweep),
        ("15", "sp=2", (5, 12, 20)),
        # An image: what upstream does with the frames behind it has no elements.
        ("15", "sp=2", (1, 12, 20)),
        ("13b", "sp=3", (5, 12, 28)),
    ],
)
def test_encode_is_upstreams(name: str, mesh: str, size: tuple[int, ...]) -> None:
    vae, ported = pair(name, mesh)
    x = latents(1, 3, *size)
    check(ported.encode(x).latent_dist.parameters, vae.encode(x).latent_dist.parameters)
    assert are_split(ported)


def test_rows_and_columns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    split = SpatialSplit(videos=1, rows=2, columns=2)
    monkeypatch.setattr(ways, "choose_split", lambda *sizes: split)
    vae, ported = pair("cogvideox", "sp=2,tp=2")
    z = latents(1, 4, 5, 5, 7)
    check(ported.decode(z).sample, vae.decode(z).sample)


def test_tiles_of_upstream_are_calls() -> None:
    """Tiles at the ends are smaller; each has its own split."""
    vae, ported = pair("cogvideox", "sp=2")
    for one in (vae, ported):
        one.enable_tiling(tile_sample_min_height=32, tile_sample_min_width=48)
    z = latents(1, 4, 2, 3, 7)
    check(ported.decode(z).sample, vae.decode(z).sample)
    (entry,) = seam_of(ported).entries.values()
    given = [program.inputs[0].shape for program in entry.programs]
    # Three columns are two on one device, and one and a phantom on the other.
    assert given == [(1, 4, 2, 3, 6), (1, 4, 2, 3, 4)]


def test_videos_of_a_batch_lie_on_different_devices() -> None:
    vae, ported = pair("cogvideox", "dp=2,sp=2")
    z = latents(2, 4, 2, 4, 6)
    check(ported.decode(z).sample, vae.decode(z).sample)
    (entry,) = seam_of(ported).entries.values()
    (program,) = entry.programs
    (given,) = program.inputs
    assert given.sharding.shard_shape(given.shape) == (1, 4, 2, 4, 3)
