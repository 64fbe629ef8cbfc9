"""A value comes apart into tensors and a form, and together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from tpuport.core.seam.values import Form, equal, put_together, take_apart


def apart(value: Any) -> tuple[Form, list[torch.Tensor]]:
    leaves: list[torch.Tensor] = []
    return take_apart(value, leaves, []), leaves


VALUES = {
    "tensor": torch.arange(3.0),
    "nested": [torch.ones(2), (1, "a", None), {"b": torch.zeros(1), "c": 2.5}],
    "output": Transformer2DModelOutput(sample=torch.ones(2, 2)),
    "distribution": DiagonalGaussianDistribution(torch.ones(1, 4, 2, 2)),
    "dtype": (torch.float32, torch.Size([2, 3]), slice(1, 2)),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_together_again(name: str) -> None:
    form, leaves = apart(VALUES[name])
    again = put_together(form, iter([leaf.clone() for leaf in leaves]))
    assert equal(again, VALUES[name])
    for other in VALUES.keys() - {name}:
        assert not equal(again, VALUES[other])
    if leaves:
        changed = put_together(form, iter([leaf + 1 for leaf in leaves]))
        assert not equal(changed, VALUES[name])


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), ("1", 1), ([1], (1,)), ({"a": 1}, {"b": 1}), (None, 0)],
    ids=str,
)
def test_forms_tell_values_apart_that_python_calls_equal(one: Any, other: Any) -> None:
    assert apart(one)[0] != apart(other)[0]
    assert apart(one)[0] == apart(one)[0]
    assert hash(apart(one)[0]) == hash(apart(one)[0])


def test_an_object_without_tensors_equals_itself_alone() -> None:
    one, other = object(), object()
    assert apart(one)[0] == apart(one)[0]
    assert apart(one)[0] != apart(other)[0]


def test_containers_are_numbered_alike_on_both_ways() -> None:
    value = {"cache": [None, torch.ones(1)], "place": [0]}
    found: list[Any] = []
    leaves: list[torch.Tensor] = []
    form = take_apart(value, leaves, found)
    again: list[Any] = []
    put_together(form, iter(leaves), again)
    assert [type(c) for c in found] == [type(c) for c in again] == [dict, list, list]
    assert found[2] is value["place"]
