"""EXCHANGED_ATTENTION: what torchax does without the override.

What it computes is tested in ``tests/core``.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

import jax
import pytest
import torch

from tests.patches.tools import by_torchax, model_runtime, traced
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.layers.exchanged_attention import EXCHANGED_ATTENTION

TOLERANCE = TOLERANCES["attention torch float32"]


def operator(target: str) -> Callable[..., torch.Tensor]:
    """A torch function by the name that an override claims."""
    found: Callable[..., torch.Tensor] = resolve_name(target)
    return found


@pytest.mark.parametrize("target", EXCHANGED_ATTENTION.targets)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_row_without_a_key_is_zero_as_in_torch_and_nan_by_torchax(
    batch: int, kind: str, target: str
) -> None:
    """When the last line fails, torchax is mended: the override is for speed alone."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, 2, 5, 8, generator=generator) for _ in range(3))
    mask = torch.rand(5, 5, generator=generator) < 0.7
    mask[2] = False
    if kind == "float":
        mask = torch.zeros(5, 5).masked_fill(~mask, -torch.inf)
    sdpa = operator(target)
    expected = sdpa(q, k, v, mask)
    assert torch.equal(expected[:, :, 2], torch.zeros(batch, 2, 8))

    runtime = model_runtime(mesh=None, platform="cpu")
    arrays = [to_numpy(x) for x in (q, k, v, mask)]
    found = to_torch(jax.jit(traced(runtime, sdpa))(*arrays))
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)

    # Outside of the block torchax's own is back, with its fault.
    found = to_torch(jax.jit(by_torchax(runtime, sdpa))(*arrays))
    rows = [0, 1, 3, 4]
    torch.testing.assert_close(
        found[:, :, rows], expected[:, :, rows], rtol=0, atol=TOLERANCE
    )
    assert found[:, :, 2].isnan().all()
