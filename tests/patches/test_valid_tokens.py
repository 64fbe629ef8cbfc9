"""Valid tokens first: bit for bit, in plain torch and in a compiled program."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch

from tests.patches.tools import model_runtime
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.patches.valid_tokens import valid_first


def compiled(function: Any, *tensors: torch.Tensor, **options: Any) -> Any:
    """A torch function as one compiled program."""
    runtime = model_runtime(mesh=None, platform="cpu")

    @jax.jit
    def call(*arrays: Any) -> Any:
        with runtime.tracing() as env:
            return env.t2j_iso(function(*env.j2t_iso(arrays), **options))

    return jax.tree.map(to_torch, call(*(to_numpy(x) for x in tensors)))


def tokens_for(mask: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*mask.shape, 3, generator=generator).to(dtype)


def masks() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "ragged": torch.rand(3, 9, generator=generator) < 0.5,
        "all and none": torch.tensor([[True] * 5, [False] * 5]),
        "left padded": torch.tensor([[False, False, True, True]]),
        "right padded": torch.tensor([[True, True, False, False]]),
        "one token": torch.tensor([[True], [False]]),
        "no token": torch.zeros(2, 0, dtype=torch.bool),
    }


def assert_valid_first(
    found: tuple[torch.Tensor, torch.Tensor], tokens: torch.Tensor, mask: torch.Tensor
) -> None:
    moved, lengths = found
    expected = [
        torch.cat([x[valid], x[~valid]]) for x, valid in zip(tokens, mask, strict=True)
    ]
    assert torch.equal(moved, torch.stack(expected))
    assert lengths.tolist() == mask.sum(dim=1).tolist()
    assert not lengths.dtype.is_floating_point


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", masks())
def test_valid_tokens_move_to_the_front(name: str, dtype: torch.dtype) -> None:
    mask = masks()[name]
    tokens = tokens_for(mask, dtype)
    assert_valid_first(valid_first(tokens, mask), tokens, mask)
    assert_valid_first(compiled(valid_first, tokens, mask), tokens, mask)


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int8, torch.float32, torch.bfloat16],
    ids=str,
)
def test_a_mask_may_have_any_dtype(dtype: torch.dtype) -> None:
    mask = masks()["ragged"]
    tokens = tokens_for(mask)
    given = mask.to(dtype)
    assert_valid_first(valid_first(tokens, given), tokens, mask)
    assert_valid_first(compiled(valid_first, tokens, given), tokens, mask)


def test_a_bfloat16_mask_is_counted_in_integers() -> None:
    mask = torch.ones(1, 257, dtype=torch.bfloat16)
    assert int(mask.sum()) == 256  # what must not happen
    tokens = tokens_for(mask)
    for found in (valid_first(tokens, mask), compiled(valid_first, tokens, mask)):
        assert_valid_first(found, tokens, mask.bool())


def test_infinities_and_nans_move_as_they_are() -> None:
    mask = masks()["left padded"]
    tokens = torch.tensor([[[torch.nan], [torch.inf], [-0.0], [1e-45]]])
    expected = tokens[:, [2, 3, 0, 1]].view(torch.int32)
    for moved, _ in (valid_first(tokens, mask), compiled(valid_first, tokens, mask)):
        assert torch.equal(moved.view(torch.int32), expected)


def test_a_slice_of_tokens_will_do() -> None:
    mask = masks()["ragged"]
    tokens = tokens_for(mask)

    def of_a_slice(tokens: torch.Tensor, mask: torch.Tensor) -> Any:
        return valid_first(tokens[:, 2:], mask[:, 2:])

    found = compiled(of_a_slice, tokens, mask)
    assert_valid_first(found, tokens[:, 2:], mask[:, 2:])


def test_brackets_fail_on_a_slice_under_torchax() -> None:
    """Why the tokens are indexed through the operator; when this fails, it can go."""

    def in_brackets(tokens: torch.Tensor) -> torch.Tensor:
        index = torch.zeros(3, dtype=torch.long, device=tokens.device)
        return tokens[:, 2:][index, index]

    with pytest.raises(AttributeError, match="_elem"):
        compiled(in_brackets, tokens_for(masks()["ragged"]))


@pytest.mark.parametrize(
    ("tokens", "mask"), [((2, 4, 3), (2, 5)), ((2, 4, 3), (2, 4, 1)), ((2, 4), (2, 4))]
)
def test_shapes_that_do_not_fit_are_refused(
    tokens: tuple[int, ...], mask: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"takes tokens \[B, L, C\] with a mask"):
        valid_first(torch.zeros(tokens), torch.ones(mask))
