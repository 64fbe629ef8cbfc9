from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from tpuport.kernels.padding import ceil_div, pad_dim, round_up


@pytest.mark.parametrize(
    ("size", "multiple", "want"),
    [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16), (39826, 256, 39936)],
)
def test_round_up_gives_the_next_multiple(size: int, multiple: int, want: int) -> None:
    assert round_up(size, multiple) == want
    assert ceil_div(size, multiple) == want // multiple


@pytest.mark.parametrize(("size", "multiple"), [(-1, 8), (4, 0), (4, -2)])
def test_round_up_names_the_bad_number(size: int, multiple: int) -> None:
    with pytest.raises(ValueError, match=rf"{size} up to a multiple of {multiple}"):
        round_up(size, multiple)


def test_pad_dim_appends_zeros_to_one_dim() -> None:
    x = jnp.ones((2, 3, 4))
    padded = pad_dim(x, 1, 5)
    assert padded.shape == (2, 5, 4)
    np.testing.assert_array_equal(padded[:, :3], x)
    np.testing.assert_array_equal(padded[:, 3:], 0)


def test_pad_dim_does_not_copy_what_fits() -> None:
    x = jnp.ones((2, 3))
    assert pad_dim(x, 1, 3) is x


def test_pad_dim_does_not_cut() -> None:
    with pytest.raises(ValueError, match=r"dimension 1 of shape \(2, 3\) to 2"):
        pad_dim(jnp.ones((2, 3)), 1, 2)
