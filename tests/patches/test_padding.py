"""``torch.nn.functional.pad`` as an override, and where a picture is split."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.patches.tools import model_runtime, traced
from tpuport.core.mesh.spatial_split import Side, Space
from tpuport.patches.padding import PADDING, pad

CASES: list[tuple[tuple[int, ...], list[int], dict[str, Any]]] = [
    ((2, 3), [1, 2], {}),
    ((2, 3, 4), [1, 0, 2, 1], {"value": 3.5}),
    ((2, 5, 6), [-1, 2, 0, -2], {}),
    ((1, 2, 4, 5), [1, 2, 2, 1], {"mode": "reflect"}),
    ((1, 2, 4, 5), [1, 2, 2, 1], {"mode": "circular"}),
    ((1, 2, 3, 4, 5), [1, 1, 1, 1, 2, 0], {"mode": "replicate"}),
    ((1, 2, 3, 4), [0, 1, 0, 1], {"mode": "constant", "value": 0}),
]


@pytest.mark.parametrize(("shape", "widths", "options"), CASES)
def test_it_is_torchs(
    shape: tuple[int, ...], widths: list[int], options: dict[str, Any]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    runtime = model_runtime(mesh=None, platform="cpu", overrides=[PADDING])
    found = traced(runtime, lambda x: F.pad(x, widths, **options))(x.numpy())
    assert np.array_equal(np.asarray(found), F.pad(x, widths, **options).numpy())


def test_what_is_no_padding_is_refused() -> None:
    x = jnp.zeros((2, 3))
    with pytest.raises(ValueError, match=r"padding \[1\]"):
        pad(x, [1])
    with pytest.raises(ValueError, match="'wavy'"):
        pad(x, [1, 1], mode="wavy")


@pytest.mark.parametrize(
    "options", [{"mode": "reflect"}, {"value": 1.0}, {"mode": "circular"}]
)
def test_split_in_space_only_zeros_and_repetition_are_borders(
    options: dict[str, Any],
) -> None:
    sides = (Side(axis=axis, parts=1, size=4) for axis in ("rows", "columns"))
    space = Space(rows=next(sides), columns=next(sides))
    x = jnp.arange(16.0).reshape(1, 1, 4, 4)
    with pytest.raises(NotImplementedError, match="split in space"):
        pad(x, [1, 1, 1, 1], space=space, **options)
    # Of frames alone, every border will do.
    frames = jnp.zeros((1, 1, 4, 4, 4))
    out = pad(frames, [0, 0, 0, 0, 1, 1], space=space, **options)
    assert out.shape == (1, 1, 6, 4, 4)
