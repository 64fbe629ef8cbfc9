"""Programs compiled as they are for users: with all of XLA's optimisations for CPUs.

``tests/conftest.py`` turns them off for every other test. Those of memory rely on the
buffers being the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch

from tests.core.tracing.test_forward_split import arrays, ported
from tests.models.cogvideox.test_components import transformer_inputs
from tests.models.conftest import BUFFERS, FORMS, FULL, make_transformer, make_vae
from tests.models.hunyuanvideo.blocks import test_transformer_13b as hunyuan
from tests.models.hunyuanvideo.vae.vaes import (
    decode_tile,
    frozen_vae,
    latents,
    shared_run,
    upstream_decode,
)
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.mesh.device_memory import planned_bytes

Case = Callable[[], tuple[jax.stages.Lowered, tuple[Any, ...], torch.Tensor]]


def cogvideox_transformer(form: str) -> Any:
    module = make_transformer(form)
    program, weights = ported(module)
    inputs = transformer_inputs(form, 2)

    def run(weights: Any, inputs: Any) -> Any:
        return program.bind(weights)(**inputs, return_dict=False)[0]

    given = (weights, arrays(inputs))
    return jax.jit(run).lower(*given), given, module(**inputs).sample


def cogvideox_decoder() -> Any:
    # A decoder of one block at each size.
    vae = make_vae(layers_per_block=0)
    program, weights = ported(vae)
    z = latents(vae, 1, 2, 4, 6)

    def run(weights: Any, z: Any) -> Any:
        return program.apply(weights, z, method="decode", return_dict=False)[0]

    given = (weights, to_numpy(z))
    return jax.jit(run).lower(*given), given, vae.decode(z).sample


def hunyuanvideo_transformer(mesh: str) -> Any:
    module = hunyuan.make()
    ours, inputs = hunyuan.Ported(module, mesh), hunyuan.inputs_of(2)
    given = (ours.weights, ours.arrays(inputs))
    lowered = ours.jitted("forward").lower(*given)
    return lowered, given, hunyuan.upstream(module, inputs)


def hunyuanvideo_decoder(name: str) -> Any:
    vae, bound = frozen_vae(name), shared_run(name)
    z = latents(vae, 1, 2, 3, 4)
    given = (bound.weights, to_numpy(z))
    lowered = bound.program.lower(decode_tile(name), *given)
    return lowered, given, upstream_decode(vae, z)


CASES: dict[str, Case] = {
    **{f"cogvideox {x}": functools.partial(cogvideox_transformer, x) for x in FORMS},
    "cogvideox decoder": cogvideox_decoder,
    "hunyuanvideo 13b": functools.partial(hunyuanvideo_transformer, "dp=1"),
    "hunyuanvideo 13b, eight devices": functools.partial(
        hunyuanvideo_transformer, "dp=2,sp=2,tp=2"
    ),
    "hunyuanvideo 1.5 decoder": functools.partial(hunyuanvideo_decoder, "15 small"),
    "hunyuanvideo 13b decoder": functools.partial(hunyuanvideo_decoder, "13b small"),
}


#: A transformer and a decoder; and one of the other model, whose blocks are of two
#: kinds.
KEPT = ("cogvideox 1.5-5b", "cogvideox decoder", "hunyuanvideo 13b")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in KEPT else pytest.mark.sweep)
        for name in CASES
    ],
)
@torch.no_grad()
def test_optimised_programs_give_what_upstream_gives(name: str) -> None:
    lowered, (weights, inputs), expected = CASES[name]()
    compiled = lowered.compile(compiler_options=FULL)
    found = to_torch(compiled(weights, inputs))
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= TOLERANCES["component float32"]
    if "decoder" in name:
        # No buffer depends on how machine code is optimised.
        other = lowered.compile(compiler_options=BUFFERS)
        assert planned_bytes(compiled) == planned_bytes(other) > 0
