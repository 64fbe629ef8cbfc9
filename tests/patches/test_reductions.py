"""Sums and checks as torch has them; slices that are read like tensors."""

from __future__ import annotations

import jax.numpy as jnp
import torch

from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.patches.reductions import REDUCTIONS
from tpuport.patches.torchax_slices import VIEW_ARRAY


def test_a_sum_has_the_dtype_that_was_asked_for() -> None:
    runtime = model_runtime(mesh=None, platform="cpu", overrides=REDUCTIONS)
    mask = torch.tensor([[True, False, True], [True, True, True]])
    with runtime.tracing() as env:
        x = env.j2t_iso(jnp.asarray(to_numpy(mask)))
        for dim in (None, 1, (0, 1), -1):
            given = {} if dim is None else {"dim": dim}
            found = torch.sum(x, dtype=torch.float32, **given)
            expected = torch.sum(mask, dtype=torch.float32, **given)
            assert found.dtype == torch.float32
            assert torch.equal(to_torch(env.t2j_iso(found)), expected)
        halves = env.j2t_iso(jnp.full((4096,), 0.1, jnp.bfloat16))
        total = to_torch(env.t2j_iso(halves.sum(dtype=torch.float32)))
    expected = torch.full((4096,), 0.1).bfloat16().float().sum()
    assert abs(float(total / expected) - 1) < TOLERANCES["module float32"]


def test_all_true_is_known() -> None:
    runtime = model_runtime(mesh=None, platform="cpu", overrides=REDUCTIONS)
    with runtime.tracing() as env:
        for values in ([True, True], [True, False]):
            x = env.j2t_iso(jnp.asarray(values))
            found = torch.ops.aten._is_all_true(x)
            assert bool(env.t2j_iso(found)) is all(values)


def test_a_slice_is_indexed_by_a_list() -> None:
    assert VIEW_ARRAY.name == "torchax-view-array"
    runtime = model_runtime(mesh=None, platform="cpu", patches=(VIEW_ARRAY,))
    x = torch.arange(12.0).reshape(4, 3)
    with runtime.tracing() as env:
        found = env.j2t_iso(jnp.asarray(x.numpy()))[1:][[0, -1]]
        assert torch.equal(to_torch(env.t2j_iso(found)), x[1:][[0, -1]])
