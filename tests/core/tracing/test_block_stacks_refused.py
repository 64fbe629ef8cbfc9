"""Blocks and loops that cannot be one loop are refused by the name of the block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import torch

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
from tpuport.core.tracing.block_stacks import StackedBlocks
from tpuport.errors import PluginError


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
        (adds_to_the_state, "blocks.1", "another argument (a tensor [2, 3, 6]"),
        (writes_to_the_state, "blocks.1", "state that was written to"),
        (scales_by_the_index, "blocks.1", "another argument (1.0, not 0.0)"),
        (makes_a_condition_of_the_state, "blocks.1", "another argument (a tensor [2, "),
        (makes_a_wider_condition, "blocks.1", "another argument (a tensor [2, 6]"),
        (gives_more_to_some, "blocks.1", "other arguments than the first"),
        (always_from_the_start, "blocks.1", "does not take what the block before"),
        (skips_one, "blocks.2", "runs after blocks.0"),
        (takes_an_earlier_state, "blocks.2", "the state of an earlier block"),
        (turns_the_state_round, "blocks.2", "takes the state in other places"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_loop_that_does_more_is_refused_by_name(
    loop: Loop, named: str, problem: str
) -> None:
    module = tower(loop, 4)
    with pytest.raises(PluginError) as caught:
        call(*port(module), *arrays(inputs_of()))
    assert f"stacked blocks: {named} " in str(caught.value)
    assert problem in str(caught.value)
    assert "Component.stacked" in str(caught.value)
    # Such a loop is no error of the module: unrolled it runs.
    assert call(*port(module, ()), *arrays(inputs_of()))


def test_a_state_that_changes_its_dtype_is_refused() -> None:
    class Widening(Block):
        def forward(self, x: Any, y: Any, cond: Any) -> Any:  # type: ignore[override]
            return x.float(), y

    module = Tower([Widening() for _ in range(3)], plain)
    x, y, cond = arrays(inputs_of())
    ported, weights = port(module)
    low = {name: w.astype(jnp.bfloat16) for name, w in weights.items()}
    with pytest.raises(PluginError, match=r"blocks\.0 takes bfloat16 .* float32"):
        ported.apply(low, x.astype(jnp.bfloat16), y, cond)


def test_a_block_that_writes_to_its_arguments_is_refused() -> None:
    class Writing(Block):
        def forward(self, x: Any, y: Any, cond: Any) -> Any:  # type: ignore[override]
            cond.add_(1)
            return x, y

    with pytest.raises(PluginError, match=r"blocks\.0 writes to its arguments"):
        call(*port(Tower([Writing(), Writing()], plain)), *arrays(inputs_of()))


# ---------------------------------------------------------- blocks that are refused


def with_index() -> Tower:
    return Tower([Block(index) for index in range(3)], plain)


def of_other_width() -> Tower:
    return Tower([Block(), Block(width=1)], plain)


def with_another_processor() -> Tower:
    return Tower([Block(), Block(), Block(factor=0.25)], plain)


def with_a_function_each() -> Tower:
    module = tower(count=2)
    for index, block in enumerate(module.blocks):
        block.rule = functools.partial(max, index)
    return module


def of_another_class() -> Tower:
    class Other(Block):
        pass

    return Tower([Block(), Other()], plain)


def with_one_more_layer() -> Tower:
    module = tower(count=2)
    module.blocks[1].more = torch.nn.Identity()
    return module


@pytest.mark.parametrize(
    ("make", "difference"),
    [
        (with_index, "blocks.1 of Tower is not like blocks.0: index is 1, not 0"),
        (of_other_width, "linear.weight is torch.float32 [1, 6], not torch.float32"),
        (with_another_processor, "blocks.2 of Tower is not like blocks.0: processor."),
        (with_a_function_each, "rule.args.0 is 1, not 0"),
        (of_another_class, "is Other, not Block"),
        (with_one_more_layer, "more is Identity, not None"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_blocks_that_differ_are_refused_by_name(
    make: Callable[[], Tower], difference: str
) -> None:
    with pytest.raises(PluginError) as caught:
        port(make())
    assert difference in str(caught.value)


def test_an_attribute_that_forward_does_not_read_may_differ() -> None:
    declared = StackedBlocks(path="blocks", differ=("index",))
    ported, _ = port(with_index(), (declared,))
    assert [len(stack.blocks) for stack in ported.stacks] == [3]


def test_lambdas_made_by_the_same_line_are_alike() -> None:
    module = tower(count=3)
    for block in module.blocks:
        block.rule = lambda x: x + 1
    ported, _ = port(module)
    assert len(ported.stacks) == 1


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("layers", r"Tower has no blocks 'layers'; it has inlet, blocks, outlet"),
        ("inlet", r"'inlet' of Tower is a Linear, not a ModuleList"),
    ],
)
def test_a_path_that_is_no_list_is_refused(path: str, problem: str) -> None:
    with pytest.raises(PluginError, match=problem):
        port(tower(), (path,))


def test_shared_weights_and_lists_that_overlap_are_refused() -> None:
    module = tower()
    module.blocks[1].mix.weight = module.blocks[0].mix.weight
    with pytest.raises(PluginError, match="are one tensor, which a stack would part"):
        port(module)
    with pytest.raises(PluginError, match="overlap"):
        port(tower(), ("blocks", StackedBlocks(path="blocks", first=1)))


def test_one_block_or_none_is_no_stack() -> None:
    for count in (0, 1):
        ported, weights = port(tower(count=count))
        assert ported.stacks == ()
        assert not any("*" in name for name in weights)
