"""Alike blocks are found without a declaration, and run under one scan."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import pytest
import torch

import tpuport
from tpuport.core.seam.blocks import alike_blocks
from tpuport.core.seam.ported import seam_of


class Block(torch.nn.Module):
    def __init__(self, width: int = 4, index: int | None = None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        if index is not None:
            self.layer_idx = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Other(Block):
    pass


class Numbered(Block):
    """Has a number that forward does not read, and a number that forward reads."""

    def __init__(self, place: int, power: int = 1) -> None:
        super().__init__()
        self.place = place
        self.power = power

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) ** self.power


class Scaled(Block):
    """Reads its number by a property alone."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.turns = turns

    @functools.cached_property
    def scale(self) -> int:
        return self.turns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Model(torch.nn.Module):
    def __init__(self, blocks: list[torch.nn.Module]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within 1e-6 of the largest value: scaled blocks reach 10."""
    bound = 1e-6 * max(1.0, expected.abs().max().item())
    return bool(torch.allclose(found, expected, rtol=0, atol=bound))


class Noting(Block):
    """Notes its output in a list that it is given."""

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        x = super().forward(x)
        seen.append(x)
        return x


class Summing(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, seen)
        return torch.stack(seen).sum(0)


def with_attribute(**values: object) -> Block:
    block = Block()
    for name, value in values.items():
        setattr(block, name, value)
    return block


CASES = {
    "all": ([Block(), Block(), Block()], [(0, 3, 1)]),
    "read by a property": ([Scaled(1), Scaled(3), Scaled(2)], []),
    "numbered": ([Block(index=0), Block(index=1)], [(0, 2, 1)]),
    "another first": ([Other(), Block(), Block()], [(1, 2, 1)]),
    "another last": ([Block(), Block(), Block(), Other()], [(0, 3, 1)]),
    "unread": ([Numbered(3), Numbered(4)], [(0, 2, 1)]),
    "read": ([Numbered(3, 1), Numbered(4, 2)], []),
    "two kinds": (
        [Block(), Block(), Other(), Other(), Block()],
        [(0, 2, 1), (2, 2, 1)],
    ),
    "in turn": ([Block(), Other(), Block(), Other()], [(0, 4, 2)]),
    "three in turn": (
        [Block(), Block(), Other(), Block(), Block(), Other()],
        [(0, 6, 3)],
    ),
    "in turn after two": (
        [Block(), Block(), Other(), Block(), Other(), Block()],
        [(0, 2, 1), (2, 4, 2)],
    ),
    "one": ([Block()], []),
    "lambdas of one line": (
        [with_attribute(rule=(lambda x: x + 1)) for _ in range(2)],
        [(0, 2, 1)],
    ),
    "another shape": (
        [with_attribute(more=torch.nn.Parameter(torch.ones(n))) for n in (1, 2)],
        [],
    ),
    "another object": (
        [with_attribute(inner=types.SimpleNamespace(a=n)) for n in (1, 1, 2)],
        [(0, 2, 1)],
    ),
    "another function": (
        [with_attribute(rule=functools.partial(max, n)) for n in range(2)],
        [],
    ),
    "another part": ([Block(), with_attribute(more=torch.nn.Identity())], []),
    "all others": ([Block(), Other()], []),
}


@pytest.mark.parametrize("name", CASES)
def test_runs_of_alike_blocks_are_found(name: str) -> None:
    blocks, expected = CASES[name]
    model = Model(list(blocks))
    found = [(s.first, len(s.blocks), s.period) for s in alike_blocks(model)]
    assert found == expected
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    ported = tpuport.port(model)
    assert close(ported(x), model(x))
    (entry,) = seam_of(ported).entries.values()
    firsts = {run[0] + turn for run in expected for turn in range(run[2])}
    stacked = {f"blocks.{first or ''}*.linear.weight" for first in firsts}
    assert {name for name in entry._structs if "*.linear.weight" in name} == stacked


def sharing_a_weight() -> Model:
    model = Model([Block() for _ in range(3)])
    model.blocks[1].linear.weight = model.blocks[0].linear.weight
    return model


@pytest.mark.parametrize(
    "make",
    [sharing_a_weight, lambda: Summing([Noting(), Noting(), Noting()])],
    ids=["a shared weight", "a loop that is no scan"],
)
def test_blocks_that_are_no_stack_run_one_by_one(make: Callable[[], Model]) -> None:
    model = make()
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    ported = tpuport.port(model)
    assert close(ported(x), model(x))
    (entry,) = seam_of(ported).entries.values()
    assert entry._blocks == ()
    assert "blocks.0.linear.weight" in entry._structs


class Adding(Block):
    """Takes one more argument than a block."""

    def forward(self, x: torch.Tensor, y: float) -> torch.Tensor:
        return super().forward(x) + y


class Injecting(Model):
    """Every third block is given another number than the third before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            more = (float(index),) if isinstance(block, Adding) else ()
            x = block(x, *more)
        return x


def test_turns_that_are_no_scan_become_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tpuport.core.tracing.block_scan.MOST_BREAKS", 0)
    kinds = (Block, Block, Adding) * 2
    model = Injecting([kind() for kind in kinds])
    assert [stack.period for stack in alike_blocks(model)] == [3]
    x = torch.linspace(-1, 1, 8).reshape(2, 4)
    ported = tpuport.port(model)
    assert torch.allclose(ported(x), model(x), rtol=0, atol=1e-5)
    (entry,) = seam_of(ported).entries.values()
    assert entry._blocks is not None
    assert [(s.first, len(s.blocks)) for s in entry._blocks] == [(0, 2), (3, 2)]


class Widening(Block):
    """In bfloat16 it returns float32, as blocks of T5 do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x.to(self.linear.weight.dtype)).float()


def test_a_first_block_that_widens_the_dtype_is_left_out_of_the_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tpuport.core.tracing.block_scan.MOST_BREAKS", 0)
    torch.manual_seed(0)
    module = Model([Widening() for _ in range(4)]).bfloat16()
    ported = tpuport.port(module)
    x = torch.linspace(-1, 1, 12).reshape(3, 4).bfloat16()
    # Each of four products is rounded to 8 bits.
    torch.testing.assert_close(ported(x), module(x), rtol=0, atol=4 * 2**-8)
    (entry,) = seam_of(ported).entries.values()
    assert entry._blocks is not None
    (stack,) = entry._blocks
    assert (stack.first, len(stack.blocks)) == (1, 3)
