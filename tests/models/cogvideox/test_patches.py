"""Each CogVideoX patch changes what it should, and cures what it is for."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tests.models.conftest import make_vae
from tests.tolerances import TOLERANCES
from tpuport.core.enums import Blocks
from tpuport.core.seam.ported import port_module
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.weights.sharding import DEFAULT_LAYOUT
from tpuport.models.cogvideox.plugin import PLUGIN
from tpuport.targets import general_target, place_for_port


def port_without(module: torch.nn.Module, *names: str) -> Any:
    kept = tuple(p for p in PLUGIN.patches if p.name not in names)
    assert len(kept) == len(PLUGIN.patches) - len(names)
    plugin = dataclasses.replace(PLUGIN, patches=kept)
    general = general_target(place_for_port(None), RunSettings())
    return port_module(
        module, general.of_plugin(plugin, Blocks.UPSTREAM, DEFAULT_LAYOUT)
    )


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
        program = port_without(module, *names)
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
    plain = port_without(module, "cogvideox-norm-at-latent-size")
    patched = port_without(module)
    difference = plain.decode(z).sample - patched.decode(z).sample
    assert float(difference.abs().max()) <= TOLERANCES["component float32"]
