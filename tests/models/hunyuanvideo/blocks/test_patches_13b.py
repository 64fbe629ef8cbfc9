"""Each patch on the HunyuanVideo 13B transformer cures what it is for."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch

from tests.models.hunyuanvideo.blocks.test_transformer_13b import (
    PATCHES,
    TEXT,
    VIDEO,
    Inputs,
    Ported,
    exchanged,
    inputs_of,
    make,
)
from tests.models.jaxprs import arrays_in, squares
from tpuport.core.tracing.patching import Patch, applied, inspect_patches
from tpuport.models.hunyuanvideo.patches_13b import (
    TRANSFORMER_13B,
    attend_tokens,
)
from tpuport.patches.torchax_slices import SLICE_ASSIGNMENT


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return make()


# --- no array of S x S


LONG_TEXT = 2100


def long_inputs() -> Inputs:
    """More text than the tiles of blockwise attention and than any weight is wide."""
    return inputs_of(1, text=LONG_TEXT, valid=(2000,))


@pytest.mark.parametrize("mesh", ["dp=1", "sp=8", "tp=8"])
def test_no_array_has_two_dims_of_the_text_or_longer(
    mesh: str, module: torch.nn.Module
) -> None:
    closed = Ported(module, mesh, implementation="blockwise").trace(long_inputs())
    assert (1, VIDEO + LONG_TEXT, 8, 8) in set(arrays_in(closed.jaxpr))
    assert squares(closed.jaxpr, LONG_TEXT) == []
    assert [c.shape for c in closed.consts if getattr(c, "size", 1) > 128] == []


def test_the_walk_sees_the_scores_of_the_formula(module: torch.nn.Module) -> None:
    closed = Ported(module, implementation="reference").trace(inputs_of(1))
    joint = VIDEO + TEXT
    found = [s for s in arrays_in(closed.jaxpr) if s[-2:] == (joint, joint)]
    assert found


# --- each patch: what it changes, that it is undone, what it cures


def without(*names: str) -> tuple[Patch, ...]:
    kept = tuple(p for p in PATCHES if p.name not in names)
    assert len(kept) == len(PATCHES) - len(names)
    return kept


def standing(patch: Patch) -> Any:
    """What stands where the patch goes."""
    module, _, path = patch.target.partition(":")
    *parents, attribute = path.split(".")
    owner: Any = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    return vars(owner)[attribute]


@pytest.mark.parametrize("patch", TRANSFORMER_13B, ids=lambda p: p.name)
def test_a_patch_is_in_place_and_then_undone(patch: Patch) -> None:
    before = standing(patch)
    with applied([patch]) as report:
        assert [entry.state for entry in report] == ["applied"]
        assert standing(patch) is not before
    assert standing(patch) is before


def test_every_patch_applies_here() -> None:
    states = {s.name: s.state for s in inspect_patches(PATCHES)}
    assert set(states.values()) == {"applicable"}, states


def test_with_masks_no_fused_kernel_would_run(module: torch.nn.Module) -> None:
    """For TPU, traced alone: what the attention, refiner and forward patches cure."""
    chosen: dict[str, set[str]] = {}
    reasons: set[str] = set()
    for label, patches in (("with", PATCHES), ("without", SLICE_ASSIGNMENT)):
        ours = Ported(module, patches=patches, platform="tpu")
        ours.trace(long_inputs())
        chosen[label] = {r.implementation for r in ours.runtime.records}
        if label == "without":
            reasons = {r.reason for r in ours.runtime.records}
    assert chosen["with"] == {"splash"}
    assert chosen["without"] == {"blockwise"}
    assert all(re.search("not splash: .*mask", reason) for reason in reasons)


def test_upstreams_refiner_builds_a_mask_of_text_squared(
    module: torch.nn.Module,
) -> None:
    kept = without("hunyuanvideo-token-refiner", "hunyuanvideo-refiner-block")
    ours = Ported(module, patches=kept, implementation="blockwise")
    found = squares(ours.trace(long_inputs()).jaxpr, LONG_TEXT)
    assert (1, 8, LONG_TEXT, LONG_TEXT) in found


def test_the_refiner_and_its_blocks_belong_together(module: torch.nn.Module) -> None:
    # The one hands over what the other takes: a number of tokens, not a mask.
    for name in ("hunyuanvideo-token-refiner", "hunyuanvideo-refiner-block"):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            Ported(module, patches=without(name)).trace(inputs_of(2))


def test_the_forward_and_the_attention_belong_together(
    module: torch.nn.Module,
) -> None:
    # A mask is no number of keys, and the other way round.
    for name, error in (
        ("hunyuanvideo-forward", "takes the number of valid keys"),
        ("hunyuanvideo-attention", "."),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            Ported(module, patches=without(name)).trace(inputs_of(2))


def test_a_single_block_would_gather_five_times_its_width() -> None:
    module = make(num_layers=1, num_single_layers=2, mlp_ratio=4.0)
    inputs = inputs_of(1)
    joined = (1, VIDEO + TEXT, 5 * 64)
    makes_it, gathers = {}, {}
    for label, patches in (
        ("with", PATCHES),
        ("without", without("hunyuanvideo-single-block-output")),
    ):
        ours = Ported(module, "tp=8", patches=patches)
        makes_it[label] = joined in set(arrays_in(ours.trace(inputs).jaxpr))
        gathers[label] = exchanged(ours.compiled(inputs)[1], "all-gather")
    assert makes_it == {"with": False, "without": True}
    per_block = (gathers["without"] - gathers["with"]) / 2 / (VIDEO + TEXT) / 64
    assert per_block >= 4


@pytest.mark.parametrize(
    "option", [{"dropout_p": 0.1}, {"is_causal": True}, {"backend": "flash"}], ids=str
)
def test_what_the_patched_attention_cannot_honour_it_refuses(
    option: dict[str, Any],
) -> None:
    x = torch.zeros(1, 3, 2, 4)
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        attend_tokens(x, x, x, **option)
    assert attend_tokens(x, x, x, dropout_p=0.0, backend=None).shape == x.shape


def test_a_mask_of_keys_is_refused_by_the_patched_attention() -> None:
    x = torch.zeros(2, 3, 2, 4)
    with pytest.raises(
        ValueError, match=r"of shape \[2\], for attn_mask; got .*\[2, 1"
    ):
        attend_tokens(x, x, x, attn_mask=torch.ones(2, 1, 1, 3, dtype=torch.bool))
