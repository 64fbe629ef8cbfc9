"""Every transformer gives the same with its blocks in one loop as one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests.core.tracing.towers import port as stacked_port
from tests.core.tracing.towers import scans
from tests.models.cogvideox.test_components import transformer_inputs
from tests.models.conftest import make_transformer
from tests.models.hunyuanvideo import test_encoders as small
from tests.models.hunyuanvideo.blocks import test_transformer as form_15
from tests.models.hunyuanvideo.blocks import test_transformer_13b as form_13b
from tests.models.ported import plan_of, ported_by, unstacked
from tpuport.models.hunyuanvideo import encoders
from tpuport.plugins import get_port

#: Of every plugin: from text, from an image, and the original form.
CASES = {
    "cogvideox t2v": lambda batch: (
        make_transformer("5b", num_layers=4),
        transformer_inputs("5b", batch),
    ),
    "cogvideox i2v": lambda batch: (
        make_transformer("1.5-5b-i2v", num_layers=3),
        transformer_inputs("1.5-5b-i2v", batch),
    ),
    "hunyuanvideo t2v": lambda batch: (
        form_15.make(num_layers=4),
        form_15.inputs_of(batch, "t2v zeros"),
    ),
    "hunyuanvideo i2v": lambda batch: (
        form_15.make(num_layers=3),
        form_15.inputs_of(batch, "i2v"),
    ),
    "hunyuanvideo 13b": lambda batch: (form_13b.make(), form_13b.inputs_of(batch)),
}


def program(module: torch.nn.Module, model: str, mesh: str, stack: bool) -> Any:
    form, name = get_port(model).form_of_module(type(module))
    return ported_by(form if stack else unstacked(form, name), name, module, mesh)


#: One stack on a mesh, and two stacks. Loops are what every other test of a transformer
#: holds to upstream, form by form and mesh by mesh.
KEPT = (("cogvideox t2v", 2, "sp=2,tp=2"), ("hunyuanvideo 13b", 1, "dp=1"))
SWEEP = (
    *((case, 1, "dp=1") for case in CASES),
    *((case, 2, "dp=2,tp=4") for case in CASES),
    ("cogvideox t2v", 2, "dp=1"),
    ("hunyuanvideo i2v", 2, "sp=2,tp=2"),
    ("hunyuanvideo 13b", 2, "sp=2,tp=2"),
)


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "batch", "mesh"),
    [
        *KEPT,
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in SWEEP
            if case not in KEPT
        ),
    ],
)
def test_one_loop_gives_what_block_by_block_gives(
    case: str, batch: int, mesh: str
) -> None:
    module, inputs = CASES[case](batch)
    model = case.split()[0]
    stacked, unrolled = (program(module, model, mesh, s) for s in (True, False))
    found, expected = stacked(**inputs).sample, unrolled(**inputs).sample
    assert float((found - expected).abs().max()) <= 1e-6
    assert float(expected.std()) > 0.1
    # The same rules, the same bytes.
    assert plan_of(stacked) == plan_of(unrolled)


IDS, MASK = small.ragged("right", "left")
PIXELS = torch.rand(2, 3, 56, 56, generator=torch.Generator().manual_seed(0))

#: Class and config, the call, its inputs, and the lengths of its scans.
ENCODERS: dict[str, tuple[str, dict[str, Any], Callable[..., Any], Any, list[int]]] = {
    # Of five layers the last two are never run: the third last state is asked for.
    "qwen": (
        "Qwen2_5_VLTextModel",
        small.QWEN,
        encoders.language_states,
        (IDS, MASK),
        [3],
    ),
    "llama": ("LlamaModel", small.LLAMA, encoders.language_states, (IDS, MASK), [3]),
    # The first of three layers has the position bias.
    "byt5": ("T5EncoderModel", small.BYT5, encoders.byt5_states, (IDS, MASK), [2]),
    "siglip": (
        "SiglipVisionModel",
        small.SIGLIP,
        encoders.siglip_states,
        (PIXELS,),
        [3],
    ),
    "clip": ("CLIPTextModel", small.CLIP, encoders.clip_pooled, (IDS,), [3]),
}


def encoder(name: str, stack: bool) -> tuple[Callable[..., Any], Any, Any]:
    """A function of weights and inputs, the weights, and the inputs."""
    class_name, config, function, given, _ = ENCODERS[name]
    module = small.make(class_name, config)
    port, part = get_port("hunyuanvideo").form_of_module(type(module))
    stacked = port.components[part].stacked if stack else ()
    ported, weights = stacked_port(module, stacked, port)

    def run(w: Any, x: Any) -> Any:
        return function(ported.bind(w), *x)

    return run, weights, [small.to_numpy(tensor) for tensor in given]


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_is_one_loop(name: str) -> None:
    assert scans(*encoder(name, stack=True)) == ENCODERS[name][-1]
    assert scans(*encoder(name, stack=False)) == []


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "byt5" else pytest.mark.sweep)
        for name in ENCODERS
    ],
)
def test_one_loop_of_an_encoder_gives_the_same(name: str) -> None:
    results = []
    for stack in (True, False):
        run, weights, inputs = encoder(name, stack)
        results.append(np.asarray(jax.jit(run)(weights, inputs)))
    np.testing.assert_allclose(*results, rtol=0, atol=1e-6)
