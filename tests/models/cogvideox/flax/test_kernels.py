"""The Flax VAE of the project's kernels, as on a TPU, against its own plain form.

The kernels run in interpret mode here, on a mesh that stands in for TPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.cogvideox.vae.test_tpu import CONFIG
from tests.processes import needs_libtpu, run_json
from tests.sweeps import swept
from tests.tolerances import TOLERANCES
from tpuport.core.layers import video_layers as video
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.core.layers.video_layers import KERNEL, PRODUCT
from tpuport.core.mesh import spatial_split as spatial
from tpuport.core.mesh.spatial_split import SpatialSplit
from tpuport.core.programs.lowering import spread
from tpuport.core.tracing.convolution_notes import counted
from tpuport.core.weights.jax_module import JaxModule
from tpuport.kernels.convolution.conv import MARGIN_BYTES, vmem_bytes
from tpuport.models.cogvideox.flax_stages import FLAX
from tpuport.models.cogvideox.flax_weights import FlaxWeights

PADDED = f"{KERNEL}, of a padded copy"
#: A decoder of no more blocks than there are kinds; no encoder is that small.
SMALL = {**CONFIG, "layers_per_block": 0}


@functools.cache
def weights() -> Mapping[str, jax.Array]:
    """Of about unit gain, by name."""
    draw = np.random.default_rng(0)
    found = {}
    for name, weight in FlaxWeights(SMALL).by_name.items():
        values = draw.standard_normal(weight.shape, dtype=np.float32)
        if len(weight.shape) > 1:
            values /= np.sqrt(np.prod(weight.shape[:-1]))
        elif name.endswith("scale"):
            values = 1 + 0.1 * values
        found[name] = jnp.asarray(0.1 * values if name.endswith("bias") else values)
    return found


def module(
    platform: str, devices: int, config: Mapping[str, Any] = CONFIG
) -> JaxModule:
    axis = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("x",), axis_types=axis)
    return JaxModule(FlaxWeights(config), model_runtime(mesh=mesh, platform=platform))


def chunk_by_chunk(
    vae: JaxModule, stage: str, form: str, chunks: list[np.ndarray]
) -> list[Any]:
    """What a stage's programs give of [B, C, T, Y, X], chunk after chunk."""
    name = "latents" if stage == "decode" else "pixels"
    carry, found = None, []
    names = ("first", "next")[: len(chunks)]
    for place, chunk in zip(names, chunks, strict=True):
        program = FLAX.programs[stage][f"{place} {form}".strip()]
        assert program.space is not None

        def run(given: Any, *args: Any, fn: Any = program.fn) -> Any:
            return fn(vae.bind(given), *args)

        inputs = {name: jnp.asarray(chunk)}
        whole, places = spread(run, vae.runtime, program.space, (carry, None, inputs))
        jitted = jax.jit(whole, out_shardings=places)
        carry, out = jitted(weights(), carry, None, inputs)
        found.append(jax.tree.map(np.asarray, out))
    return found


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)


def split(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    found = SpatialSplit(videos=1, rows=rows, columns=columns)
    monkeypatch.setattr(spatial, "choose_split", lambda *sizes: found)


def told(vae: JaxModule) -> dict[tuple[str, str], int]:
    """What the convolutions traced so far run as, and why."""
    found = counted(vae.runtime.convolutions)
    assert {record.call for record in found} <= {"convolution"}
    return {(r.implementation, r.reason): r.count for r in found}


# Neither rows nor columns divide.
UNEVEN = ((2, 4), (3, 11))


@pytest.mark.parametrize(
    ("parts", "size", "lengths"),
    [
        # ``vae/test_tpu.py`` goes on from a chunk in every run, by the same kernels.
        pytest.param(*UNEVEN, (3,), id="rows and columns"),
        swept(*UNEVEN, (3, 2)),
        swept((1, 8), (2, 16), (3, 2)),
        # Some devices have no column of their own.
        swept((1, 8), (3, 13), (3, 2)),
        # Wide enough for the kernel to read in place, with one phantom column.
        swept((1, 2), (2, 15), (3, 2)),
    ],
)
def test_decoding_by_kernels_is_that_without(
    parts: tuple[int, int],
    size: tuple[int, int],
    lengths: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 CPU seconds: every kernel of a decoder is compiled interpreted."""
    chunks = [drawn(1, 4, frames, *size) for frames in lengths]
    plain = module("cpu", 1, SMALL)
    truth = chunk_by_chunk(plain, "decode", "tile", chunks)
    assert told(plain) == {}
    split(monkeypatch, *parts)
    vae = module("tpu", parts[0] * parts[1], SMALL)
    found = chunk_by_chunk(vae, "decode", "tile", chunks)
    for ours, theirs in zip(found, truth, strict=True):
        rows, columns = (2 * n for n in size)
        made = ours[..., :rows, :columns]
        wanted = theirs[..., :rows, :columns]
        assert made.shape == wanted.shape
        assert np.abs(made - wanted).max() <= TOLERANCES["component float32"]
        assert wanted.std() > 0.1
    kinds = {implementation for implementation, _ in told(vae)}
    assert {KERNEL, PADDED} & kinds
    assert kinds <= {KERNEL, PADDED, PRODUCT}


def traced(stage: str, vae: JaxModule) -> str:
    """The jaxpr of a stage's first program, of shapes alone."""
    form, name, channels = {
        "decode": ("first tile", "latents", CONFIG["latent_channels"]),
        "encode": ("first", "pixels", 3),
    }[stage]
    program = FLAX.programs[stage][form]
    assert program.space is not None

    def run(given: Any, *args: Any) -> Any:
        return program.fn(vae.bind(given), *args)

    shapes = {
        name: jax.ShapeDtypeStruct(weight.shape, jnp.float32)
        for name, weight in FlaxWeights(CONFIG).by_name.items()
    }
    inputs = {name: jax.ShapeDtypeStruct((1, channels, 3, 16, 32), jnp.float32)}
    whole, _ = spread(run, vae.runtime, program.space, (None, None, inputs))
    return str(jax.make_jaxpr(whole)(shapes, None, None, inputs))


def test_every_block_is_made_of_kernels() -> None:
    vae = module("tpu", 1)
    jaxpr = traced("decode", vae)
    found = told(vae)
    # The first and the last one, two of each of six blocks, the upsampler's.
    convolutions = 1 + 2 * 6 + 1 + 1
    # A shortcut is part of the convolution that it is added to.
    assert sum(n for (by, _), n in found.items() if by != PRODUCT) == convolutions + 1
    # Two of every spatial norm.
    assert found[PRODUCT, ""] == 2 * (2 * 6 + 1)
    assert {by for by, _ in found} == {KERNEL, PADDED, PRODUCT}
    assert jaxpr.count("name=tpuport_conv") == convolutions
    assert jaxpr.count("name=tpuport_norm") == 2 * 6 + 1
    # Nothing of the plain form is left.
    assert "conv_general_dilated" not in jaxpr
    assert " logistic " not in jaxpr


def test_a_stride_is_left_to_the_compiler_and_told() -> None:
    vae = module("tpu", 1)
    jaxpr = traced("encode", vae)
    found = told(vae)
    assert found["XLA", "a stride of (2, 2)"] == 1
    assert {by for by, _ in found} == {KERNEL, PADDED, "XLA"}
    assert jaxpr.count("conv_general_dilated[") == 1


def test_what_a_kernel_refuses_is_told_and_left_to_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """256 to 256 does not fit in the encoder's last level; what is narrower does."""
    options = video.kernel_options

    def less(context: Any) -> dict[str, Any]:
        needed = vmem_bytes(8, 16, 128, 256, 3, 4)
        return {**options(context), "vmem_limit": needed + MARGIN_BYTES}

    monkeypatch.setattr(video, "kernel_options", less)
    vae = module("tpu", 1)
    jaxpr = traced("encode", vae)
    found = told(vae)
    refused = {why: n for (by, why), n in found.items() if by == "XLA"}
    refused.pop("a stride of (2, 2)")
    assert refused
    assert all("VMEM" in why for why in refused)
    assert jaxpr.count("conv_general_dilated[") == sum(refused.values()) + 1
    assert found[KERNEL, ""] > 0


PROGRAM = r"""
import json
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from tests.models.compiled_layers import in_a_decoder
from tpuport.core.programs.components import Loaded
from tpuport.core.weights.jax_module import JaxModule
from tpuport.core.programs.lowering import Traceable
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.models.cogvideox.flax_stages import FLAX
from tpuport.models.cogvideox.flax_weights import FlaxWeights
from tpuport.plugins import get_port

config = get_port("cogvideox").variant("1.5-5b").configs["vae"]
config = {**config, "layers_per_block": 1}
devices = topologies.get_topology_desc(topology_name="v6e:2x4", platform="tpu").devices
axis = (jax.sharding.AxisType.Auto,)
mesh = jax.sharding.Mesh(np.array(devices), ("x",), axis_types=axis)
whole = NamedSharding(mesh, PartitionSpec())
weights = FlaxWeights(config)
ported = JaxModule(weights, model_runtime(mesh=mesh, platform="tpu"))
arrays = {
    name: jax.ShapeDtypeStruct(weight.shape, jnp.bfloat16, sharding=whole)
    for name, weight in weights.by_name.items()
    if name.startswith("decoder.")
}
latents = jax.ShapeDtypeStruct((1, 16, 1, 8, 128), jnp.float32, sharding=whole)
compiled = Traceable(
    stage="decode", name="first", program=FLAX.programs["decode"]["first uint8"],
    loaded=Loaded(ported, arrays, None, whole),
    args=(None, None, {"latents": latents}),
).trace().lower().compile()
print(json.dumps(in_a_decoder(compiled.as_text())))
"""


@needs_libtpu
@pytest.mark.aot
def test_the_decoder_compiles_for_eight_chips_from_the_projects_kernels() -> None:
    found = run_json(PROGRAM)
    names = ("conv", "moments", "norm", "sides")
    assert found["kernels"] == [f"tpuport_{name}" for name in names]
    # None is left to the compiler.
    assert found["convolutions"] == 0
    assert found["loops"] == 0
