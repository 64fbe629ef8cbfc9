"""Loops over blocks that cannot be one scan are refused by the name of the block."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from tests.core.tracing.towers import (
    WIDTH,
    Block,
    Loop,
    Tower,
    arrays,
    call,
    inputs_of,
    plain,
    port,
    tower,
)
from tpuport.core.tracing.block_stacks import StackError


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if so many calls were in another way already."""
    monkeypatch.setattr("tpuport.core.tracing.block_scan.MOST_BREAKS", 0)


# ----------------------------------------------------------- loops that are refused


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


@pytest.mark.parametrize(
    ("loop", "named", "problem"),
    [
        (adds_to_the_state, "blocks.1", "has another argument 0"),
        (writes_to_the_state, "blocks.1", "takes an earlier or altered state"),
        (scales_by_the_index, "blocks.1", "has another argument 3"),
        (makes_a_condition_of_the_state, "blocks.1", "has another argument 2"),
        (makes_a_wider_condition, "blocks.1", "has another argument 2"),
        (gives_more_to_some, "blocks.1", "is called with other arguments"),
        (always_from_the_start, "blocks.1", "does not take what the block before"),
        (skips_one, "blocks.2", "runs after blocks.0"),
        (takes_an_earlier_state, "blocks.2", "takes an earlier or altered state"),
        (turns_the_state_round, "blocks.2", "takes the state in other places"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_loop_that_does_more_is_refused_by_name(
    loop: Loop, named: str, problem: str
) -> None:
    module = tower(loop, 4)
    with pytest.raises(StackError, match=rf"stacked blocks: {named} {problem}"):
        call(*port(module), *arrays(inputs_of()))
    # Such a loop is no error of the module: unrolled it runs.
    assert call(*port(module, stacked=False), *arrays(inputs_of()))


def test_a_state_that_changes_its_dtype_is_refused() -> None:
    class Widening(Block):
        def forward(self, x: Any, y: Any, cond: Any) -> Any:  # type: ignore[override]
            return x.float(), y

    module = Tower([Widening() for _ in range(3)], plain)
    x, y, cond = arrays(inputs_of())
    ported, weights = port(module)
    low = {name: w.astype(jnp.bfloat16) for name, w in weights.items()}
    with pytest.raises(StackError, match=r"blocks\.1 takes bfloat16 .*float32"):
        ported.apply(low, x.astype(jnp.bfloat16), y, cond)


def test_a_block_that_writes_to_its_arguments_is_refused() -> None:
    class Writing(Block):
        def forward(self, x: Any, y: Any, cond: Any) -> Any:  # type: ignore[override]
            cond.add_(1)
            return x, y

    with pytest.raises(StackError, match=r"blocks\.0 writes to its arguments"):
        call(*port(Tower([Writing(), Writing()], plain)), *arrays(inputs_of()))
