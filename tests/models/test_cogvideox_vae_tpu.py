"""CogVideoX's decoder of kernels, and that it compiles for a TPU.

The kernels run in interpret mode here, on a mesh that stands in for TPUs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX

from tests.models.test_cogvideox_tpu import ENVIRONMENT, ROOT
from tests.tolerances import TOLERANCES
from tpuport.core.module import PortedModule
from tpuport.core.runtime import Runtime
from tpuport.core.spatial import SpatialLayout, spread
from tpuport.plugins import get_port

# Channels that the kernels take, and few of everything else.
CONFIG: dict[str, Any] = {
    "down_block_types": ("CogVideoXDownBlock3D",) * 2,
    "up_block_types": ("CogVideoXUpBlock3D",) * 2,
    "block_out_channels": (128, 256),
    "layers_per_block": 1,
    "latent_channels": 4,
    "temporal_compression_ratio": 2,
    "norm_num_groups": 32,
}
LAYOUT = SpatialLayout(inputs={"z": "BCTYX"}, carry="BCTYX", output={"video": "BCFYX"})


def _vae() -> Any:
    torch.manual_seed(0)
    return AutoencoderKLCogVideoX(**CONFIG).eval()


def _ported(vae: Any, devices: int, without: str = "") -> PortedModule:
    port = get_port("cogvideox")
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    patches = [patch for patch in port.patches if patch.name != without]
    runtime = Runtime(
        mesh=mesh, platform="tpu", patches=patches, overrides=port.overrides
    )
    return PortedModule(vae, runtime)


def _decoded(vae: Any, chunks: list[torch.Tensor], devices: int) -> list[np.ndarray]:
    """Each chunk's video by the blocks that a TPU runs."""
    ported = _ported(vae, devices)
    runtime = ported.runtime
    tensors = {n: t.detach().numpy() for n, t in vae.state_dict().items()}
    weights = {name: jnp.asarray(tensors[name]) for name in ported.arrays}

    def run(weights: Any, carry: Any, constants: Any, inputs: Any) -> Any:
        out, cache = ported.bind(weights)(
            inputs["z"], conv_cache=carry, method="decoder"
        )
        return cache, {"video": out}

    carry, videos = None, []
    for chunk in chunks:
        inputs = {"z": jnp.asarray(chunk.numpy())}
        program, places = spread(run, runtime, LAYOUT, (carry, None, inputs))
        jitted = jax.jit(program, out_shardings=places)
        carry, out = jitted(weights, carry, None, inputs)
        rows, columns = (2 * n for n in chunk.shape[3:])
        videos.append(np.asarray(out["video"])[..., :rows, :columns])
    return videos


@pytest.mark.parametrize(
    ("rows", "columns", "devices"), [(2, 8, 1), (3, 16, 2), (2, 5, 2)]
)
@torch.no_grad()
def test_blocks_of_kernels_are_upstreams(rows: int, columns: int, devices: int) -> None:
    vae = _vae()
    torch.manual_seed(1)
    chunks = [torch.randn(1, 4, frames, rows, columns) for frames in (3, 2)]
    cache, wanted = None, []
    for chunk in chunks:
        video, cache = vae.decoder(chunk, conv_cache=cache)
        wanted.append(video.numpy())
    for found, expected in zip(_decoded(vae, chunks, devices), wanted, strict=True):
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= TOLERANCES["component float32"]


@pytest.mark.parametrize("without", ["", "cogvideox-resnet-block"])
def test_blocks_leave_no_activation_to_the_compiler(without: str) -> None:
    """All of a block's are part of its norms; the decoder ends with one by itself."""
    vae = _vae()
    ported = _ported(vae, 1, without)
    weights = {
        name: jax.ShapeDtypeStruct(tuple(tensor.shape), jnp.float32)
        for name, tensor in vae.state_dict().items()
    }

    def run(weights: Any, carry: Any, constants: Any, inputs: Any) -> Any:
        model = ported.bind(weights)
        out, cache = model(inputs["z"], conv_cache=carry, method="decoder")
        return cache, {"video": out}

    inputs = {"z": jax.ShapeDtypeStruct((1, 4, 2, 2, 16), jnp.float32)}
    program, _ = spread(run, ported.runtime, LAYOUT, (None, None, inputs))
    jaxpr = str(jax.make_jaxpr(program)(weights, None, None, inputs))
    # Calls of one shape share a line.
    assert (jaxpr.count(" logistic ") == 1) == (not without)


PROGRAM = r"""
import json, re
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from tpuport.core.checkpoint import build_skeleton
from tpuport.core.components import Loaded
from tpuport.core.lowering import lower
from tpuport.core.module import PortedModule
from tpuport.core.runtime import Runtime
from tpuport.plugins import get_port

port = get_port("cogvideox")
variant = port.variant("1.5-5b")
devices = topologies.get_topology_desc(topology_name="v6e:2x4", platform="tpu").devices
axis = (jax.sharding.AxisType.Auto,)
mesh = jax.sharding.Mesh(np.array(devices), ("x",), axis_types=axis)
whole = NamedSharding(mesh, PartitionSpec())
component = port.components["vae"]
config = {**variant.configs["vae"], "layers_per_block": 1}
runtime = Runtime(
    mesh=mesh, platform="tpu", patches=port.patches, overrides=port.overrides
)
ported = PortedModule(build_skeleton(component, config), runtime)
weights = {
    name: jax.ShapeDtypeStruct(array.shape, jnp.bfloat16, sharding=whole)
    for name, array in ported.abstract_weights(lambda n, t: jnp.bfloat16).items()
    if name.startswith(("decoder.", "post_quant"))
}
latents = jax.ShapeDtypeStruct((1, 16, 1, 8, 128), jnp.float32, sharding=whole)
program = port.stage("decode").programs["first uint8"]
compiled = lower(
    "decode", "first", program, Loaded(ported, weights, None, whole),
    (None, None, {"latents": latents}),
).compile()
text = compiled.as_text()
print(json.dumps({
    "kernels": sorted(set(re.findall(r"%(tpuport_[a-z]+)\.", text))),
    "convolutions": len(re.findall(r"convolution\(.*window=\{size=(?:\dx)?3x3", text)),
    "reductions": len(re.findall(r" all-reduce(?:-start)?\(", text)),
}))
"""


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
def test_the_decoder_compiles_for_eight_chips_from_the_projects_kernels() -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kernels"] == ["tpuport_conv", "tpuport_moments", "tpuport_norm"]
    # None is left to the compiler.
    assert found["convolutions"] == 0
