"""The denoising steps compile for a TPU v6e that is not there, without S x S arrays.

As in ``test_cogvideox_tpu.py``: the ported module that runs here, on abstract arrays
for the devices of a topology, in a process of its own. Few of the layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.processes import needs_libtpu, run_program

PROGRAM = r"""
import dataclasses, json, math, re, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from tpuport.core.weights.skeleton import build_skeleton
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights.placement import abstract_weights
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.core.weights.sharding import WeightInfo, plan_sharding
from tpuport.core.spec.model_port import with_blocks
from tpuport.kernels.attention.reference import reference_attention
from tpuport.models.hunyuanvideo.plugin import PORT
from tests.models.compiled_layers import (
    collectives, kernels, layer_body, moved, token_pairs,
)

def array(sharding, dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

def largest(text):
    # Of two dims and more: copies in flight are buffers of one dim, in bytes.
    shapes = set(re.findall(r"\w\[(\d+(?:,\d+)+)\]", text))
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)

def compiled(case):
    variant = PORT.variant(case["variant"])
    port = with_blocks(PORT.form_of(variant), case["blocks"])
    mesh = build_mesh(MeshSpec.parse(case["mesh"]), devices)
    component = port.components["transformer"]
    config = {**variant.configs["transformer"], **case["layers"]}
    runtime = model_runtime(
        mesh=mesh, platform="tpu", patches=port.patches, overrides=port.overrides,
        attention=port.attention,
    )
    skeleton = build_skeleton(component, config)
    ported = PortedModule(skeleton, runtime, component.stacked)
    tensors = ported.tensors()
    plan = plan_sharding(
        component.sharding,
        {k: WeightInfo(tuple(tensors[k].shape), 2) for k in ported.names.stored},
        dict(mesh.shape), component="transformer",
    )
    weights = abstract_weights(ported, plan, mesh, lambda name, tensor: jnp.bfloat16)
    whole = NamedSharding(mesh, PartitionSpec())
    inputs = [
        {k: array(whole, *v) for k, v in part.items()} for part in case["inputs"]
    ]
    step = port.stage("denoise").programs["step"].fn
    def run(weights, *args):
        return step(ported.bind(weights), *args)
    program = jax.jit(run).lower(weights, *inputs).compile()
    text = program.as_text()
    memory = program.memory_analysis()
    found = {
        "kernels": kernels(text),
        "attention": [dataclasses.asdict(r) for r in runtime.records],
        "weights": plan.bytes_per_device,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }
    if case["blocks"] == "native":
        (record,) = [r for r in runtime.records if r.padded]
        sp = mesh.shape["sp"]
        counts = {case["tokens"], record.padded, record.padded // sp}
        body = layer_body(text)
        return found | {
            "in a layer": collectives(body),
            "moved in a layer": moved(body),
            "token by token": token_pairs(text, counts),
        }
    one_head = array(whole, "bfloat16", 1, 1, case["tokens"], 128)
    plain = jax.jit(lambda q: reference_attention(q, q, q)).lower(one_head).compile()
    return found | {
        "largest": largest(text),
        "largest of plain attention": largest(plain.as_text()),
    }

devices = topologies.get_topology_desc(topology_name="v6e:2x4", platform="tpu").devices
for case in json.loads(sys.argv[1]):
    print(json.dumps(compiled(case)))
"""

TEXT, GLYPHS, IMAGE = 64, 32, 729
#: Of both forms: three attention calls.
LAYERS = {
    "1.5": {"num_layers": 2, "num_refiner_layers": 1},
    "13b": {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1},
}
WIDTH = {"1.5": 2048, "13b": 3072}


def case_15(
    mesh: str, frames: int, rows: int = 32, image: int = IMAGE, **layers: Any
) -> dict[str, Any]:
    """Image to video of 512 x 576 pixels, both prompts in one batch."""
    columns = 36
    video = frames * rows * columns
    low, full = "bfloat16", "float32"
    latents = (full, 1, 32, frames, rows, columns)
    constants = {
        "text": (low, 2, TEXT, 3584),
        "text_mask": ("int32", 2, TEXT),
        "glyphs": (full, 2, GLYPHS, 1472),
        "glyph_mask": ("int32", 2, GLYPHS),
        "image_embeds": (low, 1, image, 1152),
        "image_latents": (full, 1, 32, 1, rows, columns),
        "cos": (full, video, 128),
        "sin": (full, video, 128),
    }
    given = dict.fromkeys(("timestep", "delta", "guidance"), (full,))
    return {
        "variant": "1.5-480p-i2v",
        "mesh": mesh,
        "blocks": "upstream",
        "layers": {**LAYERS["1.5"], **layers},
        "inputs": [{"latents": latents}, constants, given],
        "tokens": video + image + GLYPHS + TEXT,
    }


def case_13b(mesh: str, frames: int) -> dict[str, Any]:
    """Text to video of 512 x 512 pixels, with two predictions where dp takes them."""
    rows = columns = 64
    video = frames * rows * columns // 4
    low, full = "bfloat16", "float32"
    count = 2 if "dp=2" in mesh else 1
    constants = {
        "text": (low, count, TEXT, 4096),
        "text_mask": ("int32", count, TEXT),
        "pooled": (low, count, 768),
        "cos": (full, video, 128),
        "sin": (full, video, 128),
    }
    names = ["timestep", "delta", "embedded_guidance", "true_guidance"][: 2 + count]
    return {
        "variant": "13b",
        "mesh": mesh,
        "blocks": "upstream",
        "layers": LAYERS["13b"],
        "inputs": [
            {"latents": (full, 1, 16, frames, rows, columns)},
            constants,
            dict.fromkeys(names, (full,)),
        ],
        "tokens": video + TEXT,
    }


def compiled(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the compiler says of steps, all in one process."""
    lines = run_program(PROGRAM, json.dumps(cases), timeout=1800)
    return [json.loads(line) for line in lines[-len(cases) :]]


#: Form, mesh and latent frames, so many that no weight has as many elements as S x S.
STEPS = [
    ("1.5", "dp=2,tp=4", 4),
    ("13b", "tp=8", 5),
    ("1.5", "dp=2,sp=2,tp=2", 8),
    ("13b", "dp=2,sp=2,tp=2", 8),
]


@pytest.fixture(scope="module")
def steps() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The cases of STEPS, and what the compiler says of each."""
    make = {"1.5": case_15, "13b": case_13b}
    cases = [make[form](mesh, frames) for form, mesh, frames in STEPS]
    return list(zip(cases, compiled(cases), strict=True))


# That upstream's blocks take the kernel is also told by their traced programs.
@needs_libtpu
@pytest.mark.aot
@pytest.mark.parametrize("index", range(len(STEPS)), ids=lambda n: str(STEPS[n]))
def test_a_step_compiles_for_v6e_with_the_splash_kernel(
    index: int, steps: list[tuple[dict[str, Any], dict[str, Any]]]
) -> None:
    form, mesh, _ = STEPS[index]
    case, found = steps[index]

    tokens = case["tokens"]
    sizes = dict(part.split("=") for part in mesh.split(","))
    split = [axis if axis in sizes else None for axis in ("dp", "tp", "sp", "-")]
    assert [r["query"][2] for r in found["attention"]] == [TEXT, tokens]
    for record in found["attention"]:
        assert record["implementation"] == "splash"
        assert record["key_lengths"]
        assert record["split"] == split
    # The refiner's and the blocks'; two identical blocks are one loop.
    assert found["kernels"] == {"tpuport_splash": {"1.5": 2, "13b": 3}[form]}

    # Neither scores nor a mask, on any device; plain attention of one head has them.
    square = tokens**2 // int(sizes.get("sp", 1))
    assert found["largest"] < square
    assert found["largest of plain attention"] >= tokens**2
    # A chip is given its share of the weights and little else. It needs no weights
    # for the text after the last block.
    assert found["weights"] * 0.9 < found["arguments"]
    assert found["arguments"] < found["weights"] * 1.1 + 2**25
    # A few times the hidden states of bfloat16: no copy of weights, no scores.
    assert 0 < found["temporaries"] < 5 * tokens * WIDTH[form] * 2


# A device has 896 tokens, more than there are of text (825), as in a video on eight
# chips: to write a longer text into its places, all of q, k and v are copied. With half
# the heads and fewer tokens a device has 384, and there are 224 of text.
NATIVE = [
    pytest.param({"rows": 16, "image": 128, "num_attention_heads": 8}, id="small"),
    pytest.param({"num_attention_heads": 16}, id="full", marks=pytest.mark.aot),
]


@needs_libtpu
@pytest.mark.parametrize("size", NATIVE)
def test_native_blocks_compile_for_v6e_and_exchange_tokens_for_heads(
    size: dict[str, int],
) -> None:
    """A compile for a TPU: 26 CPU seconds, 73 at full width."""
    case = case_15("dp=2,sp=4", 2, **size) | {"blocks": "native"}
    (found,) = compiled([case])
    (attention,) = [r for r in found["attention"] if r["padded"]]
    assert attention["implementation"] == "splash"
    assert attention["key_lengths"]
    assert (attention["ulysses"], attention["ring"]) == (4, 1)
    assert attention["split"] == ["dp", None, "sp", None]
    # The refiner's and the blocks'; two identical blocks are one loop. The norms of the
    # video in a block and of the output, its queries and keys.
    assert found["kernels"] == {
        "tpuport_splash": 2,
        "tpuport_norm_tokens": 3,
        "tpuport_norm_heads": 2,
    }
    # Queries, keys and values to heads, what attention gives back to tokens. The sum is
    # what reads the text out of the places it has on one device or two; weights are
    # whole on every chip.
    assert found["in a layer"] == {
        "all-reduce": 1,
        "all-gather": 0,
        "all-to-all": 4,
        "collective-permute": 0,
    }
    # Nothing of the size of q, k, v or of what attention gives is put elsewhere. The
    # weights of both output projections, [E, heads, D], are turned.
    width = 128 * size["num_attention_heads"]
    each = width * attention["padded"] // 4
    assert each != width**2
    assert found["moved in a layer"] == [width**2] * 2
    # No scores and no mask, whole or of one device's queries.
    assert found["token by token"] == []
    assert found["weights"] * 0.9 < found["arguments"]
    assert found["arguments"] < found["weights"] * 1.1 + 2**25
    # Activations, and no copy of weights.
    assert found["temporaries"] < found["weights"] / 8
