"""HunyuanVideo 13B's native blocks are upstream's on any mesh, both kinds of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.models.test_hunyuanvideo_transformer_13b import (
    FORMS,
    TEXT,
    VIDEO,
    Inputs,
    inputs_of,
    make,
    upstream,
)
from tests.tolerances import TOLERANCES
from tpuport.core.mesh import MeshSpec, build_mesh
from tpuport.core.patching import inspect_patches
from tpuport.core.porting import PortedProgram, component_of
from tpuport.core.spec import with_blocks
from tpuport.models.hunyuanvideo.native_13b import TRANSFORMER_13B
from tpuport.plugins import get_port

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


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return make()


def native(module: torch.nn.Module, mesh: Any = None) -> PortedProgram:
    return tpuport.port(module, model="hunyuanvideo", mesh=mesh, blocks="native")


def call(program: PortedProgram, inputs: Inputs) -> torch.Tensor:
    out: torch.Tensor = program(**inputs, return_dict=False)[0]
    return out


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_it_is_upstreams_on(
    mesh: tuple[int, int, int], module: torch.nn.Module
) -> None:
    inputs = inputs_of(2)
    program = native(module, mesh)
    assert largest(call(program, inputs), upstream(module, inputs)) <= ATOL
    # Both kinds of blocks attend to the same sequence.
    (record,) = [r for r in program._runtime.records if r.padded]
    assert record.key[2] == VIDEO + TEXT
    assert record.padded == -(-(VIDEO + TEXT) // mesh[1]) * mesh[1]


@pytest.mark.parametrize("form", [f for f in FORMS if f != "t2v"])
def test_forms(form: str) -> None:
    module, inputs = make(form), inputs_of(2, form)
    found = call(native(module, (1, 5, 1)), inputs)
    assert largest(found, upstream(module, inputs)) <= ATOL


@pytest.mark.parametrize(
    "changes",
    [
        {"num_single_layers": 0},
        {"qk_norm": "layer_norm", "num_attention_heads": 3},
    ],
    ids=str,
)
def test_any_config(changes: dict[str, Any]) -> None:
    module, inputs = make(**changes), inputs_of(2, size=(1, 6, 10))
    found = call(native(module, (1, 2, 1)), inputs)
    assert largest(found, upstream(module, inputs)) <= ATOL


def test_stacked_blocks_are_those_one_by_one(module: torch.nn.Module) -> None:
    inputs = inputs_of(2)
    port, component = component_of(
        with_blocks(get_port("hunyuanvideo"), "native"), module
    )
    mesh = build_mesh(MeshSpec.parse((1, 4, 2)))
    one_by_one = PortedProgram(module, port, component, mesh, stack=False)
    expected = call(one_by_one, inputs)
    assert largest(call(native(module, (1, 4, 2)), inputs), expected) <= ATOL
    assert largest(expected, upstream(module, inputs)) <= ATOL


def test_bfloat16_is_no_further_off_than_upstreams(module: torch.nn.Module) -> None:
    errors = {"upstream": 0.0, "native": 0.0}
    for seed in range(3):
        torch.manual_seed(seed)
        changed = copy.deepcopy(module)
        for parameter in changed.parameters():
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
        changed = changed.bfloat16()
        inputs = {
            name: x.bfloat16() if x.is_floating_point() else x
            for name, x in inputs_of(2).items()
        }
        wide = {
            name: x.float() if x.is_floating_point() else x
            for name, x in inputs.items()
        }
        exact = upstream(copy.deepcopy(changed).float(), wide)
        found = {
            "upstream": upstream(changed, inputs),
            "native": call(native(changed, (1, 2, 1)), inputs),
        }
        for name, out in found.items():
            assert out.dtype == torch.bfloat16
            errors[name] += float((out.float() - exact).square().mean())
    assert 0 < errors["native"] <= errors["upstream"] * 1.05**2


def test_attention_kwargs_are_refused(module: torch.nn.Module) -> None:
    program = native(module)
    with pytest.raises(NotImplementedError, match="scale; run with blocks='upstream'"):
        program(**inputs_of(1), attention_kwargs={"scale": 0.5})


@pytest.mark.parametrize("step_cache", [None, "deepcache:start=1,end=4", "taylorseer"])
def test_videos_of_both_blocks(
    step_cache: str | None, hunyuanvideo_folders: dict[str, Path], cache_dir: Path
) -> None:
    made = {}
    for blocks, mesh in (("upstream", (1, 1, 1)), ("native", (1, 4, 2))):
        with tpuport.load(
            "hunyuanvideo",
            weights=hunyuanvideo_folders["13b"],
            cache_dir=cache_dir,
            blocks=blocks,
            mesh=mesh,
        ) as session:
            result = session.generate(
                "a red fox walks on",
                seed=1,
                height=48,
                width=64,
                num_frames=5,
                num_inference_steps=2 if step_cache is None else 6,
                step_cache=step_cache,
            )
        made[blocks] = (np.asarray(result.latents), result.frames)
    for one, other in zip(made["native"], made["upstream"], strict=True):
        assert np.abs(one - other).max() <= TOLERANCES["video float32"]


def test_every_patch_applies_here() -> None:
    states = {s.name: s.state for s in inspect_patches(TRANSFORMER_13B.patches).entries}
    names = (
        "hunyuanvideo-native-forward",
        "hunyuanvideo-native-block",
        "hunyuanvideo-native-first-frame-block",
        "hunyuanvideo-native-single-block",
        "hunyuanvideo-native-first-frame-single-block",
    )
    assert states == dict.fromkeys(names, "applicable")
