"""What the tests of HunyuanVideo's native blocks share, for both forms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tpuport
from tests.tolerances import TOLERANCES
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.run.ported_program import PortedProgram, component_of
from tpuport.core.spec.model_port import with_blocks
from tpuport.plugins import get_port

Inputs = dict[str, Any]

ATOL = TOLERANCES["component float32"]
MESHES = [
    (1, 1, 1),
    (1, 2, 1),
    (1, 3, 1),
    (1, 4, 1),
    (1, 5, 1),
    (1, 8, 1),
    (2, 2, 2),
]


def native(module: torch.nn.Module, mesh: Any = None) -> PortedProgram:
    return tpuport.port(module, model="hunyuanvideo", mesh=mesh, blocks="native")


def one_by_one(module: torch.nn.Module, mesh: Any) -> PortedProgram:
    """The same without a scan over its blocks."""
    port, component = component_of(
        with_blocks(get_port("hunyuanvideo"), "native"), module
    )
    placed = build_mesh(MeshSpec.parse(mesh))
    return PortedProgram(module, port, component, placed, stack=False)


def call(program: PortedProgram, inputs: Inputs) -> torch.Tensor:
    out: torch.Tensor = program(**inputs, return_dict=False)[0]
    return out


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


def bfloat16_errors(
    module: torch.nn.Module,
    inputs: Inputs,
    upstream: Callable[[torch.nn.Module, Inputs], torch.Tensor],
) -> np.ndarray:
    """Mean squares of what upstream's and the native blocks are off float32 by."""

    def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
        return {
            name: x.to(dtype) if x.is_floating_point() else x
            for name, x in inputs.items()
        }

    module, inputs = module.bfloat16(), cast(inputs, torch.bfloat16)
    exact = upstream(copy.deepcopy(module).float(), cast(inputs, torch.float32))
    found = upstream(module, inputs), call(native(module, (1, 2, 1)), inputs)
    assert all(out.dtype == torch.bfloat16 for out in found)
    return np.array([float((out.float() - exact).square().mean()) for out in found])


def videos(
    folder: Path,
    cache_dir: Path,
    prompt: str,
    mesh: tuple[int, int, int],
    step_cache: str | None,
    **request: Any,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Latents and frames of upstream's blocks on one device, of native ones on more."""
    made = {}
    for blocks, placed in (("upstream", (1, 1, 1)), ("native", mesh)):
        with tpuport.load(
            "hunyuanvideo",
            weights=folder,
            cache_dir=cache_dir,
            blocks=blocks,
            mesh=placed,
        ) as session:
            result = session.generate(
                prompt,
                seed=1,
                height=48,
                width=64,
                num_frames=5,
                num_inference_steps=2 if step_cache is None else 6,
                step_cache=step_cache,
                **request,
            )
        made[blocks] = (np.asarray(result.latents), result.frames)
    return made
