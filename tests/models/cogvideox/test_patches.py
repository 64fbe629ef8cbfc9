"""Each CogVideoX patch changes what it should, and cures what it is for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.conftest import make_transformer, make_vae
from tests.models.ported import ported_by
from tests.tolerances import TOLERANCES
from tpuport.core.tracing.patching import inspect_patches
from tpuport.models.cogvideox import rotary
from tpuport.models.cogvideox.plugin import PORT


def port_without(module: torch.nn.Module, component: str, *names: str) -> Any:
    kept = tuple(p for p in PORT.patches if p.name not in names)
    assert len(kept) == len(PORT.patches) - len(names)
    port = dataclasses.replace(PORT, patches=kept)
    return ported_by(port, component, module)


def test_every_patch_applies_here() -> None:
    states = {s.name: s.state for s in inspect_patches(PORT.patches)}
    assert set(states.values()) == {"applicable"}, states


@torch.no_grad()
def test_the_pointwise_cache_would_depend_on_the_chunk_length() -> None:
    module = make_vae(layers_per_block=0)
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for label, names in (
        (
            "without",
            ("cogvideox-pointwise-conv-cache", "cogvideox-norm-at-latent-size"),
        ),
        ("with", ()),
    ):
        program = port_without(module, "vae", *names)
        caches = []
        for frames in (3, 2):
            z = torch.randn(1, 4, frames, 4, 6)
            _, cache = program.decoder(z)
            caches.append(cache["norm_out"]["conv_y"])
        shapes[label] = {tuple(c.shape) for c in caches if c is not None}
    # Two shapes would mean one more program to compile in the middle of a video.
    assert len(shapes["without"]) == 2
    assert not shapes["with"]


@torch.no_grad()
def test_norms_at_latent_size_give_the_same_numbers() -> None:
    module = make_vae()
    z = torch.randn(1, 4, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    plain = port_without(module, "vae", "cogvideox-norm-at-latent-size")
    patched = port_without(module, "vae")
    difference = plain.decode(z).sample - patched.decode(z).sample
    assert float(difference.abs().max()) <= TOLERANCES["component float32"]


@pytest.mark.parametrize("patch_t", [None, 2])
@pytest.mark.parametrize("size", [(6, 8), (5, 8), (6, 7), (3, 4)])
def test_rotary_tables_are_the_pipelines(
    size: tuple[int, int], patch_t: int | None, make_pipeline: Callable[..., Any]
) -> None:
    rows, columns = size[0] * 2, size[1] * 2
    config = {
        "attention_head_dim": 16,
        "patch_size": 2,
        "patch_size_t": patch_t,
        "sample_height": 12,
        "sample_width": 16,
    }
    frames = 4
    pipe = make_pipeline(patch_t)
    cos, sin = pipe._prepare_rotary_positional_embeddings(
        rows * 8, columns * 8, frames, torch.device("cpu")
    )
    ours = rotary.tables(config, rows, columns, frames)
    assert np.array_equal(ours[0], cos.numpy())
    assert np.array_equal(ours[1], sin.numpy())
    assert rotary.tables(dict(config), rows, columns, frames)[0] is ours[0]


@pytest.fixture(scope="module")
def make_pipeline() -> Callable[..., Any]:
    from diffusers import CogVideoXPipeline

    def make(patch_t: int | None) -> Any:
        form = "1.5-5b" if patch_t else "5b"
        parts: dict[str, Any] = dict.fromkeys(
            ("tokenizer", "text_encoder", "vae", "scheduler")
        )
        return CogVideoXPipeline(transformer=make_transformer(form), **parts)

    return make
