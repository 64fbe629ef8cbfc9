"""Weights of stacked blocks held in parts, and gathered block by block."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import tpuport
from tests.models.cogvideox.test_components import transformer_inputs
from tests.models.conftest import make_transformer
from tests.models.ported import entry_of
from tests.tolerances import TOLERANCES
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights.gathering import gathered, undivided
from tpuport.core.weights.sharding import ShardRule, WeightInfo, plan_sharding

STACKED = "transformer_blocks.*.ff.net.0.proj.weight"


@torch.no_grad()
@pytest.mark.parametrize("blocks", ["native", "upstream"])
@pytest.mark.parametrize(
    ("mesh", "parts"), [("sp=4", 4), ("dp=2", 2), ("dp=2,sp=2,tp=2", 4)]
)
def test_gathered_weights_give_the_same(mesh: str, parts: int, blocks: str) -> None:
    module, inputs = make_transformer("5b"), transformer_inputs("5b", 2)
    whole = tpuport.port(module, mesh=mesh, blocks=blocks)
    program = tpuport.port(module, mesh=mesh, sharding="gathered", blocks=blocks)
    found, expected = program(**inputs).sample, module(**inputs).sample
    assert float((found - expected).abs().max()) <= TOLERANCES["component float32"]
    entry = entry_of(program)
    assert entry._weights is not None
    array = entry._weights[STACKED]
    assert array.addressable_shards[0].data.size == array.size // parts
    whole(**inputs)
    assert entry.bytes_per_device < entry_of(whole).bytes_per_device
    held = sum(w.addressable_shards[0].data.nbytes for w in entry._weights.values())
    assert held == entry.bytes_per_device


def planned(mesh: str, room: float, layout: str = "default") -> Any:
    """A plan of two stacked blocks, of 64 MiB each, and 8 MiB beside them."""
    sizes = {"dp": 1, "sp": 1, "tp": 1}
    sizes |= {k: int(v) for k, v in (part.split("=") for part in mesh.split(","))}
    weights = {f"blocks.{i}.weight": WeightInfo((4096, 8192), 2) for i in range(2)} | {
        f"blocks.{i}.bias": WeightInfo((4096,), 2) for i in range(2)
    }
    weights["last.weight"] = WeightInfo((1024, 4096), 2)
    rules = [
        ShardRule(pattern=r"blocks\.\d+\.weight", spec=(None, "tp")),
        ShardRule(pattern=r"blocks\.\d+\.bias|last\.weight", spec=()),
    ]
    plan = plan_sharding(rules, weights, sizes, component="tower")
    module = Tower()
    return gathered(
        replace(plan, layout=layout),
        PortedModule(module, None, ("blocks",)),
        weights,
        room=room,  # type: ignore[arg-type]
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
    # What is whole although it is too much is told, where an axis could have parts.
    told = undivided(plan, room=room * MIB)
    whole = spec is None and plan.bytes_per_device > room * MIB
    assert bool(told) == (whole and "sp" in mesh)
    assert ("divides by sp=3; " in told) == (mesh == "sp=3")


def test_the_layout_gathers_what_would_fit() -> None:
    plan = planned("dp=2,sp=4", 1e12, "gathered")
    assert plan.gathered_over == ("sp",)
    assert plan.gathered_bytes_per_device == 128 * MIB * 3 // 4
    whole = planned("dp=2,sp=4", 1e12)
    assert whole.bytes_per_device - plan.bytes_per_device == 96 * MIB
    assert any("2 weights in parts over sp" in line for line in plan.remarks())
    assert plan.as_dict()["gathered"]["weights"] == 2


@torch.no_grad()
def test_a_block_is_gathered_when_its_turn_comes() -> None:
    module, inputs = make_transformer("5b"), transformer_inputs("5b", 2)
    program = tpuport.port(module, mesh="sp=4", sharding="gathered")
    assert program(**inputs).sample.isfinite().all()  # a call waits until it is read
    entry = entry_of(program)
    (made,) = entry.programs
    (compiled,) = made.runs.values()
    text = compiled.as_text()
    assert entry._weights is not None
    stack = entry._weights[STACKED].shape
    gathers = re.findall(r"= f32\[([\d,]+)\][^\n]* all-gather\(", text)
    shapes = {tuple(int(n) for n in dims.split(",")) for dims in gathers}
    # One block's weight, with or without its leading dim; never all of them.
    assert stack[1:] in shapes or (1, *stack[1:]) in shapes
    assert stack not in shapes
