"""HunyuanVideo 13B's native blocks are upstream's on any mesh, both kinds of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

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
from tests.models.hunyuanvideo.blocks.test_transformer_13b import (
    FORMS,
    TEXT,
    VIDEO,
    inputs_of,
    make,
    upstream,
)
from tests.models.ported import records_of
from tests.tolerances import TOLERANCES
from tpuport.core.seam.entry import PortError
from tpuport.core.tracing.patching import inspect_patches
from tpuport.models.hunyuanvideo.native_13b import TRANSFORMER_13B


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return make()


#: sp divides no sequence.
UNEVEN = (1, 4, 2)


@pytest.fixture(scope="module")
def uneven(module: torch.nn.Module) -> torch.nn.Module:
    """For tests to share what it compiles."""
    return native(module, UNEVEN)


@pytest.mark.parametrize("mesh", [EVERY_AXIS, UNEVEN, *OTHER_MESHES], ids=str)
def test_it_is_upstreams_on(
    mesh: tuple[int, int, int], module: torch.nn.Module, uneven: torch.nn.Module
) -> None:
    inputs = inputs_of(2)
    program = uneven if mesh == UNEVEN else native(module, mesh)
    assert largest(call(program, inputs), upstream(module, inputs)) <= ATOL
    # Both kinds of blocks attend to the same sequence.
    (record,) = [r for r in records_of(program) if r.padded]
    assert record.key[2] == VIDEO + TEXT
    assert record.padded == -(-(VIDEO + TEXT) // mesh[1]) * mesh[1]


@pytest.mark.parametrize(
    "form",
    [
        # Its blocks are others.
        "i2v token replace",
        *(
            pytest.param(form, marks=pytest.mark.sweep)
            for form in FORMS
            if form not in ("t2v", "i2v token replace")
        ),
    ],
)
def test_forms(form: str) -> None:
    module, inputs = make(form), inputs_of(2, form)
    found = call(native(module, (1, 5, 1)), inputs)
    assert largest(found, upstream(module, inputs)) <= ATOL


@pytest.mark.parametrize(
    "changes",
    [
        # Also a test of ``tpuport.port``.
        pytest.param({"num_single_layers": 0}, marks=pytest.mark.sweep),
        {"qk_norm": "layer_norm", "num_attention_heads": 3},
    ],
    ids=str,
)
def test_any_config(changes: dict[str, Any]) -> None:
    module, inputs = make(**changes), inputs_of(2, size=(1, 6, 10))
    found = call(native(module, (1, 2, 1)), inputs)
    assert largest(found, upstream(module, inputs)) <= ATOL


def test_stacked_blocks_are_those_one_by_one(
    module: torch.nn.Module, uneven: torch.nn.Module
) -> None:
    inputs = inputs_of(2)
    expected = call(one_by_one(module, UNEVEN), inputs)
    assert largest(call(uneven, inputs), expected) <= ATOL
    assert largest(expected, upstream(module, inputs)) <= ATOL


def test_bfloat16_is_no_further_off_than_upstreams(module: torch.nn.Module) -> None:
    torch.manual_seed(0)
    changed = copy.deepcopy(module)
    for parameter in changed.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    draws = [drawn_again(inputs_of(2), seed) for seed in range(3)]
    of_upstream, of_native = bfloat16_errors(changed, draws, upstream)
    assert 0 < of_native <= of_upstream * 1.05**2


def test_attention_kwargs_are_refused(module: torch.nn.Module) -> None:
    program = native(module)
    with pytest.raises(PortError, match="scale; run with blocks='upstream'"):
        program(**inputs_of(1), attention_kwargs={"scale": 0.5})


@pytest.mark.parametrize(
    "step_cache",
    [
        "taylorseer",
        # ``test_sessions.py`` runs both caches, ``test_videos.py`` none.
        pytest.param("deepcache:start=1,end=4", marks=pytest.mark.sweep),
        pytest.param(None, marks=pytest.mark.sweep),
    ],
)
def test_latents_of_both_blocks(
    step_cache: str | None, hunyuanvideo_folders: dict[str, Path], cache_dir: Path
) -> None:
    folder = hunyuanvideo_folders["13b"]
    one, other = latents_of_both(
        folder, cache_dir, "a red fox walks on", UNEVEN, step_cache
    )
    assert largest(one, other) <= TOLERANCES["video float32"]


def test_every_patch_applies_here() -> None:
    states = {s.name: s.state for s in inspect_patches(TRANSFORMER_13B.patches)}
    names = (
        "hunyuanvideo-native-forward",
        "hunyuanvideo-native-block",
        "hunyuanvideo-native-first-frame-block",
        "hunyuanvideo-native-single-block",
        "hunyuanvideo-native-first-frame-single-block",
    )
    assert states == dict.fromkeys(names, "applicable")
