"""Nearest-neighbour resizing against torch, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.patches.tools import by_torchax, found_by, model_runtime, traced
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.tracing.runtime import Runtime
from tpuport.patches.resize import NEAREST_EXACT_RESIZE, NEAREST_RESIZE


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return model_runtime(mesh=None, platform="cpu", overrides=[NEAREST_RESIZE])


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        ((1, 2, 5), {"size": 10}),
        ((1, 2, 5), {"scale_factor": 1.7}),
        ((2, 3, 4, 6), {"scale_factor": 2.0}),
        ((2, 3, 4, 6), {"size": (8, 9)}),
        ((2, 3, 4, 6), {"size": (2, 3)}),
        ((2, 3, 4, 6), {"size": (7, 5)}),
        ((1, 2, 3, 4, 5), {"scale_factor": 2.0}),
        ((1, 2, 3, 4, 5), {"scale_factor": (1.0, 2.0, 3.0)}),
        ((1, 2, 3, 4, 5), {"size": (3, 4, 5)}),
        ((1, 2, 1, 4, 6), {"size": (4, 32, 48)}),
        ((1, 2, 3, 7, 5), {"size": (5, 13, 11)}),
        ((1, 2, 3, 7, 5), {"scale_factor": 0.6}),
        (
            (1, 2, 3, 7, 5),
            {"scale_factor": 1.3, "recompute_scale_factor": True},
        ),
    ],
)
def test_every_element_is_torchs(
    shape: tuple[int, ...], arguments: dict[str, Any], platform: str
) -> None:
    overrides = [NEAREST_RESIZE, NEAREST_EXACT_RESIZE]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for mode in ("nearest", "nearest-exact"):
        resize = functools.partial(F.interpolate, mode=mode, **arguments)
        found = found_by(resize, x, platform=platform, overrides=overrides)
        assert torch.equal(found, resize(x)), mode


@pytest.mark.parametrize("devices", ["sp=8", "sp=3"])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_picture_in_parts_is_enlarged_in_parts(platform: str, devices: str) -> None:
    mesh = build_mesh(MeshSpec.parse(devices))
    runtime = model_runtime(mesh=mesh, platform=platform, overrides=[NEAREST_RESIZE])
    x = np.random.default_rng(0).normal(size=(1, 2, 3, 24, 32)).astype(np.float32)

    def enlarge(x: Any) -> Any:
        return F.interpolate(x, scale_factor=(1.0, 2.0, 3.0))

    call = traced(runtime, enlarge)
    assert "shard_map" in str(jax.make_jaxpr(call)(x))
    expected = enlarge(torch.from_numpy(x)).numpy()
    assert np.array_equal(np.asarray(jax.jit(call)(x)), expected)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_enlarging_by_a_whole_factor_gathers_nothing_and_without_the_override_does(
    axes: int, batch: int, runtime: Runtime
) -> None:
    """NEAREST_RESIZE changes the program, not the numbers."""

    def enlarge(x: Any) -> Any:
        return F.interpolate(x, scale_factor=2.0)

    x = np.random.default_rng(0).normal(size=(batch, 2, *(3, 4, 5)[:axes]))
    x = x.astype(np.float32)
    expected = enlarge(torch.from_numpy(x)).numpy()
    # Outside of the block torchax's own is back.
    for call, gathers in ((traced, 0), (by_torchax, 1)):
        compiled = jax.jit(call(runtime, enlarge))
        text = compiled.lower(x).as_text()
        assert text.count('"stablehlo.gather"') == gathers
        assert ("stablehlo.broadcast_in_dim" in text) or gathers
        assert np.array_equal(np.asarray(compiled(x)), expected)
