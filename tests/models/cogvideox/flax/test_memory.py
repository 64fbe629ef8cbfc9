"""What memory the Flax VAE's group norm takes on a TPU besides its input and output."""

from __future__ import annotations

import pytest

from tests.processes import needs_libtpu, run_json

PROGRAM = r"""
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.models.cogvideox.flax_grid import grid_of
from tpuport.models.cogvideox.flax_layers import GroupNorm, moments_of

channels = int(sys.argv[1])
devices = topologies.get_topology_desc(topology_name="v6e:2x4", platform="tpu").devices
axis = (jax.sharding.AxisType.Auto,)
mesh = jax.sharding.Mesh(np.array(devices[:1]), ("x",), axis_types=axis)
whole = NamedSharding(mesh, PartitionSpec())
grid = grid_of(model_runtime(mesh=mesh, platform="tpu").op_context())

def run(x):
    norm = GroupNorm(channels, channels // 4, 1e-6)
    return norm(x, moments_of(x, channels // 4, grid), grid)

# More than the 128 MiB of VMEM, where the compiler would keep a copy unseen.
x = jax.ShapeDtypeStruct((1, 8, 256, 512, channels), jnp.bfloat16, sharding=whole)
compiled = jax.jit(run).lower(x).compile()
memory = compiled.memory_analysis()
print(json.dumps({
    "kernels": compiled.as_text().count('custom_call_target="tpu_custom_call"'),
    "video": memory.argument_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
}))
"""


# Of 64 channels there is no kernel: the norm is the compiler's.
@needs_libtpu
@pytest.mark.aot
@pytest.mark.parametrize(("channels", "kernels"), [(128, 2), (64, 0)])
def test_a_norm_holds_no_squared_copy(channels: int, kernels: int) -> None:
    found = run_json(PROGRAM, str(channels))
    assert found["kernels"] == kernels
    assert found["video"] >= 8 * 256 * 512 * channels * 2
    # Squares in float32 are twice the video, in bfloat16 as much.
    assert found["temporaries"] < found["video"] / 4
