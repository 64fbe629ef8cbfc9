"""Op overrides: claims meet before anything changes, and what was changed returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import torch

from tests.patches.tools import model_runtime
from tpuport.core import compat
from tpuport.core.tracing.context import OpContext
from tpuport.core.tracing.op_overrides import (
    OpOverride,
    inspect_overrides,
    installed,
    resolve_claims,
)
from tpuport.errors import OpConflictError

CONTEXT = OpContext(mesh=None, platform="cpu", records=[])
RELU = "torch.nn.functional.relu"
ATEN = "torch.ops.aten.relu"


def minus_seven(context: OpContext) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: jnp.full_like(x, -7)


def claim(
    *targets: str, owner: str = "mine", make: Callable[..., Any] = minus_seven
) -> OpOverride:
    return OpOverride(targets=targets, make=make, owner=owner, reason=f"of {owner}")


@pytest.fixture
def env() -> Any:
    return compat.import_torchax().tensor.Environment()


def relu(env: Any) -> list[float]:
    """What relu gives in an environment; -7 is the override's."""
    with env:
        x = env.to_xla(torch.tensor([-1.0, 2.0]))
        return torch.nn.functional.relu(x).jax().tolist()


def test_an_operator_is_found_by_its_dotted_name() -> None:
    claims = resolve_claims([claim(RELU, f"{ATEN}.default")])
    assert [operator for operator, _ in claims] == [
        torch.nn.functional.relu,
        torch.ops.aten.relu.default,
    ]


@pytest.mark.parametrize(
    "target",
    ["torch.nn.functional.rellu", "torch.ops.aten.rellu", "torch.ops.aten.relu.fast"],
)
def test_an_unknown_operator_is_named(target: str) -> None:
    with pytest.raises(OpConflictError, match=f"'{target}' does not exist in .* 'mine"):
        resolve_claims([claim(target)])


def test_each_override_is_told_by_its_own_state() -> None:
    overrides = (
        claim("torch.nn.functional.gelu"),
        claim(RELU, "torch.nn.functional.rellu"),
        claim(RELU, owner="one"),
        claim(RELU, owner="two"),
    )
    states = inspect_overrides(overrides)
    assert [s.state for s in states] == ["applicable", "gone", "broken", "broken"]
    assert [s.name for s in states] == ["gelu", "relu", "relu", "relu"]
    assert states[0].detail == "of mine"
    assert states[2].detail == states[3].detail
    assert f"{RELU} is claimed by 'two' (of two) and, as {RELU}, by 'one'" in (
        states[2].detail
    )


@pytest.mark.parametrize(
    "targets",
    [
        (RELU, RELU),
        (ATEN, f"{ATEN}.default"),
        (f"{ATEN}.default", ATEN),
        ("torch.ops.aten.add.Tensor", "torch.ops.aten.add.Scalar"),
    ],
)
def test_two_claims_on_one_operator_are_a_conflict(targets: tuple[str, str]) -> None:
    """An overload and its packet are one operator."""
    first, second = targets
    gelu = "torch.nn.functional.gelu"
    claims = [claim(first, gelu, owner="one"), claim(second, gelu, owner="two")]
    with pytest.raises(OpConflictError) as caught:
        resolve_claims(claims)
    assert (
        f"{second} is claimed by 'two' (of two) and, as {first}, by 'one' (of one)"
        in str(caught.value)
    )
    assert f"{gelu} is claimed by 'two'" in str(caught.value)


def test_an_override_holds_in_the_block_and_for_all_its_targets(env: Any) -> None:
    """Made once, when the block begins; what was there returns, also after an error."""
    seen: list[OpContext] = []

    def make(context: OpContext) -> Callable[..., Any]:
        seen.append(context)
        return minus_seven(context)

    claims = resolve_claims([claim(RELU, ATEN, make=make)])
    before = dict(env._ops)
    assert not seen
    assert relu(env) == [0, 2]
    with pytest.raises(KeyboardInterrupt), installed(claims, env, CONTEXT):  # noqa: PT012
        assert relu(env) == [-7, -7]
        with env:
            x = env.to_xla(torch.tensor([-1.0]))
            assert torch.ops.aten.relu(x).jax().tolist() == [-7]
        raise KeyboardInterrupt
    assert [one is CONTEXT for one in seen] == [True]
    assert env._ops == before
    assert relu(env) == [0, 2]


def test_a_factory_that_fails_leaves_the_environment_untouched(env: Any) -> None:
    def broken(context: OpContext) -> Callable[..., Any]:
        raise RuntimeError("no kernel")

    before = dict(env._ops)
    gelu = claim("torch.nn.functional.gelu", make=broken)
    with (
        pytest.raises(RuntimeError, match="no kernel"),
        installed(resolve_claims([claim(RELU), gelu]), env, CONTEXT),
    ):
        pass
    assert env._ops == before


def test_runtimes_do_not_see_each_other_nor_touch_the_default_environment() -> None:
    torchax = compat.import_torchax()
    default = torchax.default_env()
    before = dict(default._ops)
    mine = model_runtime(mesh=None, platform="cpu", overrides=[claim(RELU, ATEN)])
    other = model_runtime(mesh=None, platform="cpu")
    with mine.tracing() as env:
        x = env.to_xla(torch.tensor([-1.0]))
        assert torch.nn.functional.relu(x).jax().tolist() == [-7]
        assert default._ops == before
    with other.tracing() as env:
        x = env.to_xla(torch.tensor([-1.0]))
        assert torch.nn.functional.relu(x).jax().tolist() == [0]
    assert default._ops == before
    assert relu(default) == [0, 2]
    assert torch.nn.functional.relu(torch.tensor([-1.0])).tolist() == [0]


def test_a_runtime_refuses_conflicts_when_it_is_made() -> None:
    """Attention is claimed by every runtime."""
    again = claim("torch.nn.functional.scaled_dot_product_attention", owner="model")
    with pytest.raises(OpConflictError, match=r"'model'.*'tpuport\.core\.layers\."):
        model_runtime(mesh=None, platform="cpu", overrides=[again])
