"""Convolutions over three axes on the CPU against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tolerances import TOLERANCES
from tpuport.core.runtime import Runtime
from tpuport.patches.conv import CONVOLUTION_ON_CPU

ATOL = TOLERANCES["module float32"]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"padding": (1, 2, 0)},
    "spatial stride and dilation": {"stride": (1, 2, 2), "dilation": (1, 1, 2)},
    "one frame of taps": {"kernel_size": (1, 3, 3)},
    "pointwise": {"kernel_size": 1},
    "temporal stride falls back": {"stride": (2, 1, 1)},
    "temporal dilation falls back": {"dilation": (2, 1, 1)},
    "groups fall back": {"groups": 2},
    "without a bias": {"bias": False},
}


@torch.no_grad()
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("case", CASES)
def test_conv3d_is_torchs(case: str, platform: str) -> None:
    torch.manual_seed(0)
    module = torch.nn.Conv3d(4, 6, **{"kernel_size": 3, **CASES[case]})
    x = torch.randn(2, 4, 7, 9, 10)
    runtime = Runtime(mesh=None, platform=platform, overrides=[CONVOLUTION_ON_CPU])
    found = _call(runtime, module, x)
    assert found.shape == module(x).shape
    assert float((found - module(x)).abs().max()) <= ATOL


@torch.no_grad()
@pytest.mark.parametrize("cls", [torch.nn.Conv1d, torch.nn.Conv2d])
def test_other_convolutions_are_left_alone(cls: Any) -> None:
    module = cls(4, 6, 3, padding=1)
    x = torch.randn(2, 4, *(9,) * (module.weight.ndim - 2))
    runtime = Runtime(mesh=None, platform="cpu", overrides=[CONVOLUTION_ON_CPU])
    assert float((_call(runtime, module, x) - module(x)).abs().max()) <= ATOL


def test_on_the_cpu_there_is_no_convolution_over_three_axes_left() -> None:
    import jax

    module = torch.nn.Conv3d(4, 6, 3)
    for platform, expected in (("cpu", 4), ("tpu", 5)):
        runtime = Runtime(mesh=None, platform=platform, overrides=[CONVOLUTION_ON_CPU])
        jaxpr = jax.make_jaxpr(lambda x, rt=runtime: _trace(rt, module, x))(
            torch.randn(1, 4, 5, 6, 7).numpy()
        )
        convolutions = [
            e for e in jaxpr.jaxpr.eqns if e.primitive.name == "conv_general_dilated"
        ]
        assert [e.outvars[0].aval.ndim for e in convolutions] == [expected]


def _trace(runtime: Runtime, module: torch.nn.Module, x: Any) -> Any:
    import jax.numpy as jnp

    from tpuport.core.module import PortedModule

    weights = {k: jnp.asarray(v.detach().numpy()) for k, v in module.named_parameters()}
    return PortedModule(module, runtime).apply(weights, x)


def _call(runtime: Runtime, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    import jax.numpy as jnp
    import numpy as np

    return torch.from_numpy(np.array(_trace(runtime, module, jnp.asarray(x.numpy()))))
