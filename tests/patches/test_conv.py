"""Convolutions against torch: over three axes on the CPU, and in parts on a mesh."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.patches.tools import apply, by_torchax, model_runtime, traced
from tests.tolerances import TOLERANCES
from tpuport.core.layers.video_layers import KERNEL, PRODUCT
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.tracing.context import counted
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.kernels.convolution import conv_cpu
from tpuport.patches.conv import CONVOLUTION
from tpuport.patches.padding import PADDING

ATOL = TOLERANCES["module float32"]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"padding": (1, 2, 0)},
    "spatial stride and dilation": {"stride": (1, 2, 2), "dilation": (1, 1, 2)},
    "one frame of taps": {"kernel_size": (1, 3, 3)},
    "pointwise": {"kernel_size": 1},
    "over time alone": {"kernel_size": (3, 1, 1), "padding": (1, 0, 0)},
    "every second frame": {"kernel_size": (3, 1, 1), "stride": (2, 1, 1)},
    "temporal stride falls back": {"stride": (2, 1, 1)},
    "temporal dilation falls back": {"dilation": (2, 1, 1)},
    "groups fall back": {"groups": 2},
    "without a bias": {"bias": False},
}


OTHERS: dict[str, torch.nn.Module] = {
    "one axis": torch.nn.Conv1d(4, 6, 3, padding=1),
    "pictures": torch.nn.Conv2d(4, 6, 3, padding=1, stride=2),
    "dilated pictures": torch.nn.Conv2d(4, 6, 3, padding=(2, 1), dilation=(2, 1)),
    "patches": torch.nn.Conv2d(4, 6, 3, stride=3),
    "rows alone": torch.nn.Conv2d(4, 6, (3, 1), padding=(2, 0), dilation=(2, 1)),
    "rows alone, every second": torch.nn.Conv2d(4, 6, (3, 1), stride=(2, 1)),
    "each channel": torch.nn.Conv2d(4, 4, (3, 2), padding=1, stride=2, groups=4),
    "each channel, over time": torch.nn.Conv3d(4, 4, 3, dilation=2, groups=4),
    "each channel, no bias": torch.nn.Conv1d(4, 4, 3, groups=4, bias=False),
    "more of each channel": torch.nn.Conv2d(4, 8, 3, padding=1, groups=4),
    "transposed": torch.nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1),
}


def conv3d(case: str) -> torch.nn.Module:
    return torch.nn.Conv3d(4, 6, **{"kernel_size": 3, **CASES[case]})


@torch.no_grad()
def check(module: torch.nn.Module, platform: str = "cpu") -> None:
    """A module by the override is torch's."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, *(7, 9, 10)[5 - module.weight.ndim :])
    runtime = model_runtime(mesh=None, platform=platform, overrides=[CONVOLUTION])
    weights = {k: jnp.asarray(v.detach().numpy()) for k, v in module.named_parameters()}
    ported = PortedModule(module, runtime)
    found = np.asarray(apply(ported, weights, jnp.asarray(x.numpy())))
    expected = module(x).numpy()
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= ATOL


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("case", CASES)
def test_conv3d_is_torchs(case: str, platform: str) -> None:
    check(conv3d(case), platform)


@pytest.mark.parametrize("case", OTHERS)
def test_other_convolutions_are_torchs(case: str) -> None:
    check(OTHERS[case])


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("case", ["plain", "padded", "spatial stride and dilation"])
def test_blocks_of_rows_are_torchs(
    case: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a last block that has fewer rows than the others."""
    # Columns of the result, of 9 taps of 4 channels of a float.
    columns = {"plain": 8, "padded": 8, "spatial stride and dilation": 3}[case]
    monkeypatch.setattr(conv_cpu, "CACHE", rows * columns * 9 * 4 * 4)
    check(conv3d(case))


# Speed is what CONVOLUTION is for, see docs/performance.md. Here is what makes
# it: over how many axes the convolutions are that XLA gets.


def axes_convolved(call: Any, *arrays: Any) -> list[int]:
    """Of each convolution in the lowered program."""
    text = jax.jit(call).lower(*arrays).as_text()
    results = re.findall(r"stablehlo\.convolution\(.*-> tensor<([\dx]+)xf32>", text)
    return [result.count("x") + 1 - 2 for result in results]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("case", "axes"),
    [
        ("plain", []),
        ("padded", []),
        ("spatial stride and dilation", []),
        ("one frame of taps", []),
        ("temporal stride falls back", [3]),
        ("groups fall back", [3]),
    ],
)
def test_the_cpu_multiplies_and_without_the_override_convolves_over_three_axes(
    case: str, axes: list[int], batch: int
) -> None:
    module = conv3d(case)
    names = [name for name, _ in module.named_parameters()]
    arrays = [p.detach().numpy() for p in module.parameters()]
    x = torch.zeros(batch, 4, 5, 6, 7).numpy()

    def call(x: Any, *parameters: Any) -> Any:
        weights = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, weights, (x,))

    cpu, tpu = (
        model_runtime(mesh=None, platform=platform, overrides=[CONVOLUTION])
        for platform in ("cpu", "tpu")
    )
    assert axes_convolved(traced(cpu, call), x, *arrays) == axes
    # Outside of the block torchax's own is back. A TPU has the project's kernel where
    # nothing is strided, dilated or grouped.
    assert axes_convolved(by_torchax(cpu, call), x, *arrays) == [3]
    dense = not {"stride", "dilation", "groups"} & set(CASES[case])
    assert axes_convolved(traced(tpu, call), x, *arrays) == ([] if dense else [3])
    jaxpr = str(jax.make_jaxpr(traced(tpu, call))(x, *arrays))
    assert ("pallas_call" in jaxpr) == dense


#: Of each case on a TPU: what does it, and why not the kernel.
TOLD = {
    "plain": (KERNEL, ""),
    "pointwise": (PRODUCT, ""),
    "spatial stride and dilation": ("XLA", "a stride of (1, 2, 2), a dilation of"),
    "groups fall back": ("XLA", "2 groups"),
    "five by five": ("XLA", "a kernel of (3, 5, 5)"),
    "too many channels": ("XLA", "bytes of VMEM; there are"),
}


@pytest.mark.parametrize("case", TOLD)
def test_what_a_convolution_runs_as_is_told_and_why(case: str) -> None:
    more = {"five by five": {"kernel_size": (3, 5, 5)}, "too many channels": {}}
    arguments = {"kernel_size": 3, **{**CASES, **more}[case]}
    sizes = (4, 6) if case != "too many channels" else (2048, 2048)
    module = torch.nn.Conv3d(*sizes, **arguments, device="meta")
    names = [name for name, _ in module.named_parameters()]
    arrays = [
        jax.ShapeDtypeStruct(tuple(p.shape), "float32") for p in module.parameters()
    ]
    x = jax.ShapeDtypeStruct((1, sizes[0], 5, 8, 9), "float32")

    def call(x: Any, *parameters: Any) -> Any:
        weights = dict(zip(names, parameters, strict=True))
        once = torch.func.functional_call(module, weights, (x,))
        return once, torch.func.functional_call(module, weights, (x,))

    runtime = model_runtime(mesh=None, platform="tpu", overrides=[CONVOLUTION])
    jax.make_jaxpr(traced(runtime, call))(x, *arrays)
    (record,) = counted(runtime.convolutions)
    implementation, reason = TOLD[case]
    assert (record.implementation, record.count) == (implementation, 2)
    assert reason in record.reason
    assert bool(record.reason) == bool(reason)


def conv2d(x: Any, weight: Any, bias: Any) -> Any:
    return torch.nn.functional.conv2d(x, weight, bias, padding=1)


PICTURE = [np.zeros(shape, np.float32) for shape in ((1, 4, 6, 7), (6, 4, 3, 3), (6,))]


def test_on_a_cpu_no_kernel_is_passed_over() -> None:
    runtime = model_runtime(mesh=None, platform="cpu", overrides=[CONVOLUTION])
    jax.make_jaxpr(traced(runtime, conv2d))(*PICTURE)
    (record,) = runtime.convolutions
    assert (record.implementation, record.reason) == ("XLA", "")


def test_a_mesh_without_a_split_is_left_to_the_compiler() -> None:
    """It could not divide a kernel among the devices."""
    axis = (jax.sharding.AxisType.Auto,)
    found = []
    for devices in (1, 2):
        mesh = jax.make_mesh((devices,), ("tp",), axis_types=axis)
        runtime = model_runtime(mesh=mesh, platform="tpu", overrides=[CONVOLUTION])
        jaxpr = str(jax.make_jaxpr(traced(runtime, conv2d))(*PICTURE))
        found.append("pallas_call" in jaxpr)
    assert found == [True, False]


#: Padding of a convolution, a border before one, and what else it has.
SPLIT: dict[str, dict[str, Any]] = {
    "padded": {"padding": 1},
    "a border": {"border": (1, 1, 1, 1)},
    "a repeated border": {"border": (1, 1, 1, 1), "mode": "replicate"},
    "half the size": {"border": (0, 1, 0, 1), "stride": 2},
    "half, padded": {"padding": 1, "stride": 2},
    "each channel": {"padding": 1, "groups": 4},
    "apart": {"padding": 2, "dilation": 2},
}
WHOLE: dict[str, dict[str, Any]] = {
    "a mirrored border": {"border": (1, 1, 1, 1), "mode": "reflect"},
    "no border": {},
}


def pictured(case: dict[str, Any], x: Any, weight: Any) -> Any:
    more = dict(case)
    border, mode = more.pop("border", (0, 0)), more.pop("mode", "constant")
    x = torch.nn.functional.pad(x, border, mode)
    return torch.nn.functional.conv2d(
        x, weight[:, : 4 // more.get("groups", 1)], **more
    )


@pytest.mark.parametrize("sides", [(12, 32), (24, 36), (3, 32)], ids=str)
@pytest.mark.parametrize("devices", ["sp=8", "sp=3", "dp=2,sp=2,tp=2"])
def test_a_picture_in_parts_has_torchs_values(
    devices: str, sides: tuple[int, int]
) -> None:
    """All cases are one program: compiling takes most of the time."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, *sides), torch.randn(4, 4, 3, 3)

    def call(x: Any, weight: Any) -> Any:
        return [pictured(case, x, weight) for case in (SPLIT | WHOLE).values()]

    mesh = build_mesh(MeshSpec.parse(devices))
    overrides = [CONVOLUTION, PADDING]
    runtime = model_runtime(mesh=mesh, platform="cpu", overrides=overrides)
    found = jax.jit(traced(runtime, call))(x.numpy(), weight.numpy())
    for name, one, other in zip(SPLIT | WHOLE, found, call(x, weight), strict=True):
        scale = float(other.abs().max())
        assert np.abs(np.asarray(one) - other.numpy()).max() <= ATOL * scale, name


@pytest.mark.parametrize("case", SPLIT | WHOLE)
def test_a_picture_that_divides_is_in_parts(case: str) -> None:
    runtime = model_runtime(
        mesh=build_mesh(MeshSpec.parse("sp=8")),
        platform="tpu",
        overrides=[CONVOLUTION, PADDING],
    )
    shapes = [(2, 4, 24, 128), (4, 4, 3, 3)]
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    call = traced(runtime, functools.partial(pictured, (SPLIT | WHOLE)[case]))
    assert ("shard_map" in str(jax.make_jaxpr(call)(*arrays))) == (case in SPLIT)
