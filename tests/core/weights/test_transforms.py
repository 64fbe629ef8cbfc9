"""Weights in another order: exact, of one transform each, and nothing else moves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from tpuport.core.weights.transforms import (
    WeightTransform,
    half_order,
    to_halves,
    transformer,
)
from tpuport.errors import PluginError

HEADS, HEAD_DIM = 3, 8


def transform(pattern: str, apply: Any = torch.neg) -> WeightTransform:
    return WeightTransform(
        pattern=pattern, apply=lambda tensor, config: apply(tensor), reason="a test"
    )


def whole(
    transforms: Sequence[WeightTransform], config: dict[str, Any], names: Sequence[str]
) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """``transformer``, of which all of a tensor is asked."""
    part = transformer(transforms, config, names)
    return lambda name, one: part(name, one, tuple(slice(0, n) for n in one.shape))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(24, 5), (24,), (HEAD_DIM,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_is_moved_within_its_head_and_none_is_changed(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert half_order(6) == (0, 2, 4, 1, 3, 5)
    tensor = drawn(*shape).to(dtype)
    moved = to_halves(tensor, HEAD_DIM)
    assert (moved.shape, moved.dtype) == (tensor.shape, tensor.dtype)
    for head in range(shape[0] // HEAD_DIM):
        for place, row in enumerate(half_order(HEAD_DIM)):
            new, old = (head * HEAD_DIM + i for i in (place, row))
            assert torch.equal(moved[new], tensor[old])


def test_rotation_by_halves_is_rotation_by_pairs() -> None:
    """In float64, element by element: the order is what rotary tables expect."""
    weight = drawn(HEADS * HEAD_DIM, 5).double()
    x, angles = drawn(7, 5).double(), drawn(7, HEAD_DIM // 2).double()
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    pairs = (x @ weight.T).reshape(7, HEADS, HEAD_DIM // 2, 2)
    a, b = pairs.unbind(-1)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(2)

    halves = (x @ to_halves(weight, HEAD_DIM).T).reshape(7, HEADS, HEAD_DIM)
    a, b = halves.chunk(2, -1)
    ours = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    assert torch.equal(ours, turned[..., list(half_order(HEAD_DIM))])


@pytest.mark.parametrize(
    ("rows", "head_dim"), [(10, 4), (9, 3), (4, 8)], ids=["rest", "odd", "fewer"]
)
def test_no_whole_heads_are_refused(rows: int, head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows are no whole heads"):
        to_halves(torch.zeros(rows, 2), head_dim)


def test_a_name_that_no_pattern_matches_is_left_as_it_is() -> None:
    apply = whole([transform(r"a\.weight")], {}, ["a.weight", "b.weight"])
    tensor = drawn(3)
    # The whole name counts: neither a part nor a name within a name.
    for name in ("a.bias", "b.a.weight", "a.weight.scale"):
        assert torch.equal(apply(name, tensor), tensor)
    assert torch.equal(apply("a.weight", tensor), -tensor)
    turned = whole([transform("w", lambda x: x.T)], {}, ["w"])
    assert turned("w", drawn(4, 4)).is_contiguous()


def test_the_config_reaches_the_transform() -> None:
    found = WeightTransform(
        pattern="w",
        apply=lambda tensor, config: to_halves(tensor, config["dim"]),
        reason="a test",
    )
    out = whole([found], {"dim": 4}, ["w"])("w", torch.arange(8))
    assert out.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("rows", ["", "dim"])
def test_a_part_is_that_of_the_whole(rows: str) -> None:
    """Also one that begins within a group, or is of some columns."""
    given: list[int] = []

    def apply(tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
        given.append(len(tensor))
        return to_halves(tensor, config["dim"])

    one = WeightTransform(pattern="w", apply=apply, reason="a test", rows=rows)
    part, tensor = transformer([one], {"dim": 4}, ["w"]), drawn(24, 6)
    for index in (
        (slice(8, 16), slice(0, 6)),
        (slice(4, 24), slice(2, 5)),
        (slice(2, 8), slice(0, 6)),
    ):
        assert torch.equal(part("w", tensor, index), to_halves(tensor, 4)[index])
    assert given == ([8, 20, 24] if rows else [24] * 3)


def test_two_transforms_of_one_weight_are_refused_by_name() -> None:
    apply = whole(
        [transform(r"a\..*"), transform(r".*\.weight")], {}, ["a.weight", "a.bias"]
    )
    assert torch.equal(apply("b.weight", drawn(2)), -drawn(2))
    with pytest.raises(PluginError) as caught:
        apply("a.weight", drawn(2))
    said = str(caught.value)
    assert said.startswith("a.weight matches 2 weight transforms")
    assert all(repr(p) in said for p in (r"a\..*", r".*\.weight"))


@pytest.mark.parametrize(
    ("apply", "found"),
    [(lambda x: x[:2], "float32 [2]"), (lambda x: x.double(), "float64 [3]")],
    ids=["shape", "dtype"],
)
def test_another_shape_or_dtype_is_refused(apply: Any, found: str) -> None:
    message = f"weight transform 'w' makes torch.{found} of w, which is torch.float32"
    with pytest.raises(PluginError, match=re.escape(message)):
        whole([transform("w", apply)], {}, ["w"])("w", drawn(3))


def test_a_transform_that_matches_nothing_is_refused() -> None:
    """A misspelt one would leave the weights as they are, and blocks expect others."""
    with pytest.raises(PluginError, match=r"'attn9.*' \(a test\) matches no weight"):
        transformer([transform("attn9.*")], {}, ["attn1.weight", "attn1.bias"])
