"""GELU in bfloat16 is as exact as torch's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.patches.tools import apply
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.patches.missing import GELU_ROUNDED_ONCE, gelu


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_it_is_as_exact_as_torchs_where_torchaxs_is_not(approximate: str) -> None:
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 3
    low = x.to(torch.bfloat16)
    truth = torch.nn.functional.gelu(low.double(), approximate=approximate).numpy()

    def error(found: np.ndarray) -> float:
        return float(np.abs(found - truth).mean())

    ours = jnp.asarray(low.float().numpy()).astype(jnp.bfloat16)
    got = jax.jit(gelu, static_argnames="approximate")(ours, approximate=approximate)
    assert got.dtype == jnp.bfloat16
    torchs = torch.nn.functional.gelu(low, approximate=approximate).float().numpy()
    stepwise = jax.nn.gelu(ours, approximate == "tanh")
    assert error(np.asarray(got, np.float32)) < 1.001 * error(torchs)
    assert error(np.asarray(stepwise, np.float32)) > 1.1 * error(torchs)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_runtime_with_the_override_runs_it(approximate: str) -> None:
    module = torch.nn.GELU(approximate=approximate)
    x = jnp.linspace(-4, 4, 4096).astype(jnp.bfloat16)
    found = {}
    for overrides in ((), (GELU_ROUNDED_ONCE,)):
        runtime = model_runtime(mesh=None, platform="cpu", overrides=overrides)
        ported = PortedModule(module, runtime)
        # Op by op: a compiler that fuses may keep more digits than torchax asks for.
        found[bool(overrides)] = apply(ported, {}, x)
    want = gelu(x, approximate=approximate)
    assert (found[True] == want).all()
    assert (found[False] != want).any()
