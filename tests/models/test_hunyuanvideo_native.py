"""HunyuanVideo-1.5's native blocks are upstream's on any mesh, weights and all."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.models.hunyuanvideo_upstream import picture
from tests.models.test_hunyuanvideo_transformer import (
    CONFIGS,
    GLYPHS,
    IMAGE,
    TASKS,
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
from tpuport.models.hunyuanvideo.native import TRANSFORMER_15
from tpuport.plugins import get_port

ATOL = TOLERANCES["component float32"]
#: Text past the end of a device's tokens, and text on two devices at once.
MESHES = [
    (1, 1, 1),
    (1, 2, 1),
    (1, 3, 1),
    (1, 4, 1),
    (1, 5, 1),
    (1, 8, 1),
    (2, 2, 2),
    (1, 4, 2),
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
    inputs = inputs_of(2, "i2v")
    program = native(module, mesh)
    assert largest(call(program, inputs), upstream(module, inputs)) <= ATOL
    (record,) = [r for r in program._runtime.records if r.padded]
    tokens = VIDEO + TEXT + GLYPHS + IMAGE
    assert record.key[2] == tokens
    assert record.padded == -(-tokens // mesh[1]) * mesh[1]
    assert record.key_lengths
    names = ("dp", "tp", "sp")
    sizes = dict(zip(("dp", "sp", "tp"), mesh, strict=True))
    expected = tuple(n if sizes[n] > 1 else None for n in names)
    assert record.split == (*expected, None)


@pytest.mark.parametrize("task", [t for t in TASKS if t != "i2v"])
def test_text_to_video(task: str, module: torch.nn.Module) -> None:
    inputs = inputs_of(2, task)
    program = native(module, (1, 3, 1))
    assert largest(call(program, inputs), upstream(module, inputs)) <= ATOL
    no_glyphs = dict(inputs)
    for name in ("encoder_hidden_states_2", "encoder_attention_mask_2"):
        no_glyphs[name] = inputs[name][:, :0]
    expected = upstream(module, {**no_glyphs, **_zero_image(inputs)})
    assert largest(call(program, no_glyphs), expected) <= ATOL


def _zero_image(inputs: Inputs) -> Inputs:
    """Upstream takes no empty image."""
    batch = len(inputs["timestep"])
    return {"image_embeds": torch.zeros(batch, IMAGE, 12)}


@pytest.mark.parametrize("name", CONFIGS)
def test_any_config(name: str) -> None:
    changes, size = CONFIGS[name]
    module = make(**changes)
    inputs = inputs_of(2, "i2v", size=size)
    if "use_meanflow" in changes:
        inputs["timestep_r"] = torch.tensor([250.0, 12.0])
    found = call(native(module, (1, 5, 1)), inputs)
    assert largest(found, upstream(module, inputs)) <= ATOL


def test_stacked_blocks_are_those_one_by_one(module: torch.nn.Module) -> None:
    inputs = inputs_of(2, "i2v")
    port, component = component_of(
        with_blocks(get_port("hunyuanvideo"), "native"), module
    )
    mesh = build_mesh(MeshSpec.parse((1, 4, 2)))
    one_by_one = PortedProgram(module, port, component, mesh, stack=False)
    expected = call(one_by_one, inputs)
    assert largest(call(native(module, (1, 4, 2)), inputs), expected) <= ATOL
    assert largest(expected, upstream(module, inputs)) <= ATOL


def test_what_padding_holds_does_not_matter_and_what_is_valid_does(
    module: torch.nn.Module,
) -> None:
    program = native(module, (1, 3, 1))
    inputs = inputs_of(2, "i2v")
    expected = call(program, inputs)
    states, mask = "encoder_hidden_states", inputs["encoder_attention_mask"][:, :, None]
    noise = torch.full_like(inputs[states], 1e4)
    padded = {**inputs, states: inputs[states].where(mask, noise)}
    assert torch.equal(call(program, padded), expected)
    turned = {**inputs, states: inputs[states].flip(-1).where(mask, inputs[states])}
    assert largest(call(program, turned), expected) > 1e-3


def test_bfloat16_is_no_further_off_than_upstreams() -> None:
    errors = {"upstream": 0.0, "native": 0.0}
    for seed in range(3):
        module = make(seed, num_layers=2).bfloat16()
        inputs = {
            name: x.bfloat16() if x.is_floating_point() else x
            for name, x in inputs_of(2, "i2v").items()
        }
        wide = {
            name: x.float() if x.is_floating_point() else x
            for name, x in inputs.items()
        }
        exact = upstream(copy.deepcopy(module).float(), wide)
        found = {
            "upstream": upstream(module, inputs),
            "native": call(native(module, (1, 2, 1)), inputs),
        }
        for name, out in found.items():
            assert out.dtype == torch.bfloat16
            errors[name] += float((out.float() - exact).square().mean())
    assert 0 < errors["native"] <= errors["upstream"] * 1.05**2


def test_attention_kwargs_are_refused(module: torch.nn.Module) -> None:
    program = native(module)
    with pytest.raises(NotImplementedError, match="scale; run with blocks='upstream'"):
        program(**inputs_of(1, "i2v"), attention_kwargs={"scale": 0.5})


def test_blocks_take_the_place_of_the_patch_on_the_same_target() -> None:
    port = with_blocks(get_port("hunyuanvideo"), "native")
    for form in port.all_forms:
        targets = [p.target for p in form.patches]
        assert len(set(targets)) == len(targets)
        (forward,) = [
            p for p in form.patches if p.target.endswith("Transformer3DModel.forward")
        ]
        assert "native" in forward.name


@pytest.mark.parametrize("step_cache", [None, "deepcache:start=1,end=4", "taylorseer"])
def test_videos_of_both_blocks(
    step_cache: str | None, hunyuanvideo_folders: dict[str, Path], cache_dir: Path
) -> None:
    """From an image, with guidance on dp, and with steps that go on from a state."""
    made = {}
    for blocks, mesh in (("upstream", (1, 1, 1)), ("native", (2, 2, 2))):
        with tpuport.load(
            "hunyuanvideo",
            weights=hunyuanvideo_folders["1.5"],
            cache_dir=cache_dir,
            blocks=blocks,
            mesh=mesh,
        ) as session:
            result = session.generate(
                'a red fox reads "stop" aloud',
                seed=1,
                height=48,
                width=64,
                num_frames=5,
                num_inference_steps=2 if step_cache is None else 6,
                image=picture(),
                step_cache=step_cache,
            )
        made[blocks] = (np.asarray(result.latents), result.frames)
    for one, other in zip(made["native"], made["upstream"], strict=True):
        assert np.abs(one - other).max() <= TOLERANCES["video float32"]


def test_every_patch_applies_here() -> None:
    states = {s.name: s.state for s in inspect_patches(TRANSFORMER_15.patches).entries}
    names = (
        "hunyuanvideo15-native-forward",
        "hunyuanvideo15-native-block",
    )
    assert states == dict.fromkeys(names, "applicable")
