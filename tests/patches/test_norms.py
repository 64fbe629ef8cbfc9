"""Norms are torch's, with two-pass float32 statistics whatever the input's dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

from tests.patches.tools import by_torchax, found_by, model_runtime, traced
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.patches.norms import FLOAT32_NORMS, group_norm, layer_norm

Norm = Callable[..., Any]

# name -> (torch's, ours, the argument that says over what, weight's shape)
NORMS: dict[str, tuple[Norm, Norm, Any, tuple[int, ...]]] = {
    "layer": (F.layer_norm, layer_norm, (12,), (12,)),
    "layer over two dims": (F.layer_norm, layer_norm, (5, 12), (5, 12)),
    "group": (F.group_norm, group_norm, 4, (8,)),
}
SHAPE = (2, 8, 5, 12)


def normal(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arguments(name: str, affine: str) -> list[torch.Tensor | None]:
    *_, shape = NORMS[name]
    weight = normal(shape, 1) if "weight" in affine else None
    return [weight, normal(shape, 2) if "bias" in affine else None]


def ours(norm: Norm, x: torch.Tensor, over: Any, *args: Any, **options: Any) -> Any:
    given = [None if a is None else jnp.asarray(to_numpy(a)) for a in args]
    return to_torch(norm(jnp.asarray(to_numpy(x)), over, *given, **options))


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).abs().max())


@pytest.mark.parametrize("affine", ["", "weight", "bias", "weight and bias"])
@pytest.mark.parametrize("name", NORMS)
def test_float32_is_torchs_in_float32_and_float64(name: str, affine: str) -> None:
    theirs, mine, over, *_ = NORMS[name]
    args, x = arguments(name, affine), 3 * normal(SHAPE) + 1
    found = ours(mine, x, over, *args, eps=1e-6)
    assert found.dtype == torch.float32
    wide = [None if a is None else a.double() for a in args]
    tolerance = TOLERANCES["norm float32"]
    assert worst(found, theirs(x, over, *args, eps=1e-6)) < tolerance
    assert worst(found, theirs(x.double(), over, *wide, eps=1e-6)) < tolerance


@pytest.mark.parametrize("name", NORMS)
def test_bfloat16_inputs_have_float32_statistics(name: str) -> None:
    """Equal to float32 torch on the same values, rounded once at the end."""
    theirs, mine, over, *_ = NORMS[name]
    args, x = arguments(name, "weight and bias"), 3 * normal(SHAPE) + 20
    narrow = [None if a is None else a.bfloat16() for a in args]
    found = ours(mine, x.bfloat16(), over, *narrow, eps=1e-6)
    assert found.dtype == torch.bfloat16
    wide = [None if a is None else a.float() for a in narrow]
    expected = theirs(x.bfloat16().float(), over, *wide, eps=1e-6).bfloat16()
    # A tie of the last rounding may fall either way.
    differ = found != expected
    assert differ.float().mean() < 0.01
    spacing = torch.maximum(found.abs(), expected.abs()).float() * 2**-7
    assert ((found.float() - expected.float()).abs() <= spacing).all()


@pytest.mark.parametrize("name", NORMS)
def test_a_large_mean_costs_no_digits(name: str) -> None:
    theirs, mine, over, *_ = NORMS[name]
    x = normal(SHAPE) + 1000
    expected = theirs(x.double(), over)
    assert worst(ours(mine, x, over), expected) < TOLERANCES["norm float32 large mean"]
    # The one-pass variance, E[x^2] - E[x]^2, fails on the same input.
    flat = x.reshape(2, 4, -1) if name == "group" else x
    mean = flat.mean(-1, keepdim=True)
    one_pass = flat.square().mean(-1, keepdim=True) - mean.square()
    two_pass = (flat - mean).square().mean(-1, keepdim=True)
    assert float((one_pass - two_pass).abs().max()) > 0.01


def test_the_default_epsilons_are_torchs() -> None:
    """Inputs so small that the epsilon is what counts."""
    x = 1e-3 * normal(SHAPE)
    for theirs, mine, over, *_ in NORMS.values():
        assert worst(ours(mine, x, over), theirs(x, over)) < TOLERANCES["norm float32"]


def test_a_size_may_be_an_int_and_must_fit() -> None:
    x = jnp.ones((2, 12))
    assert layer_norm(x, 12).shape == (2, 12)
    with pytest.raises(ValueError, match=r"layer_norm over \(6,\) of an input of"):
        layer_norm(x, (6,))
    with pytest.raises(ValueError, match="12 channels in 5 groups"):
        group_norm(x, 5)


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        ("native_layer_norm", ([12],)),
        ("native_layer_norm", ([5, 12],)),
        ("native_group_norm", (2, 8, 60, 4)),
    ],
)
def test_the_aten_operators_give_their_statistics_too(operator: str, args: Any) -> None:
    x = 3 * normal(SHAPE) + 1
    call = getattr(torch.ops.aten, operator)
    group = operator == "native_group_norm"
    shape = (8,) if group else tuple(args[0])
    weight, bias = normal(shape, 1), normal(shape, 2)

    def arrange(x: Any, weight: Any, bias: Any) -> Any:
        if group:
            return call(x, weight, bias, *args, 1e-6)
        return call(x, *args, weight, bias, 1e-6)

    found = found_by(arrange, x, weight, bias, overrides=FLOAT32_NORMS)
    for mine, theirs in zip(found, arrange(x, weight, bias), strict=True):
        assert mine.shape == theirs.shape
        assert worst(mine, theirs) < TOLERANCES["norm float32"]


# --- the failure they cure

# Without FLOAT32_NORMS torchax rounds the statistics, and every product after them, to
# the dtype of the input. Of torch's root mean square norm it does not.
FAILING: dict[str, tuple[Callable[..., Any], int]] = {
    "torch.nn.functional.layer_norm": (
        lambda x, w, b: F.layer_norm(x, (12,), w, b),
        12,
    ),
    "torch.nn.functional.group_norm": (lambda x, w, b: F.group_norm(x, 4, w, b), 8),
    "torch.ops.aten.native_layer_norm": (
        lambda x, w, b: torch.ops.aten.native_layer_norm(x, [12], w, b, 1e-5)[0],
        12,
    ),
    "torch.ops.aten.native_group_norm": (
        lambda x, w, b: torch.ops.aten.native_group_norm(x, w, b, 2, 8, 60, 4, 1e-5)[0],
        8,
    ),
}


def compiled(make: Callable[..., Any], call: Any, *tensors: torch.Tensor) -> Any:
    runtime = model_runtime(mesh=None, platform="cpu", overrides=FLOAT32_NORMS)
    if make is by_torchax:
        # What a traced block leaves behind is torchax's own.
        with runtime.tracing():
            pass
    function = jax.jit(make(runtime, call))
    return to_torch(function(*(jnp.asarray(to_numpy(t)) for t in tensors)))


@pytest.mark.parametrize("mean", [20.0, 1000.0])
@pytest.mark.parametrize("target", FAILING)
def test_bfloat16_norms_lose_nothing_and_without_the_overrides_much(
    target: str, mean: float
) -> None:
    call, size = FAILING[target]
    assert any(target in override.targets for override in FLOAT32_NORMS)
    x = (4 * normal(SHAPE) + mean).bfloat16()
    weight, bias = torch.ones(size).bfloat16(), torch.zeros(size).bfloat16()
    expected = call(x.float(), weight.float(), bias.float())

    def error(found: torch.Tensor) -> float:
        return float((found.float() - expected).square().mean().sqrt())

    # What is left is the rounding of the result; a tie of it may fall either way.
    rounding = error(expected.bfloat16())
    assert error(compiled(traced, call, x, weight, bias)) < 1.05 * rounding
    assert error(compiled(by_torchax, call, x, weight, bias)) > 3 * rounding


@pytest.mark.parametrize("target", FAILING)
def test_the_dtype_is_the_inputs_and_without_the_overrides_the_weights(
    target: str,
) -> None:
    call, size = FAILING[target]
    x, weight, bias = normal(SHAPE).bfloat16(), torch.ones(size), torch.zeros(size)
    assert call(x, weight, bias).dtype == torch.bfloat16
    assert compiled(traced, call, x, weight, bias).dtype == torch.bfloat16
    assert compiled(by_torchax, call, x, weight, bias).dtype == torch.float32
