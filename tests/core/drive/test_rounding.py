"""What float32 is worth in torch code is measured in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tpuport.core.drive.rounding import (
    LEAST,
    MOST,
    bound,
    difference,
    exactly,
    in_float64,
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
    assert bound([float32], [exact]) == pytest.approx(allowed, rel=1e-6)


def test_differences_count_shapes_and_nans() -> None:
    one, nan = np.ones((2, 3), np.float32), np.full((2, 3), np.nan, np.float32)
    assert difference([one], [one]) == difference([nan], [nan]) == 0
    assert difference([one], [nan]) == difference([one], [one[:1]]) == float("inf")
    assert difference([one * 100], [one * 101]) == pytest.approx(1 / 101)
