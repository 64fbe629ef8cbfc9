"""The norms in front of the last projection are arrays of their own.

What ada-layer-norm-apart and ada-layer-norm-continuous-apart do.
"""

from __future__ import annotations

import functools

import jax
import pytest
import torch
from diffusers.models.normalization import AdaLayerNorm, AdaLayerNormContinuous

from tests.patches.tools import apply, model_runtime
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.tracing.patching import Patch
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.patches.diffusers import MODULATED_NORMS


class Last(torch.nn.Module):
    """A norm and a projection, as transformers end."""

    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm, self.project = norm, torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.project(self.norm(x, temb=temb))
        return out


class Continuous(AdaLayerNormContinuous):  # type: ignore[misc]
    """With the name that the other one has for its argument."""

    def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x, temb)
        return out


NORMS = {
    "AdaLayerNorm": lambda: AdaLayerNorm(6, output_dim=16, chunk_dim=1),
    "AdaLayerNormContinuous": lambda: Continuous(8, 6),
}


@pytest.mark.parametrize("name", NORMS)
@torch.no_grad()
def test_the_norm_is_kept_apart_and_the_same(name: str) -> None:
    torch.manual_seed(0)
    module = Last(NORMS[name]())
    inputs = torch.randn(2, 5, 8), torch.randn(2, 6)
    arrays = [to_numpy(x) for x in inputs]

    def traced(patches: tuple[Patch, ...]) -> tuple[str, torch.Tensor]:
        ported = PortedModule(
            module, model_runtime(mesh=None, platform="cpu", patches=patches)
        )
        weights = {k: to_numpy(v) for k, v in module.state_dict().items()}
        run = jax.jit(functools.partial(apply, ported)).lower(weights, *arrays)
        return run.as_text(), to_torch(run.compile()(weights, *arrays))

    ours = [p for p in MODULATED_NORMS if p.target.endswith(f":{name}.forward")]
    assert len(ours) == 1
    text, found = traced(tuple(ours))
    plain, _ = traced(())
    assert "optimization_barrier" not in plain
    barrier, product = (
        text.index(op) for op in ("optimization_barrier", "dot_general")
    )
    # One product, of the norm's own layer, comes before it.
    assert text[:barrier].count("dot_general") == 1
    assert product < barrier < text.rindex("dot_general")
    assert (found - module(*inputs)).abs().max() <= TOLERANCES["module float32"]
