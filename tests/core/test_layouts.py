"""Where the layout of an array is left to nobody."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch

from tpuport.core.module import PortedModule
from tpuport.core.runtime import Runtime


class Turned(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


@pytest.mark.parametrize("platform", ["tpu", "cpu"])
def test_latents_are_row_major_on_a_tpu(platform: str) -> None:
    ported = PortedModule(Turned(), Runtime(mesh=None, platform=platform))
    x = jnp.arange(6.0).reshape(1, 2, 3)

    def run(x: jax.Array) -> jax.Array:
        model = ported.bind({})
        out: jax.Array = model.row_major(model(x)) + 1
        return out

    traced = jax.make_jaxpr(run)(x)
    found = [e for e in traced.eqns if e.primitive.name == "layout_constraint"]
    assert len(found) == (platform == "tpu")
    for equation in found:
        assert equation.params["layout"].major_to_minor == (0, 1, 2)
        # What is asked for is the transposed array, not the one it is made from.
        assert equation.invars[0].aval.shape == (1, 3, 2)
    assert (run(x) == x.swapaxes(1, 2) + 1).all()
