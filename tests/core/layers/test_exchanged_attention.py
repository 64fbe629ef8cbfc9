"""Attention of whole arrays on a mesh, with masks, against torch."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.patches.tools import model_runtime, traced
from tests.tolerances import TOLERANCES
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec

#: Keys of any pattern, no prefix.
SEEN = torch.arange(37) % 3 != 1
MASKS = {
    "bool": SEEN[None, None, None],
    "of two dims": SEEN[None],
    "of each item": torch.stack([SEEN, ~SEEN])[:, None, None],
    "a large summand": torch.where(SEEN, 0.0, -10000.0)[None, None, None],
    "of each head": torch.linspace(-3, 3, 2 * 37).reshape(1, 2, 1, 37),
}


def attend(*arrays: Any) -> Any:
    return F.scaled_dot_product_attention(*arrays)


@pytest.mark.parametrize("devices", ["sp=3", "dp=2,sp=2,tp=2"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_of_keys_leaves_tokens_exchanged_for_heads(
    mask: str, devices: str
) -> None:
    q, k, v = torch.randn(3, 2, 2, 37, 8, generator=torch.Generator().manual_seed(0))
    runtime = model_runtime(
        mesh=build_mesh(MeshSpec.parse(devices)),
        platform="cpu",
    )

    found = jax.jit(traced(runtime, attend))(
        *(x.numpy() for x in (q, k, v, MASKS[mask]))
    )
    expected = F.scaled_dot_product_attention(q, k, v, MASKS[mask])
    worst = float(np.abs(np.asarray(found) - expected.numpy()).max())
    assert worst < TOLERANCES["attention float32"]
    # Noted with padding: no call of plain attention, whose keys are all gathered.
    assert all(record.padded for record in runtime.records)


def test_a_row_without_a_key_is_zero() -> None:
    q = torch.ones(1, 2, 6, 8)
    runtime = model_runtime(
        mesh=build_mesh(MeshSpec.parse("sp=2")),
        platform="cpu",
    )
    call = jax.jit(traced(runtime, attend))
    for mask in (np.zeros((1, 1, 1, 6), bool), np.full((1, 1, 1, 6), -np.inf, "f")):
        assert not np.asarray(call(*(q.numpy(),) * 3, mask)).any()
