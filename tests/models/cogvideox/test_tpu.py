"""The denoising step compiles for a TPU v6e that is not there.

The same ported module that runs here is lowered on abstract arrays for the devices of a
topology, sharded by the same rules. In a process of its own: the TPU compiler reads its
environment once.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes import ENVIRONMENT, ROOT, needs_libtpu, run_json

__all__ = ["ENVIRONMENT", "ROOT"]

PROGRAM = """
import dataclasses, json, re, sys
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
from tpuport.models.cogvideox.plugin import PORT
from tests.models.compiled_layers import collectives, kernels, layer_body, moved

port = with_blocks(PORT, sys.argv[2])
devices = topologies.get_topology_desc(topology_name="v6e:2x4", platform="tpu").devices
mesh = build_mesh(MeshSpec.parse(sys.argv[1]), devices)
component = port.components["transformer"]
# Two of the 42 layers: with all heads, what a chip sees of a layer is what it will be.
config = {**port.variant("1.5-5b").configs["transformer"], "num_layers": 2,
          "num_attention_heads": int(sys.argv[3])}
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
def array(shape, dtype, sharding=whole):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
tokens = 3 * 16 * 22
carry = {"latents": array((1, 6, 16, 32, 44), jnp.float32),
         "previous": array((1, 6, 16, 32, 44), jnp.float32)}
constants = {"embeds": array((2, 226, 4096), jnp.bfloat16),
             "positions": {"cos": array((tokens, 64), jnp.float32),
                           "sin": array((tokens, 64), jnp.float32)}}
inputs = {"timestep": array((), jnp.int32), "coefficients": array((6,), jnp.float32),
          "guidance": array((), jnp.float32),
          "noise": array((1, 6, 16, 32, 44), jnp.float32)}
step = port.stage("denoise").programs["step"].fn
def run(weights, *args):
    return step(ported.bind(weights), *args)
compiled = jax.jit(run).lower(weights, carry, constants, inputs).compile()
text = compiled.as_text()
memory = compiled.memory_analysis()
# Of the loop over the layers.
body = layer_body(text)
print(json.dumps({
    "kernels": kernels(text),
    "loops": len(re.findall(r" while\\(", text)),
    "in a layer": collectives(body),
    "moved in a layer": moved(body),
    "temporaries": memory.temp_size_in_bytes,
    "attention": [dataclasses.asdict(r) for r in runtime.records],
    "weights": plan.bytes_per_device,
    "arguments": memory.argument_size_in_bytes,
}))
"""


def compiled(mesh: str, blocks: str, heads: int = 48) -> dict[str, Any]:
    """What the compiler says of a step of two layers."""
    found = run_json(PROGRAM, mesh, blocks, str(heads))
    assert {r["implementation"] for r in found["attention"]} == {"splash"}
    # Both layers are one loop.
    norms = {"tpuport_norm_tokens": 2, "tpuport_norm_heads": 2}
    assert found["kernels"] == {
        "tpuport_splash": 1,
        **(norms if blocks == "native" else {}),
    }
    # What a chip is given is its share of the weights and little else.
    assert found["weights"] < found["arguments"] < found["weights"] * 1.1 + 2**25
    return found


@needs_libtpu
@pytest.mark.aot
@pytest.mark.parametrize("mesh", ["dp=2,tp=4", "dp=2,sp=2,tp=2"])
def test_a_step_compiles_for_v6e_with_the_splash_kernel(mesh: str) -> None:
    found = compiled(mesh, "upstream")
    # Heads are split: what they give is summed up over the network.
    assert found["in a layer"]["all-reduce"] > 0


@needs_libtpu
@pytest.mark.parametrize("heads", [12, pytest.param(48, marks=pytest.mark.aot)])
def test_native_blocks_compile_for_v6e_and_exchange_tokens_for_heads(
    heads: int,
) -> None:
    """A compile for a TPU: about 15 CPU seconds with 12 heads, 43 with all."""
    found = compiled("dp=2,sp=4", "native", heads)
    (attention,) = found["attention"]
    assert (attention["ulysses"], attention["ring"]) == (4, 1)
    assert attention["split"] == ["dp", None, "sp", None]
    # Queries, keys and values to heads, what attention gives back to tokens; weights
    # are whole on every chip, and nothing is summed up.
    assert found["in a layer"] == {
        "all-reduce": 0,
        "all-gather": 0,
        "all-to-all": 4,
        "collective-permute": 0,
    }
    assert found["loops"] == 1
    # Nothing of the size of q, k, v or of what attention gives is put elsewhere. The
    # weight of the output projection, [E, heads, D], is turned.
    width = heads * 64
    assert width * attention["padded"] // 4 != width**2
    assert found["moved in a layer"] == [width**2]
    # Activations, and no copy of weights.
    assert found["temporaries"] < found["weights"] / 8
