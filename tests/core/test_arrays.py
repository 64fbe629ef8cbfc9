"""Between torch, NumPy and JAX: every bit kept, or a refusal."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from tpuport.core.arrays import (
    dtype_name,
    jax_dtype,
    to_numpy,
    to_torch,
    torch_dtype,
)
from tpuport.core.spec import kinds
from tpuport.errors import UsageError


def test_bfloat16_goes_there_and_back_bit_by_bit() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16).reshape(256, 256)  # infinities and NaN included
    array = to_numpy(every)
    assert array.dtype == ml_dtypes.bfloat16
    assert array.shape == (256, 256)
    placed = jax.device_put(array)
    assert placed.dtype == jnp.bfloat16
    for back in (to_torch(array), to_torch(placed)):
        assert back.dtype == torch.bfloat16
        assert torch.equal(back.view(torch.int16), bits.reshape(256, 256))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3),
        torch.randn(3, 2, dtype=torch.bfloat16).t(),
        torch.randn(4, 4)[::2, 1:],
        torch.randn(2).half(),
        torch.tensor(1.5),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1, -2], dtype=torch.int32),
        torch.zeros(0, 3),
        torch.randn(2, requires_grad=True),
    ],
    ids=lambda t: f"{t.dtype} {tuple(t.shape)}",
)
def test_tensors_come_back_as_they_went(tensor: torch.Tensor) -> None:
    array = to_numpy(tensor)
    assert array.shape == tuple(tensor.shape)
    back = to_torch(array)
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor.detach())


def test_to_torch_is_a_copy_that_may_be_written_to() -> None:
    array = jnp.zeros(2)
    tensor = to_torch(array)
    tensor[0] = 1
    assert array.tolist() == [0, 0]


@pytest.mark.parametrize("limit", [2**31 - 1, -(2**31)])
def test_int64_becomes_int32_while_it_fits(limit: int) -> None:
    for value in (torch.tensor([0, limit]), np.array([0, limit])):
        array = to_numpy(value)
        assert array.dtype == np.int32
        assert array.tolist() == [0, limit]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40])
def test_int64_that_does_not_fit_is_refused_with_the_range(value: int) -> None:
    with pytest.raises(OverflowError, match=rf"int32: .*{value}"):
        to_numpy(torch.tensor([0, value]))


def test_float64_becomes_float32() -> None:
    assert to_numpy(torch.zeros(1, dtype=torch.float64)).dtype == np.float32
    assert to_numpy(1.5).dtype == np.float32
    assert to_numpy(7).dtype == np.int32


@pytest.mark.parametrize(
    ("asked", "found"),
    [("float32", "float32"), ("fp32", "float32"), ("bf16", "bfloat16")],
)
def test_dtypes_have_short_names(asked: str, found: str) -> None:
    assert kinds.dtype(asked) == found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int8", "dtype 'int8' is not supported; choose one of float32, bfloat16$"),
        ("float16", "T5 overflows in float16"),
    ],
)
def test_other_dtypes_are_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kinds.dtype(name)


@pytest.mark.parametrize(
    "dtype", [torch.float32, np.dtype(np.float32), jnp.dtype("float32")]
)
def test_a_dtype_has_one_name_everywhere(dtype: Any) -> None:
    assert dtype_name(dtype) == "float32"


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_names_are_those_of_torch_and_jax(name: str) -> None:
    assert dtype_name(torch_dtype(name)) == dtype_name(jax_dtype(name)) == name
