"""Where the layout of an array is left to nobody."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from tests.patches.tools import apply, model_runtime
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.tracing.array_layout import in_order
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights import placement
from tpuport.core.weights.placement import abstract_weights, place_weights
from tpuport.core.weights.sharding import ShardRule, plan_sharding


class Chip:
    """A device that is not there."""

    platform = "tpu"


class Slice:
    """What a sharding says of its mesh."""

    class mesh:
        devices = np.array([[Chip()]])


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((8, 6, 3, 3, 3), (2, 3, 4, 1, 0)),
        ((8, 6, 3, 3), (2, 3, 1, 0)),
        ((8, 6, 1, 1, 1), None),
        ((8, 6, 4), None),
        ((8, 6), None),
    ],
)
def test_kernels_of_convolutions_have_their_outputs_along_the_lanes(
    shape: tuple[int, ...], order: tuple[int, ...] | None, monkeypatch: Any
) -> None:
    given: Any = Slice()
    seen: list[Any] = []
    monkeypatch.setattr(
        "tpuport.core.tracing.array_layout.Format",
        lambda *parts: seen.append(parts) or "format",
    )
    found = in_order(shape, given)
    if order is None:
        assert found is given
        assert not seen
    else:
        assert found == "format"
        assert seen == [(Layout(major_to_minor=order), given)]


@torch.no_grad()
def test_a_weight_in_another_order_gives_the_same(monkeypatch: Any) -> None:
    """Placed, bound and compiled; on the CPU, which takes an order as well."""
    torch.manual_seed(0)
    module = torch.nn.Conv3d(4, 6, 3, padding=1)
    mesh = build_mesh(MeshSpec(dp=2))
    ported = PortedModule(module, model_runtime(mesh=mesh, platform="cpu"))
    tensors = dict(module.state_dict())
    rules = (ShardRule(pattern=".*", spec=()),)
    plan = plan_sharding(rules, tensors, dict(mesh.shape), component="conv")
    order = Layout(major_to_minor=(2, 3, 4, 1, 0))

    def turned(shape: tuple[int, ...], sharding: NamedSharding) -> Any:
        return Format(order, sharding) if len(shape) == 5 else sharding

    monkeypatch.setattr(placement, "in_order", turned)
    structs = abstract_weights(ported, plan, mesh)
    weights = place_weights(ported, structs, lambda n, i: to_numpy(tensors[n][i]))
    layout = weights["weight"].format.layout
    assert layout.major_to_minor == order.major_to_minor
    x = torch.randn(1, 4, 3, 5, 6)
    whole = NamedSharding(mesh, PartitionSpec())
    given = jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=whole)
    # As programs are compiled, from shapes, and then run.
    run = jax.jit(functools.partial(apply, ported)).lower(structs, given).compile()
    found = run(weights, jax.device_put(to_numpy(x), whole))
    assert (to_torch(found) - module(x)).abs().max() <= TOLERANCES["module float32"]
