"""What float32 is worth in torch code is measured in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from tpuport.core.drive.rounding import (
    LEAST,
    MOST,
    MOVED,
    Measured,
    arrays,
    bounds,
    comparable,
    difference,
    exactly,
    furthest,
    in_float64,
    measured,
    wide,
)


class Casts(torch.nn.Module):
    """Casts to float32 on the way, and makes tensors in float32, as upstream does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv3d(2, 2, 1)
        self.table = torch.linspace(0, 1, 4)

    def forward(self, x: torch.Tensor, steps: list[torch.Tensor]) -> torch.Tensor:
        freqs = torch.exp(-torch.arange(4, dtype=torch.float32) * self.table)
        x = self.conv(x).to(torch.float32)
        return x * torch.cos(steps[0].float() * freqs) + torch.randn(4)


def test_casts_to_float32_are_left_out_and_random_numbers_are_the_same() -> None:
    torch.manual_seed(0)
    module, x = Casts(), torch.randn(1, 2, 1, 1, 4)
    steps, state = [torch.tensor(999.0)], torch.get_rng_state()
    given = wide((x, steps))
    assert given[0].dtype == given[1][0].dtype == torch.float64
    twin = in_float64(module)
    (found,) = exactly(lambda: twin(*given))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert next(module.parameters()).dtype == torch.float32
    weight, bias = (p.detach().double().numpy() for p in module.conv.parameters())
    freqs = np.exp(-np.arange(4) * module.table.double().numpy())
    sums = np.einsum("oi,nizyx->nozyx", weight[..., 0, 0, 0], x.double().numpy())
    drawn = torch.randn(4).double().numpy()
    truth = (sums + bias[:, None, None, None]) * np.cos(999.0 * freqs) + drawn
    assert np.abs(found - truth).max() < 1e-14
    torch.set_rng_state(state)
    assert 1e-7 < difference([module(x, steps).detach().numpy()], [found]) < MOST


@pytest.mark.parametrize(
    ("rounding", "allowed"),
    [(0.0, LEAST), (1e-6, 8e-6), (1e-3, MOST), (float("nan"), MOST)],
)
def test_a_port_may_be_a_few_times_as_far_off(rounding: float, allowed: float) -> None:
    float32, exact = np.array([1.0 + rounding]), np.ones(1)
    assert bounds([float32], Measured([exact])) == [pytest.approx(allowed, rel=1e-5)]


def test_differences_count_shapes_and_nans() -> None:
    one, nan = np.ones((2, 3), np.float32), np.full((2, 3), np.nan, np.float32)
    assert difference([one], [one]) == difference([nan], [nan]) == 0
    assert difference([one], [nan]) == difference([one], [one[:1]]) == float("inf")
    assert difference([one * 100], [one * 101]) == pytest.approx(1 / 101)


def draws() -> list[torch.Tensor]:
    like = torch.linspace(0, 1, 5)
    index = torch.randint(0, 5, (3,))
    ints = torch.randint_like(index, 9), torch.randperm(5), torch.rand_like(like)
    some = torch.randn(2, dtype=like.dtype), torch.randint(9, (2,), dtype=like.dtype)
    return [*ints, *some, torch.randn(2, dtype=torch.bfloat16), like[index]]


def test_random_numbers_are_of_the_type_that_the_code_asks_for() -> None:
    torch.manual_seed(0)
    exact = exactly(draws)
    found = draws()
    assert difference(arrays(found), exact) < LEAST
    assert found[-1].dtype == torch.float32


def test_code_that_does_not_run_in_float64_is_not_measured() -> None:
    def run(module: Any, own: Any) -> torch.Tensor:
        x = module(own(torch.ones(1, 4)))
        assert x.dtype == torch.float32
        return x

    linear = torch.nn.Linear(4, 4)
    assert measured(run, linear) is None
    assert torch.get_default_dtype() == torch.float32
    assert bounds(arrays(run(linear, torch.clone)), None) == [MOST]


def test_each_tensor_has_a_bound_of_its_own() -> None:
    one, right = np.ones(3, np.float32), [np.ones(3), np.ones(3)]
    allowed = bounds([one + 1e-5, one], Measured(right))
    assert allowed == [pytest.approx(8e-5, rel=1e-2), LEAST]
    assert furthest([one + 1e-5, one + 1e-5], right, allowed) == (
        pytest.approx(1e-5, rel=1e-2),
        LEAST,
    )
    assert furthest([one], [], []) == (float("inf"), LEAST)


def test_differences_are_shares_of_the_tensors_own_largest_value() -> None:
    small = torch.full((4,), 1e-5).numpy()
    assert difference([small * 1.02], [small]) == pytest.approx(0.02, rel=1e-3)
    zero = np.zeros(4, np.float32)
    assert difference([zero + 1e-8], [zero]) < LEAST
    # What is left of values that cancel is upstream's rounding, and the bound.
    left, other = np.float32([2e-8, -1e-7]), np.float32([1.5e-7, 3e-8])
    allowed = bounds([left], Measured([np.zeros(2)]))
    apart, most = furthest([other], [left], allowed)
    assert LEAST < apart < most


class Runs(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def _normed(x: jax.Array) -> jax.Array:
    return (x - x.mean()) * jax.lax.rsqrt(x.var() + 1e-5)


@pytest.mark.parametrize(
    ("function", "port", "size"),
    [
        (torch.sum, jnp.sum, 64),
        (torch.tanh, jnp.tanh, 4096),
        (functools.partial(torch.softmax, dim=0), jax.nn.softmax, 64),
        (torch.exp, jnp.exp, 64),
        (functional.silu, jax.nn.silu, 64),
        (functional.gelu, functools.partial(jax.nn.gelu, approximate=False), 64),
        (lambda x: functional.layer_norm(x, x.shape), _normed, 64),
    ],
)
def test_what_is_right_differs_by_less_whatever_the_numbers(
    function: Callable[..., Any], port: Callable[..., Any], size: int
) -> None:
    """Sums cancel, and upstream's may be nearly exact."""
    program, module = jax.jit(port), Runs(function)
    for seed in range(100):
        x = 4 * torch.randn(size, generator=torch.Generator().manual_seed(seed))
        expected = arrays(module(x))
        worth = measured(lambda one, own, x=x: one(own(x)), module)
        found = [np.asarray(program(x.numpy()))]
        apart, allowed = furthest(found, expected, bounds(expected, worth))
        assert apart <= allowed, seed
        assert allowed < MOST or function is torch.sum


def test_whole_numbers_do_not_move() -> None:
    x = torch.tensor([999.0, 0.0, 0.5, -0.3])
    kinds = []

    def same(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        kinds.append([one.dtype for one in given])
        return given

    worth = measured(lambda one, own: one(own((x, x[2:] * 1j))), Runs(same))
    assert worth is not None
    assert kinds[1:] == [[torch.float32, torch.complex64]] * MOVED
    for found, beside in worth.moved:
        assert (found == x.numpy()).tolist() == [True, True, False, False]
        assert difference([found], [x.numpy()]) < LEAST
        assert (beside[:, 0] == 0).all()
        assert (beside[:, 1] != x[2:].numpy()).all()


def test_imaginary_parts_count() -> None:
    right, wrong = torch.tensor([2 + 4j]), torch.tensor([2 + 6j])
    assert difference(arrays(wrong), arrays(right)) == pytest.approx(0.5)
    assert difference([wrong.numpy()], [right.numpy()]) > 0.4
    (exact,) = exactly(lambda: torch.tensor([1.0]) * right.conj())
    assert exact.tolist() == [[2.0, -4.0]]


def test_what_can_be_compared_is_counted() -> None:
    nan, text = np.full(2, np.nan), np.array(["a"])
    assert comparable([np.ones(2), nan, text, np.ones(0), np.ones(1, bool)]) == 2
