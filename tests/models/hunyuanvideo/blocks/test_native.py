"""HunyuanVideo-1.5's native blocks are upstream's on any mesh, weights and all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.hunyuanvideo.blocks.forms import (
    ATOL,
    EVERY_AXIS,
    OTHER_MESHES,
    bfloat16_errors,
    call,
    drawn_again,
    largest,
    latents_of_both,
    native,
    one_by_one,
)
from tests.models.hunyuanvideo.blocks.test_transformer import (
    CONFIGS,
    GLYPHS,
    IMAGE,
    TEXT,
    VIDEO,
    Inputs,
    inputs_of,
    make,
    upstream,
)
from tests.models.hunyuanvideo.upstream import picture
from tests.models.ported import records_of
from tests.tolerances import TOLERANCES
from tpuport.core.seam.entry import PortError
from tpuport.core.spec.model_port import with_blocks
from tpuport.core.tracing.patching import inspect_patches
from tpuport.models.hunyuanvideo.native import TRANSFORMER_15
from tpuport.plugins import get_port

#: With text past the end of a device's tokens, and text on two devices at once.
UNEVEN = (1, 4, 2)


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return make()


@pytest.fixture(scope="module")
def uneven(module: torch.nn.Module) -> torch.nn.Module:
    """On a mesh whose sp divides no sequence, for tests to share what it compiles."""
    return native(module, UNEVEN)


@pytest.mark.parametrize("mesh", [EVERY_AXIS, UNEVEN, *OTHER_MESHES], ids=str)
def test_it_is_upstreams_on(
    mesh: tuple[int, int, int], module: torch.nn.Module, uneven: torch.nn.Module
) -> None:
    inputs = inputs_of(2, "i2v")
    program = uneven if mesh == UNEVEN else native(module, mesh)
    assert largest(call(program, inputs), upstream(module, inputs)) <= ATOL
    (record,) = [r for r in records_of(program) if r.padded]
    tokens = VIDEO + TEXT + GLYPHS + IMAGE
    assert record.key[2] == tokens
    assert record.padded == -(-tokens // mesh[1]) * mesh[1]
    assert record.key_lengths
    names = ("dp", "tp", "sp")
    sizes = dict(zip(("dp", "sp", "tp"), mesh, strict=True))
    expected = tuple(n if sizes[n] > 1 else None for n in names)
    assert record.split == (*expected, None)


@pytest.mark.parametrize(
    "task", ["t2v zeros", pytest.param("t2v no tokens", marks=pytest.mark.sweep)]
)
def test_text_to_video(
    task: str, module: torch.nn.Module, uneven: torch.nn.Module
) -> None:
    inputs = inputs_of(2, task)
    assert largest(call(uneven, inputs), upstream(module, inputs)) <= ATOL


@pytest.mark.parametrize(
    "task", ["t2v no tokens", pytest.param("t2v zeros", marks=pytest.mark.sweep)]
)
def test_without_glyphs(
    task: str, module: torch.nn.Module, uneven: torch.nn.Module
) -> None:
    inputs = inputs_of(2, task)
    for name in ("encoder_hidden_states_2", "encoder_attention_mask_2"):
        inputs[name] = inputs[name][:, :0]
    expected = upstream(module, {**inputs, **_zero_image(inputs)})
    assert largest(call(uneven, inputs), expected) <= ATOL


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


def test_stacked_blocks_are_those_one_by_one(
    module: torch.nn.Module, uneven: torch.nn.Module
) -> None:
    inputs = inputs_of(2, "i2v")
    expected = call(one_by_one(module, UNEVEN), inputs)
    assert largest(call(uneven, inputs), expected) <= ATOL
    assert largest(expected, upstream(module, inputs)) <= ATOL


def test_what_padding_holds_does_not_matter_and_what_is_valid_does(
    uneven: torch.nn.Module,
) -> None:
    inputs = inputs_of(2, "i2v")
    expected = call(uneven, inputs)
    states, mask = "encoder_hidden_states", inputs["encoder_attention_mask"][:, :, None]
    noise = torch.full_like(inputs[states], 1e4)
    padded = {**inputs, states: inputs[states].where(mask, noise)}
    assert torch.equal(call(uneven, padded), expected)
    turned = {**inputs, states: inputs[states].flip(-1).where(mask, inputs[states])}
    assert largest(call(uneven, turned), expected) > 1e-3


def test_bfloat16_is_no_further_off_than_upstreams() -> None:
    draws = [drawn_again(inputs_of(2, "i2v"), seed) for seed in range(3)]
    of_upstream, of_native = bfloat16_errors(make(num_layers=2), draws, upstream)
    assert 0 < of_native <= of_upstream * 1.05**2


def test_attention_kwargs_are_refused(module: torch.nn.Module) -> None:
    program = native(module)
    with pytest.raises(PortError, match="scale; run with blocks='upstream'"):
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


@pytest.mark.parametrize(
    "step_cache",
    [
        "deepcache:start=1,end=4",
        # ``test_sessions.py`` runs both caches, ``test_videos.py`` none.
        pytest.param("taylorseer", marks=pytest.mark.sweep),
        pytest.param(None, marks=pytest.mark.sweep),
    ],
)
def test_latents_of_both_blocks(
    step_cache: str | None, hunyuanvideo_folders: dict[str, Path], cache_dir: Path
) -> None:
    """From an image, with guidance on dp, and with steps that go on from a state.

    Over 10 s: two sessions, each with its encoders and two programs of a step.
    """
    prompt, folder = 'a red fox reads "stop" aloud', hunyuanvideo_folders["1.5"]
    one, other = latents_of_both(
        folder, cache_dir, prompt, EVERY_AXIS, step_cache, picture()
    )
    assert largest(one, other) <= TOLERANCES["video float32"]


def test_every_patch_applies_here() -> None:
    states = {s.name: s.state for s in inspect_patches(TRANSFORMER_15.patches)}
    names = (
        "hunyuanvideo15-native-forward",
        "hunyuanvideo15-native-block",
    )
    assert states == dict.fromkeys(names, "applicable")
