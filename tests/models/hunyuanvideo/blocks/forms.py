"""What the tests of HunyuanVideo's native blocks share, for both forms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.models.ported import ported_by, unstacked
from tests.tolerances import TOLERANCES
from tpuport.core.files.sources import read_image
from tpuport.core.spec.model_port import with_blocks
from tpuport.plugins import get_port

Inputs = dict[str, Any]

ATOL = TOLERANCES["component float32"]
#: All axes at once. How tokens and heads are split is tested of ``sequence_attention``.
EVERY_AXIS = (2, 2, 2)
OTHER_MESHES = [
    pytest.param(mesh, marks=pytest.mark.sweep)
    for mesh in ((1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 5, 1), (1, 8, 1))
]


def native(module: torch.nn.Module, mesh: Any = None) -> torch.nn.Module:
    return tpuport.port(module, model="hunyuanvideo", mesh=mesh, blocks="native")


def one_by_one(module: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    """The same without a scan over its blocks."""
    port = with_blocks(get_port("hunyuanvideo"), "native")
    form, name = port.form_of_module(type(module))
    return ported_by(unstacked(form, name), name, module, mesh)


def call(program: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    out: torch.Tensor = program(**inputs, return_dict=False)[0]
    return out


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


def bfloat16_errors(
    module: torch.nn.Module,
    draws: Sequence[Inputs],
    upstream: Callable[[torch.nn.Module, Inputs], torch.Tensor],
) -> np.ndarray:
    """Mean squares of what upstream's and the native blocks are off float32 by."""

    def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
        return {
            name: x.to(dtype) if x.is_floating_point() else x
            for name, x in inputs.items()
        }

    module = module.bfloat16()
    exact, ours = copy.deepcopy(module).float(), native(module, (1, 2, 1))
    errors = np.zeros(2)
    for draw in draws:
        inputs = cast(draw, torch.bfloat16)
        expected = upstream(exact, cast(inputs, torch.float32))
        found = upstream(module, inputs), call(ours, inputs)
        assert all(out.dtype == torch.bfloat16 for out in found)
        errors += [float((out.float() - expected).square().mean()) for out in found]
    return errors


def drawn_again(inputs: Inputs, seed: int) -> Inputs:
    """Other latents and texts of the same sizes, with the same masks."""
    draw = torch.Generator().manual_seed(seed)
    names = ("hidden_states", "encoder_hidden_states")
    return inputs | {n: torch.randn(inputs[n].shape, generator=draw) for n in names}


def latents_of_both(
    folder: Path,
    cache_dir: Path,
    prompt: str,
    mesh: tuple[int, int, int],
    step_cache: str | None,
    image: Any = None,
) -> list[torch.Tensor]:
    """Latents of upstream's blocks on one device, and of native ones on more."""
    steps = 2 if step_cache is None else 6
    asked: dict[str, Any] = {"height": 48, "width": 64, "num_frames": 5, "seed": 1}
    asked |= {"num_inference_steps": steps, "step_cache": step_cache}
    given: Inputs = {}
    if image is not None:
        asked["source"] = read_image(image)
        given["image"] = asked["source"].for_videos(1)
    made: list[torch.Tensor] = []
    for blocks, placed in (("upstream", (1, 1, 1)), ("native", mesh)):
        with tpuport.load(
            "hunyuanvideo",
            weights=folder,
            cache_dir=cache_dir,
            blocks=blocks,
            mesh=placed,
        ) as session:
            request = session.request(prompt=prompt, **asked)
            if not made:
                given, _ = session.run_stage("encode", request, given)
            found, report = session.run_stage("denoise", request, given)
        assert report.backend == "tpuport"
        made.append(found["latents"])
    return made
