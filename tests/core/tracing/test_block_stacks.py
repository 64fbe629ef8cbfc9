"""Identical blocks run as one loop like one by one.

The oracle is the same module in plain torch; the same module ported without stacks
gives the same to 1e-6.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.core.tracing.towers import (
    WIDTH,
    Block,
    Loop,
    Tower,
    arrays,
    call,
    captured,
    inputs_of,
    plain,
    port,
    resumed,
    scans,
    tower,
)
from tests.patches.tools import apply
from tests.sweeps import sweep
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.tracing.block_stacks import StackError
from tpuport.core.tracing.forward_split import ForwardSplit, Where

SPLIT = ForwardSplit(blocks=("blocks",), state=("x", "y"), head=("x",))


def with_keywords(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    tables = (torch.cos(cond)[:, None], x.mean(1, keepdim=True))
    for block in blocks:
        x, y = block(x=x, cond=cond, y=y, tables=tables, gain=0.25)
    return x, y


def reads_on_the_way(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    total = torch.zeros_like(x)
    for index, block in enumerate(blocks):
        x, y = block(x, y, cond)
        assert (x.ndim, x.dtype, x.size(-1)) == (3, torch.float32, WIDTH)
        if index % 2:
            total = total + x
    return x, y, total


def reads_afterwards(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    states = []
    for block in blocks:
        x, y = block(x, y, cond)
        states.append(x)
    return x, y, states[-2], states[0] * 2


def stops_early(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    for block in blocks[:-1]:
        x, y = block(x, y, cond)
    return x, y


def runs_twice(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    x, y = plain(blocks, x, y, cond)
    return plain(blocks[:-1], *plain(blocks, x, y, -cond), cond)


def looks_inside(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    x = x.to(blocks[1].linear.weight.dtype) + blocks[1].linear.bias
    return plain(blocks, x, y, cond)


def kinds_take_their_own(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    tables = (torch.cos(cond)[:, None], x.mean(1, keepdim=True))
    other = -cond
    for block in blocks:
        if block.processor.factor < 0.4:
            x, y = block(x, cond=other, y=y, gain=0.25)
        else:
            x, y = block(x, y, cond, tables=tables)
    return x, y


def each_has_its_own_condition(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    before = x
    for index, block in enumerate(blocks):
        before = x
        x, y = block(x, y, cond * (index // 2))
    return x, y, before


LOOPS: dict[str, Loop] = {
    f.__name__: f
    for f in (
        plain,
        with_keywords,
        reads_on_the_way,
        reads_afterwards,
        stops_early,
        runs_twice,
        looks_inside,
        each_has_its_own_condition,
    )
}


# --------------------------------------------------------------------- the same


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "count", "batch"),
    sweep(
        [
            *((name, 5, 2) for name in LOOPS),
            ("plain", 2, 1),
            ("reads_on_the_way", 2, 1),
            ("reads_afterwards", 2, 1),
            ("runs_twice", 2, 1),
        ],
        itertools.product(LOOPS, [2, 5], [1, 2]),
    ),
)
def test_it_is_torchs_function_and_the_unrolled_one(
    name: str, count: int, batch: int
) -> None:
    unrolled, torchs = largest(tower(LOOPS[name], count), batch)
    assert unrolled <= 1e-6
    assert torchs <= TOLERANCES["module float32"]


# ------------------------------------------------------ loops that are several scans


def calls_one_in_another_way(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    """As guidance does that skips a layer."""
    for index, block in enumerate(blocks):
        x, y = block(x, y, cond, **({"gain": 2.0} if index == 2 else {}))
    return x, y


def adds_to_the_state(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    for block in blocks:
        x, y = block(x, y, cond)
        x = x + 1
    return x, y


def writes_to_the_state(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    for block in blocks:
        x, y = block(x, y, cond)
        x += 1
    return x, y


def scales_by_the_index(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    for index, block in enumerate(blocks):
        x, y = block(x, y, cond, gain=float(index))
    return x, y


def makes_a_condition_of_the_state(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    for block in blocks:
        x, y = block(x, y, cond * x.mean())
    return x, y


def makes_a_wider_condition(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    for index, block in enumerate(blocks):
        x, y = block(x, y, cond.expand(-1, WIDTH) if index else cond)
    return x, y


def gives_more_to_some(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    for index, block in enumerate(blocks):
        x, y = block(x, y, cond, **({"gain": 1.0} if index else {}))
    return x, y


def always_from_the_start(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    return [block(x, y, cond)[0] for block in blocks][-1], y


def skips_one(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    return plain([blocks[0], *blocks[2:]], x, y, cond)


def takes_an_earlier_state(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    first, y = blocks[0](x, y, cond)
    x, y = blocks[1](first, y, cond)
    return blocks[2](first, y, cond)


def turns_the_state_round(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    x = y = y.expand(-1, 1, -1)
    x, y = blocks[0](x, y, cond)
    x, y = blocks[1](x, y, cond)
    return blocks[2](y, x, cond)


@torch.no_grad()
@pytest.mark.parametrize(
    ("loop", "problem"),
    [
        (calls_one_in_another_way, "2 is called with other arguments"),
        (adds_to_the_state, "1 has another argument 0"),
        (writes_to_the_state, "1 takes an earlier or altered state"),
        (scales_by_the_index, "1 has another argument 3"),
        (makes_a_condition_of_the_state, "1 has another argument 2"),
        (makes_a_wider_condition, "1 has another argument 2"),
        (gives_more_to_some, "1 is called with other arguments"),
        (always_from_the_start, "1 does not take what the block before"),
        (skips_one, "2 runs after blocks.0"),
        (takes_an_earlier_state, "2 takes an earlier or altered state"),
        (turns_the_state_round, "2 takes the state in other places"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_scan_ends_where_a_block_is_called_in_another_way(
    loop: Loop, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unrolled, torchs = largest(tower(loop, 5), 2)
    assert unrolled <= 1e-6
    assert torchs <= TOLERANCES["module float32"]
    # Too many such blocks are refused, by the name of the block.
    monkeypatch.setattr("tpuport.core.tracing.block_scan.MOST_BREAKS", 0)
    with pytest.raises(StackError, match=rf"stacked blocks: blocks\.{problem}"):
        call(*port(tower(loop, 5)), *arrays(inputs_of()))


class Widening(Block):
    def forward(self, x: Any, y: Any, cond: Any) -> Any:  # type: ignore[override]
        return x.float(), y


class Writing(Block):
    def forward(self, x: Any, y: Any, cond: Any) -> Any:  # type: ignore[override]
        cond.add_(1)
        return x, y


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (Widening, r"1 takes bfloat16 .*float32"),
        (Writing, "0 writes to its arguments in place"),
    ],
)
def test_a_block_that_no_scan_can_run_is_refused(
    block: type[Block], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpuport.core.tracing.block_scan.MOST_BREAKS", 0)
    ported, weights = port(Tower([block() for _ in range(3)], plain))
    low = {name: w.astype(jnp.bfloat16) for name, w in weights.items()}
    x, y, cond = arrays(inputs_of())
    with pytest.raises(StackError, match=rf"blocks\.{problem}"):
        apply(ported, low, x.astype(jnp.bfloat16), y, cond)


def test_blocks_around_one_that_is_called_in_another_way_are_scanned() -> None:
    ported, weights = port(tower(calls_one_in_another_way, 7))
    inputs = arrays(inputs_of())
    assert scans(lambda w, args: apply(ported, w, *args), weights, inputs) == [2, 4]


@torch.no_grad()
@pytest.mark.parametrize(("period", "count"), [(2, 6), (3, 9)])
@pytest.mark.parametrize("name", [*LOOPS, "kinds_take_their_own"])
def test_kinds_of_blocks_that_take_turns_are_torchs_function(
    name: str, period: int, count: int
) -> None:
    loop = LOOPS.get(name, kinds_take_their_own)
    unrolled, torchs = largest(turns(loop, period, count), 2, period)
    assert unrolled <= 1e-6
    assert torchs <= TOLERANCES["module float32"]


def test_kinds_that_take_turns_are_one_scan() -> None:
    ported, weights = port(turns(plain, 3, 12), period=3)
    inputs = arrays(inputs_of())
    assert scans(lambda w, args: apply(ported, w, *args), weights, inputs) == [4]
    assert ported.arrays["blocks.2*.mix.weight"] == tuple(
        f"blocks.{index}.mix.weight" for index in (2, 5, 8, 11)
    )


def turns(loop: Loop, period: int, count: int) -> Tower:
    torch.manual_seed(0)
    blocks = [Block(factor=0.2 + 0.3 * (n % period)) for n in range(count)]
    return Tower(blocks, loop).eval()


def largest(
    module: torch.nn.Module, batch: int, period: int = 1
) -> tuple[float, float]:
    """How far the scanned module is from the unrolled one, and from torch."""
    inputs = inputs_of(batch)
    found = call(*port(module, period=period), *arrays(inputs))
    unrolled = call(*port(module, stacked=False), *arrays(inputs))
    expected = [to_numpy(tensor) for tensor in module(*inputs)]
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert len(found) >= 2

    def apart(other: Any) -> float:
        return max(
            float(np.abs(x - y).max()) for x, y in zip(found, other, strict=True)
        )

    return apart(unrolled), apart(expected)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("plain", [5]),
        ("with_keywords", [5]),
        # To the second block, to the fourth, the rest, which is one block.
        ("reads_on_the_way", [2, 2]),
        # Up to the last but one; one of the whole; the first block needs none.
        ("reads_afterwards", [4, 5]),
        ("stops_early", [4]),
        ("runs_twice", [4, 5, 5]),
        ("looks_inside", [5]),
        ("each_has_its_own_condition", [4, 5]),
    ],
)
def test_a_loop_is_one_scan_or_as_many_as_it_has_parts(
    name: str, lengths: list[int]
) -> None:
    ported, weights = port(tower(LOOPS[name], 5))
    inputs = arrays(inputs_of())
    found = scans(lambda w, args: apply(ported, w, *args), weights, inputs)
    assert sorted(found) == lengths


def test_weights_are_stacked_under_names_of_their_own() -> None:
    module = tower(count=3)
    ported, weights = port(module)
    assert ported.arrays["blocks.*.linear.weight"] == (
        "blocks.0.linear.weight",
        "blocks.1.linear.weight",
        "blocks.2.linear.weight",
    )
    assert set(weights) == {
        *("inlet.weight", "inlet.bias", "outlet.weight", "outlet.bias"),
        *(f"blocks.*.{n}" for n in ("linear.weight", "linear.bias", "mix.weight")),
        "blocks.*.shift",
    }
    # A stored name is still one of a file's.
    assert set(ported.names.stored) == set(module.state_dict())


def test_the_program_does_not_grow_with_the_blocks() -> None:
    sizes = []
    for count in (3, 12):
        ported, weights = port(tower(count=count))
        lowered = jax.jit(lambda w, a, p=ported: apply(p, w, *a)).lower(
            weights, arrays(inputs_of())
        )
        sizes.append(lowered.as_text().count("dot_general"))
    # The layer before, the layer after and the two of one block.
    assert sizes == [4, 4]


@torch.no_grad()
def test_what_a_block_returns_besides_its_state() -> None:
    class Extra(Block):
        def forward(self, x: Any, y: Any, cond: Any) -> Any:  # type: ignore[override]
            x, y = super().forward(x, y, cond)
            return x, {"y": y, "none": None, "norm": x.square().sum()}, "word"

    def loop(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
        for block in blocks:
            x, more, word = block(x, y, cond)
            y = more["y"]
            assert more["none"] is None
            assert word == "word"
        return x, y, more["norm"]

    torch.manual_seed(0)
    module = Tower([Extra() for _ in range(4)], loop).eval()
    ported, weights = port(module)
    found = call(ported, weights, *arrays(inputs_of()))
    for ours, theirs in zip(found, module(*inputs_of()), strict=True):
        torch.testing.assert_close(to_torch(ours), theirs, rtol=1e-6, atol=1e-5)
    # The last block runs by itself, for what it gives and does not hand on.
    lengths = scans(lambda w, a: apply(ported, w, *a), weights, arrays(inputs_of()))
    assert set(lengths) <= {3, 4}


@pytest.mark.parametrize("where", ["before_last", "after_last"])
def test_a_forward_is_cut_at_its_last_block(where: Where) -> None:
    module = tower(count=4)
    ported, weights = port(module)
    inputs = arrays(inputs_of())
    expected = apply(ported, weights, *inputs)[0]

    def full(w: Any, a: Any) -> Any:
        return captured(ported, w, SPLIT, where, *a)

    def cached(w: Any, s: Any, a: Any) -> Any:
        # What it goes on from is the state, so the input does not count.
        return resumed(ported, w, SPLIT, where, s, -a[0], *a[1:])[0]

    out, state = jax.jit(full)(weights, inputs)
    np.testing.assert_allclose(out[0], expected, rtol=0, atol=1e-6)
    again = jax.jit(cached)(weights, state, inputs)
    np.testing.assert_allclose(again, expected, rtol=0, atol=1e-6)
    assert scans(full, weights, inputs) == [3 if where == "before_last" else 4]
    assert scans(cached, weights, state, inputs) == []
