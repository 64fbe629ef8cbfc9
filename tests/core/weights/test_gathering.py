"""Weights of stacked blocks held in parts, and gathered block by block."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import ShapeDtypeStruct

import tpuport
from tests.core.tracing.test_forward_split import Plain, given
from tests.tolerances import TOLERANCES
from tpuport.core.seam import module_weights
from tpuport.core.seam.entry import Entry
from tpuport.core.seam.ported import seam_of
from tpuport.core.tracing.block_stacks import Stack
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights import gathering
from tpuport.core.weights.gathering import gathered
from tpuport.core.weights.sharding import ShardRule, plan_sharding

STACKED = "model.transformer_blocks.*.ff.net.0.proj.weight"


def entry_of(ported: torch.nn.Module) -> Entry:
    return seam_of(ported).entries["Plain"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("mesh", "parts", "sharding"),
    [("sp=4", 4, "default"), ("dp=2", 2, "gathered"), ("dp=2,sp=2", 4, "default")],
)
def test_gathered_weights_give_the_same(
    mesh: str, parts: int, sharding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sharding == "default":  # no device has room
        monkeypatch.setattr(module_weights, "room_for_weights", lambda devices: 0)
    monkeypatch.setattr(gathering, "SMALLEST", 1)
    module = Plain()
    inputs = [torch.from_numpy(np.array(x)) for x in given()]
    program = tpuport.port(module, mesh=mesh, sharding=sharding)
    found, expected = program(*inputs), module(*inputs)
    assert float((found - expected).abs().max()) <= TOLERANCES["component float32"]
    entry: Any = entry_of(program)
    assert entry._weights is not None
    array = entry._weights[STACKED]
    assert array.addressable_shards[0].data.size == array.size // parts
    assert entry.plan is not None
    held = sum(
        array.addressable_shards[0].data.nbytes
        for name, array in entry._weights.items()
        if entry._ported.arrays[name][0] in entry.plan.assignments
    )
    assert held == entry.bytes_per_device
    # One block's weight is gathered at a time, never all of them.
    (made,) = entry.programs
    (compiled,) = made.runs.values()
    gathers = re.findall(r"= f32\[([\d,]+)\][^\n]* all-gather\(", compiled.as_text())
    shapes = {tuple(int(n) for n in dims.split(",")) for dims in gathers}
    assert array.shape[1:] in shapes or (1, *array.shape[1:]) in shapes
    assert array.shape not in shapes


def planned(mesh: str, room: float, *within: str) -> Any:
    """A plan of two stacked blocks, of 64 MiB each, and 8 MiB beside them."""
    sizes = {"dp": 1, "sp": 1, "tp": 1}
    sizes |= {k: int(v) for k, v in (part.split("=") for part in mesh.split(","))}
    weights = {
        f"blocks.{i}.weight": ShapeDtypeStruct((4096, 8192), jnp.bfloat16)
        for i in range(2)
    } | {f"blocks.{i}.bias": ShapeDtypeStruct((4096,), jnp.bfloat16) for i in range(2)}
    weights["last.weight"] = ShapeDtypeStruct((1024, 4096), jnp.bfloat16)
    rules = [
        ShardRule(pattern=r"blocks\.\d+\.weight", spec=(None, "tp")),
        ShardRule(pattern=r"blocks\.\d+\.bias|last\.weight", spec=()),
    ]
    plan = plan_sharding(rules, weights, sizes, component="tower")
    module = Tower()
    return gathered(
        plan,
        PortedModule(module, None, (Stack("blocks", 0, tuple(module.blocks)),)),
        weights,
        room=room,  # type: ignore[arg-type]
        within=within or [axis for axis, size in sizes.items() if size > 1],
    )


class Tower(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            blocks = [torch.nn.Linear(8192, 4096) for _ in range(2)]
            self.blocks = torch.nn.ModuleList(blocks)
            self.last = torch.nn.Linear(4096, 1024, bias=False)


MIB = 2**20


@pytest.mark.parametrize(
    ("mesh", "room", "over", "spec"),
    [
        ("sp=4", 200, (), None),
        ("sp=4", 100, ("sp",), (("sp",), "tp")),
        ("dp=2,sp=4", 100, ("sp",), (("sp",), "tp")),
        # Two parts of 128 MiB and the rest do not fit, eight do.
        ("dp=4,sp=2", 30, ("dp", "sp"), (("dp", "sp"), "tp")),
        # They do not fit either: the most parts there are.
        ("dp=2,sp=4", 5, ("dp", "sp"), (("dp", "sp"), "tp")),
        ("dp=2", 100, ("dp",), (("dp",), "tp")),
        ("sp=2,tp=2", 50, ("sp",), (("sp",), "tp")),
        ("tp=4", 10, (), None),
        # Three does not divide the rows or the columns.
        ("sp=3", 10, (), None),
    ],
)
def test_parts_are_as_many_as_needed(
    mesh: str, room: float, over: tuple[str, ...], spec: Any
) -> None:
    plan = planned(mesh, room * MIB)
    assert plan.gathered_over == over
    assert plan.held.get("blocks.1.weight") == spec
    assert "blocks.1.bias" not in plan.held
    assert "last.weight" not in plan.held
    whole = planned(mesh, 1e12).bytes_per_device
    assert whole - plan.bytes_per_device == plan.gathered_bytes_per_device
    assert any("weights in parts over" in line for line in plan.remarks()) == bool(over)
    assert plan.as_dict()["gathered"]["weights"] == (2 if over else 0)


def test_no_weight_has_parts_on_several_slices() -> None:
    assert planned("dp=4,sp=2", 30 * MIB, "sp").gathered_over == ("sp",)
    assert planned("dp=4", 30 * MIB, "sp").gathered_over == ()


class Encoder(torch.nn.Module):
    """A table of which a lookup and a product take the rows, and a narrow one."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = torch.nn.Embedding(96, 32)
        self.same = torch.nn.Embedding(96, 32)
        self.same.weight = self.shared.weight
        self.odd = torch.nn.Embedding(96, 30)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.shared(ids) + self.same(ids + 1)
        scores = torch.nn.functional.linear(rows, self.shared.weight)
        return scores.sum(-1) + self.odd(ids).sum(-1)


class Denoiser(Encoder):
    def forward(self, ids: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + timestep


@torch.no_grad()
def test_each_device_holds_some_features_of_a_large_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module_weights, "LEAST_TABLE", 96 * 30 * 4)
    ids = torch.arange(24).reshape(2, 12)
    encoder, denoiser = Encoder(), Denoiser()
    ported = tpuport.port(encoder, mesh="dp=2,sp=2,tp=2")
    found, expected = ported(ids), encoder(ids)
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error <= TOLERANCES["component float32"]
    plan = seam_of(ported).entries["Encoder"].plan
    assert plan is not None
    assert plan.assignments == {"shared.weight": (None, ("dp", "sp")), "odd.weight": ()}
    assert plan.bytes_per_device == 96 * 4 * (32 / 4 + 30)
    # A denoiser looks rows up each step.
    ported = tpuport.port(denoiser, mesh="dp=2,sp=2,tp=2")
    ported(ids, torch.ones(()))
    plan = seam_of(ported).entries["Denoiser"].plan
    assert plan is not None
    assert set(plan.assignments.values()) == {()}
