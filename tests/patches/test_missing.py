"""Operators that torchax has not; slices as torch cuts them and writes to them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from tests.patches.tools import found_by, model_runtime, traced
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.patches.diffusers import CHOSEN_EXPERTS, chosen_experts
from tpuport.patches.missing import GELU_ROUNDED_ONCE, MISSING
from tpuport.patches.torchax_slices import SLICE_ASSIGNMENT, VIEW_ARRAY, VIEW_BOUNDS

X = torch.linspace(-1.0, 2.0, 48).reshape(4, 12)


def cut(x: torch.Tensor) -> torch.Tensor:
    lengths = torch.tensor([3, 5], device=x.device)
    return x[:, : lengths[1]].exp() @ x[:, lengths[0] : 8].mT


def written(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(x)
    made[1, 2:5] = x[:1, :3]
    made[2:] = x[None, :2]
    made[:, 3:][0] = x[None, 0, 3:]
    return made


def keywords(x: torch.Tensor) -> torch.Tensor:
    linear = torch.nn.functional.linear
    return linear(input=x, weight=x, bias=x[:, 0]) + linear(x, x)


def spectrum(x: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(8, device=x.device, dtype=x.dtype)
    other = torch.hamming_window(8, periodic=False, device=x.device)
    found = torch.stft(
        x, 8, 2, window=window * other, center=False, return_complex=True
    )
    return torch.view_as_real(found)


@pytest.mark.parametrize("function", [cut, written, keywords, spectrum])
def test_it_is_torchs(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    runtime = model_runtime(
        mesh=None,
        platform="cpu",
        patches=(*SLICE_ASSIGNMENT, VIEW_BOUNDS),
        overrides=MISSING,
        matmul_precision="highest",
    )
    run = traced(runtime, function)
    if function is cut:  # a length that is known while tracing
        with jax.ensure_compile_time_eval():
            found = run(jnp.asarray(to_numpy(X)))
    else:
        found = jax.jit(run)(to_numpy(X))
    error = (to_torch(found) - function(X)).abs().max()
    assert error < TOLERANCES["module float32"]


def test_a_bound_is_asked_for_too_late_by_torchax() -> None:
    """What torchax-slice-bounds cures."""
    run = traced(model_runtime(mesh=None, platform="cpu"), cut)
    with jax.ensure_compile_time_eval(), pytest.raises(AssertionError, match="torchax"):
        run(jnp.asarray(to_numpy(X)))


def test_tokens_take_the_experts_that_they_chose() -> None:
    assert CHOSEN_EXPERTS.name == "hidream-experts"
    torch.manual_seed(0)
    experts = [torch.nn.Linear(12, 12) for _ in range(3)]
    chosen = torch.tensor([[0, 2], [1, 0], [2, 1], [2, 0]])
    shares = torch.rand(4, 2)
    found = chosen_experts(
        SimpleNamespace(experts=experts), X, chosen.view(-1), shares.view(-1, 1)
    )
    for token, row in enumerate(found):
        pairs = zip(chosen[token], shares[token], strict=True)
        torch.testing.assert_close(
            row, sum(share * experts[i](X[token]) for i, share in pairs)
        )


@pytest.mark.parametrize("given", [{}, {"dim": 1}, {"dim": (0, 1)}, {"dim": -1}])
def test_a_sum_has_the_dtype_that_was_asked_for(given: dict[str, Any]) -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        return torch.sum(x, dtype=torch.float32, **given)

    mask = torch.tensor([[True, False, True], [True, True, True]])
    halves = torch.full((1, 4096), 0.1).bfloat16()
    for x in (mask, halves):
        found, expected = found_by(total, x, overrides=MISSING), total(x)
        assert found.dtype == torch.float32
        rtol = TOLERANCES["module float32"]
        torch.testing.assert_close(found, expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_float32_are_asked_for_in_full(dtype: torch.dtype) -> None:
    """Beside weights in bfloat16 too: no setting of the runtime asks for them."""

    def products(x: torch.Tensor) -> torch.Tensor:
        rows = x[None] @ x.mT[None]
        return torch.nn.functional.linear(x, x) + torch.mm(x, x.mT) + rows[0]

    runtime = model_runtime(mesh=None, platform="cpu", overrides=MISSING)
    text = jax.jit(traced(runtime, products)).lower(to_numpy(X.to(dtype))).as_text()
    count = text.count("stablehlo.dot_general")
    in_full = text.count("precision = [HIGHEST, HIGHEST]")
    assert count == 3
    assert in_full == (count if dtype == torch.float32 else 0)


@pytest.mark.parametrize("values", [[True, True], [True, False]])
def test_all_true_is_known(values: list[bool]) -> None:
    call = torch.ops.aten._is_all_true
    assert bool(found_by(call, torch.tensor(values), overrides=MISSING)) is all(values)


def test_a_slice_is_indexed_by_a_list() -> None:
    assert VIEW_ARRAY.name == "torchax-view-array"
    found = found_by(lambda x: x[1:][[0, -1]], X, patches=(VIEW_ARRAY,))
    assert torch.equal(found, X[1:][[0, -1]])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_as_exact_as_torchs_where_torchaxs_is_not(approximate: str) -> None:
    """In bfloat16, op by op: a compiler may keep more digits than torchax asks for."""
    gelu = functools.partial(torch.nn.functional.gelu, approximate=approximate)
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 3
    low = x.to(torch.bfloat16)

    def error(found: torch.Tensor) -> float:
        assert found.dtype == torch.bfloat16
        return float((found.double() - gelu(low.double())).abs().mean())

    found, torchaxs = (
        found_by(gelu, low, overrides=overrides)
        for overrides in ((GELU_ROUNDED_ONCE,), ())
    )
    assert error(found) < 1.001 * error(gelu(low))
    assert error(torchaxs) > 1.1 * error(gelu(low))
