"""CogVideoX's decoder of kernels, and that it compiles for a TPU.

The kernels run in interpret mode here, on a mesh that stands in for TPUs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from diffusers.models.upsampling import CogVideoXUpsample3D

from tests.processes import needs_libtpu, run_json
from tests.tolerances import TOLERANCES
from tpuport.core.layers import video_layers as video
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.core.layers.video_layers import KERNEL, PRODUCT
from tpuport.core.mesh.spatial_split import SpatialLayout
from tpuport.core.programs.lowering import spread
from tpuport.core.tracing.convolution_notes import counted
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.kernels.convolution.conv import MARGIN_BYTES, vmem_bytes
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
#: A decoder of no more blocks than there are kinds; no encoder is that small.
SMALL = {**CONFIG, "layers_per_block": 0}
LAYOUT = SpatialLayout(inputs={"z": "BCTYX"}, carry="BCTYX", output={"video": "BCFYX"})
#: Two rows and columns of a video are one of latents.
LAYOUTS = {"decoder": LAYOUT, "encoder": dataclasses.replace(LAYOUT, granule=2)}


def _vae(config: dict[str, Any] = CONFIG) -> Any:
    torch.manual_seed(0)
    return AutoencoderKLCogVideoX(**config).eval()


def _ported(vae: Any, devices: int, without: str = "") -> PortedModule:
    port = get_port("cogvideox")
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    patches = [patch for patch in port.patches if patch.name != without]
    runtime = model_runtime(
        mesh=mesh, platform="tpu", patches=patches, overrides=port.overrides
    )
    return PortedModule(vae, runtime)


def _coded(
    vae: Any, part: str, chunks: list[torch.Tensor], devices: int
) -> tuple[list[np.ndarray], list[tuple[int, str, str]]]:
    """Of each chunk what the encoder or the decoder of a TPU gives, and what ran."""
    ported = _ported(vae, devices)
    runtime = ported.runtime
    tensors = {n: t.detach().numpy() for n, t in vae.state_dict().items()}
    weights = {name: jnp.asarray(tensors[name]) for name in ported.arrays}

    def run(weights: Any, carry: Any, constants: Any, inputs: Any) -> Any:
        out, cache = ported.bind(weights)(inputs["z"], conv_cache=carry, method=part)
        return cache, {"video": out}

    layout = LAYOUTS[part]
    carry, found = None, []
    for chunk in chunks:
        inputs = {"z": jnp.asarray(chunk.numpy())}
        program, places = spread(run, runtime, layout, (carry, None, inputs))
        jitted = jax.jit(program, out_shardings=places)
        carry, out = jitted(weights, carry, None, inputs)
        rows, columns = (
            n // 2 if part == "encoder" else 2 * n for n in chunk.shape[3:]
        )
        found.append(np.asarray(out["video"])[..., :rows, :columns])
    told = counted(runtime.convolutions)
    return found, [(r.count, r.implementation, r.reason) for r in told]


def _compared(
    part: str,
    chunks: list[torch.Tensor],
    devices: int,
    config: dict[str, Any] = CONFIG,
) -> tuple[float, int, int]:
    """The largest difference from upstream, and the convolutions in the form that
    copies no video: how many there were, and of how many layers' calls.
    """
    vae = _vae(config)
    made, told = _coded(vae, part, chunks, devices)
    cache, apart = None, 0.0
    for found, chunk in zip(made, chunks, strict=True):
        expected, cache = getattr(vae, part)(chunk, conv_cache=cache)
        assert found.shape == expected.shape
        apart = max(apart, float(np.abs(found - expected.numpy()).max()))
    # All but those of a few channels, and the strides of the encoder.
    module = getattr(vae, part)
    kinds = (torch.nn.Conv2d, torch.nn.Conv3d)
    wide = sum(
        m.in_channels % 128 == 0 and m.kernel_size[-1] == 3 and m.stride[-1] == 1
        for m in module.modules()
        if isinstance(m, kinds)
    )
    in_place = sum(n for n, by, why in told if (by, why) == (KERNEL, ""))
    return apart, in_place, wide * len(chunks)


@pytest.mark.parametrize(
    ("rows", "columns", "devices", "config"),
    [
        pytest.param(2, 8, 1, SMALL, id="whole", marks=pytest.mark.sweep),
        # A block whose input is as wide as its output.
        pytest.param(3, 16, 2, CONFIG, id="even columns", marks=pytest.mark.sweep),
        pytest.param(2, 5, 2, SMALL, id="5 columns"),
        pytest.param(2, 31, 2, SMALL, id="31 columns", marks=pytest.mark.sweep),
    ],
)
@torch.no_grad()
def test_blocks_of_kernels_are_upstreams(
    rows: int, columns: int, devices: int, config: dict[str, Any]
) -> None:
    """Half a minute: every kernel of a decoder is compiled interpreted, for a first and
    a following chunk.
    """
    torch.manual_seed(1)
    chunks = [torch.randn(1, 4, frames, rows, columns) for frames in (3, 2)]
    apart, in_place, wide = _compared("decoder", chunks, devices, config)
    assert apart <= TOLERANCES["component float32"]
    assert in_place >= wide > 0


@pytest.mark.parametrize(
    "lengths", [(3,), pytest.param((3, 2), marks=pytest.mark.sweep)], ids=str
)
@torch.no_grad()
def test_the_encoder_of_kernels_is_upstreams_where_columns_are_uneven(
    lengths: tuple[int, ...],
) -> None:
    """13 CPU seconds: every kernel of an encoder is compiled interpreted."""
    torch.manual_seed(1)
    chunks = [torch.randn(1, 3, frames, 4, 10) for frames in lengths]
    apart, in_place, wide = _compared("encoder", chunks, 2)
    assert apart <= TOLERANCES["component float32"]
    assert in_place >= wide > 0


@pytest.mark.parametrize(
    "without", ["", "cogvideox-resnet-block", "cogvideox-activation-in-norm"]
)
def test_blocks_leave_no_activation_to_the_compiler(without: str) -> None:
    """All are part of norms: those of the blocks, and the one the decoder ends with."""
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
    assert (" logistic " in jaxpr) == bool(without)


@pytest.mark.parametrize(
    ("rows", "columns", "devices", "frames", "in_time"),
    [
        # One frame is not enlarged in time, nor is the first of an odd number.
        (3, 5, 2, 1, True),
        (3, 5, 2, 2, True),
        (3, 5, 2, 3, True),
        (3, 5, 2, 2, False),
        *(
            pytest.param(*size, frames, in_time, marks=pytest.mark.sweep)
            for size in ((6, 10, 1), (3, 5, 2))
            for frames in (1, 2, 3)
            for in_time in (False, True)
            if size[-1] == 1 or (frames != 2 and not in_time)
        ),
    ],
)
@torch.no_grad()
def test_the_upsampler_of_kernels_is_upstreams(
    rows: int, columns: int, devices: int, frames: int, in_time: bool
) -> None:
    """What the patch ``cogvideox-upsample`` makes of it."""
    torch.manual_seed(0)
    module = CogVideoXUpsample3D(128, 128, compress_time=in_time).eval()
    x = torch.randn(1, 128, frames, rows, columns)
    ported = _ported(module, devices)
    weights = {
        name: jnp.asarray(tensor.numpy())
        for name, tensor in module.state_dict().items()
    }

    def run(weights: Any, carry: Any, constants: Any, inputs: Any) -> Any:
        return carry, {"video": ported.bind(weights)(inputs["z"])}

    inputs = {"z": jnp.asarray(x.numpy())}
    program, places = spread(run, ported.runtime, LAYOUT, (None, None, inputs))
    _, out = jax.jit(program, out_shardings=places)(weights, None, None, inputs)
    found = np.asarray(out["video"])[..., : 2 * rows, : 2 * columns]
    wanted = module(x).numpy()
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= TOLERANCES["module float32"]
    (record,) = counted(ported.runtime.convolutions)
    assert (record.implementation, record.reason) == (KERNEL, "")


def _told(part: str) -> tuple[int, list[tuple[int, str, str, str]]]:
    """Convolutions of the encoder or the decoder, and what a trace tells of them."""
    vae = _vae()
    ported = _ported(vae, 1)
    module = getattr(vae, part)
    weights = {
        name: jax.ShapeDtypeStruct(tuple(tensor.shape), jnp.float32)
        for name, tensor in vae.state_dict().items()
    }

    def run(weights: Any, carry: Any, constants: Any, inputs: Any) -> Any:
        out, cache = ported.bind(weights)(inputs["z"], method=part)
        return cache, {"video": out}

    channels = CONFIG["latent_channels"] if part == "decoder" else 3
    inputs = {"z": jax.ShapeDtypeStruct((1, channels, 2, 4, 32), jnp.float32)}
    program, _ = spread(run, ported.runtime, LAYOUT, (None, None, inputs))
    jax.make_jaxpr(program)(weights, None, None, inputs)
    kinds = (torch.nn.Conv2d, torch.nn.Conv3d)
    count = sum(isinstance(m, kinds) for m in module.modules())
    found = counted(ported.runtime.convolutions)
    return count, [(r.count, r.call, r.implementation, r.reason) for r in found]


def test_reports_tell_of_every_convolution_once() -> None:
    count, found = _told("decoder")
    assert sum(n for n, *_ in found) == count
    assert {entry[1] for entry in found} == {"convolution"}
    # Of four channels there are no whole lanes.
    copied = f"{KERNEL}, of a padded copy"
    (first,) = (entry for entry in found if entry[3])
    assert first == (1, "convolution", copied, "4 channels")
    assert {entry[2] for entry in found} == {KERNEL, PRODUCT, copied}


def test_what_a_kernel_refuses_is_told_and_what_takes_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 to 256 does not fit; the first convolution of its block, 128 to 256, does."""
    options = video.kernel_options

    def less(context: Any) -> dict[str, Any]:
        needed = vmem_bytes(4, 32, 128, 256, 3, 4)
        return {**options(context), "vmem_limit": needed + MARGIN_BYTES}

    # Where the blocks have it from, and where single convolutions do.
    monkeypatch.setattr(video, "kernel_options", less)
    monkeypatch.setattr("tpuport.patches.conv.kernel_options", less)
    count, found = _told("encoder")
    calls = [entry for entry in found if entry[1] == "convolution"]
    # Also those of an attempt that was refused halfway.
    assert sum(n for n, *_ in calls) == count
    by = {(call, by): (n, why) for n, call, by, why in found if "VMEM" in why}
    refused = {
        ("resnet block", "upstream's code"),
        ("causal convolution", "upstream's code"),
        ("convolution", "XLA"),
    }
    assert set(by) == refused
    # One block of 128 to 256 and two in the middle, with five convolutions to 256.
    assert by["resnet block", "upstream's code"][0] == 3
    assert by["convolution", "XLA"][0] == by["causal convolution", "upstream's code"][0]
    assert by["convolution", "XLA"][0] == 5
    assert (1, "convolution", "XLA", "a stride of (2, 2)") in found


PROGRAM = r"""
import json
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from tpuport.core.weights.skeleton import build_skeleton
from tests.models.compiled_layers import in_a_decoder
from tpuport.core.programs.components import Loaded
from tpuport.core.programs.lowering import Traceable
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.plugins import get_port

port = get_port("cogvideox")
variant = port.variant("1.5-5b")
devices = topologies.get_topology_desc(topology_name="v6e:2x4", platform="tpu").devices
axis = (jax.sharding.AxisType.Auto,)
mesh = jax.sharding.Mesh(np.array(devices), ("x",), axis_types=axis)
whole = NamedSharding(mesh, PartitionSpec())
component = port.components["vae"]
# One block at each size.
config = {**variant.configs["vae"], "layers_per_block": 0}
runtime = model_runtime(
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
compiled = Traceable(
    stage="decode", name="first", program=program,
    loaded=Loaded(ported, weights, None, whole),
    args=(None, None, {"latents": latents}),
).trace().lower().compile()
print(json.dumps(in_a_decoder(compiled.as_text())))
"""


@needs_libtpu
def test_the_decoder_compiles_for_eight_chips_from_the_projects_kernels() -> None:
    """25 CPU seconds: a compile for a TPU of kernels of the published widths."""
    found = run_json(PROGRAM)
    names = ("conv", "moments", "norm", "sides")
    assert found["kernels"] == [f"tpuport_{name}" for name in names]
    # None is left to the compiler.
    assert found["convolutions"] == 0
