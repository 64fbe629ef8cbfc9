"""Both HunyuanVideo autoencoders as they run on a TPU: what upstream gives.

The kernels run in interpret mode here, on a mesh that stands in for TPUs; attention is
the reference's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests.models.hunyuanvideo.vae.test_space import farthest, force
from tests.models.hunyuanvideo.vae.vaes import (
    Bound,
    decode_tile,
    frozen_vae,
    latents,
    patches_of,
    upstream_decode,
)
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy
from tpuport.core.layers.video_layers import KERNEL, PRODUCT
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.programs.lowering import spread
from tpuport.core.tracing.convolution_notes import counted
from tpuport.core.tracing.ported_module import BoundModule
from tpuport.kernels.attention.choice import AttentionChoice
from tpuport.models.hunyuanvideo import vae as ours


@pytest.mark.parametrize("name", ["15 small", "13b small"])
def test_decode_by_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither rows nor columns divide."""
    vae = frozen_vae(name)
    z = latents(vae, 1, 2, 3, 3)
    force(monkeypatch, 1, 2, 2)
    mesh = build_mesh(MeshSpec(sp=4), jax.devices()[:4])
    bound = Bound(vae, patches_of(name), mesh)
    runtime = bound.runtime
    runtime.platform = "tpu"
    runtime.attention_implementation = AttentionChoice(name="reference")

    def run(weights: Any, carry: Any, constants: Any, inputs: Any) -> Any:
        video = decode_tile(name)(BoundModule(bound.ported, weights), inputs["latents"])
        return None, {"video": video}

    layout = dataclasses.replace(
        ours.WHOLE,
        output={"video": ours.TILE.output},  # type: ignore[dict-item]
    )
    inputs = {"latents": to_numpy(z)}
    program, _ = spread(run, runtime, layout, (None, None, inputs))
    _, out = jax.jit(program)(bound.weights, None, None, inputs)
    found = np.asarray(out["video"])
    with torch.no_grad():
        expected = upstream_decode(vae, z)
    assert farthest(found, expected) <= TOLERANCES["component float32"]
    # XLA's own convolution did nothing.
    told = counted(runtime.convolutions)
    assert {r.implementation for r in told} == {KERNEL, PRODUCT}
    assert {r.reason for r in told} == {""}
