"""Expressions of constants are torch's, bit for bit; all else stays in the program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from diffusers.models.embeddings import Timesteps

from tests.patches.tools import apply, model_runtime
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.tracing.patching import Patch
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.patches.constants import CONSTANTS, MOST, MOST_WHOLE

TIMES = torch.tensor([37.0, 1000.0, 6000.0])


class Calls(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def compiled(module: torch.nn.Module, *patches: Patch) -> Callable[..., Any]:
    """The module's forward as a program."""
    runtime = model_runtime(mesh=None, platform="cpu", patches=patches)
    return jax.jit(functools.partial(apply, PortedModule(module, runtime), {}))


def error(module: torch.nn.Module, *patches: Patch) -> float:
    """Largest difference of the program from torch's result."""
    found = compiled(module, *patches)(to_numpy(TIMES))
    return float((to_torch(found) - module(TIMES)).abs().max())


def test_a_compiler_rounds_the_frequencies() -> None:
    """What torch-constants cures: a guidance of 6000 shows it."""
    module = Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=0)
    assert error(module, CONSTANTS) <= 1e-6
    assert error(module) > 1e-4


def wide(x: torch.Tensor) -> torch.Tensor:
    steps = torch.linspace(0.0, 1.0, 64, dtype=torch.float64, device=x.device)
    return x[:, None] * (1e4**steps * math.pi).float()


def written(x: torch.Tensor) -> torch.Tensor:
    made = torch.arange(3.0, device=x.device)
    made[1:] = x[1:]
    made.mul_(2.0)
    return made.exp() + torch.exp(torch.arange(3, device=x.device))


def viewed(x: torch.Tensor) -> torch.Tensor:
    made = torch.arange(6.0, device=x.device)
    made[::2] += 1.0
    return made.cos()[:3] * x


def read(x: torch.Tensor) -> torch.Tensor:
    made = torch.arange(4, device=x.device)
    return x * (made + 1).sum().item() + made.nonzero().shape[0]


def counted(x: torch.Tensor) -> torch.Tensor:
    made = torch.arange(2 * MOST_WHOLE, device=x.device) * 3
    far = made > 300
    rows = x[:, None] * torch.ones(2 * MOST_WHOLE, device=x.device)
    kept = rows[:, far].sum() * far.nonzero().sum()
    made[2:] = 0
    return kept * made.sum()


@pytest.mark.parametrize("function", [wide, written, viewed, read, counted])
def test_results_are_torchs(function: Callable[..., Any]) -> None:
    module = Calls(lambda x: function(x / 1000))
    expected = module(TIMES)
    assert error(module, CONSTANTS) <= 1e-6 * float(expected.abs().max())


def literals(function: Callable[[torch.Tensor], Any]) -> int:
    """Elements of all literals in the program of a function of positions."""
    program = compiled(Calls(function), CONSTANTS).trace(to_numpy(TIMES)).jaxpr
    return sum(x.size for x in program.consts)


def test_a_large_constant_is_computed_by_the_program() -> None:
    def made(x: torch.Tensor, size: int) -> torch.Tensor:
        return torch.arange(size, device=x.device).exp()

    assert literals(lambda x: made(x, MOST)) == MOST
    assert literals(lambda x: made(x, MOST + 1)) == 0


def test_the_program_computes_many_whole_numbers() -> None:
    def positions(x: torch.Tensor, size: int) -> torch.Tensor:
        made = torch.arange(size, device=x.device) + 1
        return (made[None, :] < x[:, None]) & (made > 3)

    def frequencies(x: torch.Tensor) -> torch.Tensor:
        return (torch.arange(2 * MOST_WHOLE, device=x.device) + 1).exp()

    assert literals(lambda x: positions(x, MOST_WHOLE)) == 2 * MOST_WHOLE
    assert literals(lambda x: positions(x, MOST_WHOLE + 1)) == 0
    assert literals(frequencies) == 2 * MOST_WHOLE
