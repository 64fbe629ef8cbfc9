"""Both HunyuanVideo autoencoders split over eight devices: what upstream gives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests.core.layers.test_tiles import assemble, sizes
from tests.models.hunyuanvideo.vae.vaes import (
    Bound,
    decode_tile,
    encode_mode,
    frozen_vae,
    latents,
    make_vae,
    patches_of,
    pixels,
    tile_settings,
    upstream_decode,
    upstream_mode,
)
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy
from tpuport.core.files.frames import encode_pixels
from tpuport.core.layers.tiles import TilePlan
from tpuport.core.mesh import spatial_split as spatial
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.spatial_split import SpatialLayout, SpatialSplit
from tpuport.core.programs.lowering import spread
from tpuport.core.run.model_stages import without_phantoms
from tpuport.core.tracing.ported_module import BoundModule
from tpuport.models.hunyuanvideo import vae as ours

ATOL = TOLERANCES["mesh float32"]


@functools.cache
def split_run(name: str) -> Bound:
    mesh = build_mesh(MeshSpec(sp=8))
    return Bound(frozen_vae(name), patches_of(name), mesh)


def run_split(
    name: str, layout: SpatialLayout, fn: Callable[..., Any], x: torch.Tensor
) -> Any:
    """``fn(model, x)`` on eight devices; phantom rows and columns included."""
    bound = split_run(name)
    given = {next(iter(layout.inputs)): to_numpy(x)}

    def run(weights: Any, carry: Any, constants: Any, given: Any) -> Any:
        (x,) = given.values()
        return None, fn(BoundModule(bound.ported, weights), x)

    whole, _ = spread(run, bound.runtime, layout, (None, None, given))
    _, out = jax.jit(whole)(bound.weights, None, None, given)
    return jax.tree.map(np.asarray, out)


def force(monkeypatch: pytest.MonkeyPatch, *split: int) -> None:
    """That many devices for the videos, the rows and the columns, whatever is best."""
    videos, rows, columns = split
    chosen = SpatialSplit(videos=videos, rows=rows, columns=columns)
    monkeypatch.setattr(spatial, "choose_split", lambda *args: chosen)


def farthest(found: np.ndarray, expected: torch.Tensor) -> float:
    """The largest difference, phantom rows and columns left out."""
    rows, columns = expected.shape[-2:]
    assert found.shape[:-2] == expected.shape[:-2]
    assert found.shape[-2] >= rows
    assert found.shape[-1] >= columns
    return float(np.abs(found[..., :rows, :columns] - expected.numpy()).max())


#: Videos, latent frames, rows, columns, and the devices along each side.
CASES = [
    # Neither side divides, and the last devices have no column of their own.
    ("15 small", (1, 3, 3, 5), (1, 2, 4)),
    ("15 small", (2, 2, 2, 3), (2, 2, 2)),
    ("13b small", (1, 3, 3, 5), (1, 2, 4)),
    pytest.param("13b small", (1, 2, 7, 2), (1, 8, 1), marks=pytest.mark.sweep),
]


@pytest.mark.parametrize(("name", "size", "split"), CASES, ids=str)
def test_decode(
    name: str,
    size: tuple[int, int, int, int],
    split: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The video, and statistics in which no phantom row or column is counted."""
    vae = frozen_vae(name)
    z = latents(vae, *size)
    force(monkeypatch, *split)

    def fn(model: BoundModule, z: Any) -> Any:
        video = decode_tile(name)(model, z)
        planes = encode_pixels(video * 0.5 + 0.5, "float32", model.space)
        return {"video": video, **planes}

    kinds: Any = {**ours.WHOLE.output, "video": ours.TILE.output}  # type: ignore[dict-item]
    layout = dataclasses.replace(ours.WHOLE, output=kinds)
    found = run_split(name, layout, fn, z)
    one = upstream_decode(vae, z)
    assert farthest(found["video"], one) <= ATOL
    frames = one * 0.5 + 0.5
    assert farthest(found["frames"], frames.clamp(0, 1)) <= ATOL
    assert found["finite"].tolist() == frames.isfinite().sum((1, 3, 4)).tolist()
    for end, expected in (
        ("low", frames.amin((2, 3, 4))),
        ("high", frames.amax((2, 3, 4))),
    ):
        assert float(np.abs(found[end] - expected.clamp(0, 1).numpy()).max()) <= ATOL


@pytest.mark.parametrize(
    ("name", "size", "split"),
    [
        ("15 small", (1, 1, 3, 5), (1, 2, 4)),
        ("13b small", (2, 5, 3, 3), (1, 4, 2)),
    ],
    ids=str,
)
def test_encode(
    name: str,
    size: tuple[int, int, int, int],
    split: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, frames, rows, columns = size
    vae: Any = frozen_vae(name)
    ratio = vae.spatial_compression_ratio
    x = pixels(batch, frames, rows * ratio, columns * ratio)
    force(monkeypatch, *split)
    layout = dataclasses.replace(ours.ENCODE_15, granule=ratio)
    found = run_split(name, layout, encode_mode(name), x)
    assert farthest(found, upstream_mode(vae, x)) <= ATOL


@pytest.mark.parametrize("name", ["15 small", "13b small"])
def test_tiles(name: str) -> None:
    """Tiles of two sizes, blended: upstream's. One is narrower than the devices."""
    vae = make_vae(name)
    vae.enable_tiling(**tile_settings(name, 4, 4))
    z = latents(vae, 1, 2, 3, 6)
    plan: TilePlan = ours.plan_decode(vae, z.shape, tiling=True)
    assert len(sizes(plan)) == 2

    def outputs() -> Any:
        for index, tile in enumerate(plan.tiles):
            out = run_split(name, ours.TILE, decode_tile(name), tile.cut(z))
            yield without_phantoms(plan, index, out)

    found = assemble(plan, outputs())
    expected = vae.decode(z).sample
    assert farthest(found, expected) <= TOLERANCES["component float32"]
