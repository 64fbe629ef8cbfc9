"""A torch module as a pure function: equal to torch, its weights arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import pytest
import torch

from tests.patches.tools import apply, model_runtime
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.tracing.ported_module import PortedModule, WeightNames, constrain


class Toy(torch.nn.Module):
    """A tied weight, a stored and a computed buffer, dropout, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(6, 6, bias=False)
        self.inner = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5))
        self.head = torch.nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.randn(6))
        self.register_buffer("table", torch.randn(6), persistent=False)
        self.factor = 2.0

    def forward(self, x: torch.Tensor, *, extra: Any = None) -> torch.Tensor:
        x = self.inner(torch.relu(self.embed(x))) * self.factor
        x = self.head(x + self.offset) * self.table
        return x if extra is None else x + extra["more"]

    def twice(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return 2 * x, {"same": x}

    def fail(self, x: torch.Tensor) -> None:
        raise RuntimeError("upstream failed")


@pytest.fixture
def toy() -> Toy:
    torch.manual_seed(0)
    return Toy()


@pytest.fixture
def ported(toy: Toy) -> PortedModule:
    return PortedModule(toy, model_runtime(mesh=None, platform="cpu"))


def weights_of(ported: PortedModule) -> dict[str, jax.Array]:
    tensors = dict(ported.module.named_parameters())
    tensors.update(ported.module.named_buffers())
    names = (*ported.names.stored, *ported.names.computed)
    return {name: jnp.asarray(to_numpy(tensors[name])) for name in names}


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


def assert_same(found: Any, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES["module float32"]
    torch.testing.assert_close(to_torch(found), expected, rtol=0, atol=tolerance)


def test_weights_have_one_name_and_a_role(toy: Toy) -> None:
    names = WeightNames.of(toy)
    assert names.stored == (
        "embed.weight",
        "inner.0.weight",
        "inner.0.bias",
        "offset",
    )
    assert names.computed == ("table",)
    assert names.tied == {"head.weight": "embed.weight"}


def test_it_is_the_same_function_as_torchs(toy: Toy, ported: PortedModule) -> None:
    weights = weights_of(ported)
    x = jnp.asarray(X.numpy())
    toy.eval()
    with torch.no_grad():
        expected = toy(X, extra={"more": X})
    toy.train()  # and still without dropout
    call = jax.jit(lambda w, x: apply(ported, w, x, extra={"more": x}))
    assert_same(call(weights, x), expected)
    assert toy.inner[1].training


def test_the_weights_given_are_used_for_every_name_of_a_tied_one(
    toy: Toy, ported: PortedModule
) -> None:
    weights = weights_of(ported)
    weights["embed.weight"] = 3 * weights["embed.weight"]
    found = apply(ported, weights, jnp.asarray(X.numpy()))
    with torch.no_grad():
        toy.embed.weight.mul_(3)
        expected = toy.eval()(X)
    assert_same(found, expected)


def test_other_code_and_nested_results(ported: PortedModule) -> None:
    weights, x = weights_of(ported), jnp.asarray(X.numpy())
    double, rest = ported.call(weights, lambda x: ported.module.twice(x), x)
    assert isinstance(double, jax.Array)
    assert_same(double, 2 * X)
    assert_same(rest["same"], X)


def test_the_module_is_as_before_also_after_an_error(
    toy: Toy, ported: PortedModule
) -> None:
    toy.inner[1].eval()
    flags = [child.training for child in toy.modules()]
    before = {k: v.clone() for k, v in toy.state_dict().items()}
    embed, x = toy.embed.weight, jnp.asarray(X.numpy())
    apply(ported, weights_of(ported), x)
    with pytest.raises(RuntimeError, match="upstream failed"):
        ported.call(weights_of(ported), lambda x: ported.module.fail(x), x)
    assert [child.training for child in toy.modules()] == flags
    assert toy.embed.weight is embed
    assert toy.head.weight is embed
    assert all(torch.equal(v, before[k]) for k, v in toy.state_dict().items())


def test_it_lowers_on_abstract_arrays_with_no_weights_at_all() -> None:
    with torch.device("meta"):
        toy = Toy()
    ported = PortedModule(toy, model_runtime(mesh=None, platform="cpu"))
    tensors = ported.tensors()
    abstract = {
        name: jax.ShapeDtypeStruct(tuple(tensors[name].shape), jnp.bfloat16)
        for name in (*ported.names.stored, *ported.names.computed)
    }
    x = jax.ShapeDtypeStruct((3, 6), jnp.bfloat16)
    lowered = jax.jit(lambda w, x: apply(ported, w, x)).lower(abstract, x)
    assert lowered.out_info.shape == (3, 6)
    assert lowered.out_info.dtype == jnp.bfloat16


def test_weights_are_arguments_of_the_program_and_never_constants(
    ported: PortedModule,
) -> None:
    weights, x = weights_of(ported), jnp.asarray(X.numpy())
    closed = jax.make_jaxpr(lambda w, x: apply(ported, w, x))(weights, x)
    assert len(closed.jaxpr.invars) == len(weights) + 1
    assert [c for c in closed.consts if getattr(c, "size", 1) > 1] == []
    inputs = [v for equation in closed.jaxpr.eqns for v in equation.invars]
    used = {v for v in inputs if not isinstance(v, jax.extend.core.Literal)}
    assert used >= set(closed.jaxpr.invars)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((4, 8), ("dp", "tp")), ((3, 8), (None, "tp")), ((4, 9), ("dp", None))],
)
def test_constraints_leave_whole_what_does_not_divide(
    shape: tuple[int, int], expected: tuple[str | None, ...]
) -> None:
    mesh = build_mesh(MeshSpec(dp=2, tp=4))
    x = jax.jit(lambda x: constrain(mesh, x, "dp", "tp"))(jnp.zeros(shape))
    spec = (*x.sharding.spec, None, None)[:2]
    assert tuple(spec) == expected
    assert constrain(None, jnp.zeros(shape), "dp").shape == shape
