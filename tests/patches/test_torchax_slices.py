"""Slice assignment under torchax: equal to torch, and the failure it is there for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.models.cogvideox.test_components import transformer_inputs
from tests.models.conftest import make_transformer
from tests.patches.tools import apply, found_by, model_runtime, traced
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.tracing.patching import Patch
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.models.cogvideox.patches import PATCHES
from tpuport.patches.constants import CONSTANTS
from tpuport.patches.norms import FLOAT32_NORMS
from tpuport.patches.torchax_slices import (
    IN_PLACE,
    SLICE_ASSIGNMENT,
    TYPE_AS,
    VIEW_ARRAY,
    write_slice,
)

SHAPE = (4, 5, 6)

BOXES: dict[str, Any] = {
    "all": slice(None),
    "one slice": slice(1, 3),
    "from": slice(2, None),
    "to": slice(None, -2),
    "negative": slice(-3, -1),
    "past the end": slice(2, 99),
    "two": (slice(1, 3), slice(2, 4)),
    "middle": (slice(None), slice(1, 3)),
    "last": (slice(None), slice(None), slice(3, None)),
    "corner": (slice(1, 2), slice(1, 2), slice(1, 2)),
    "ellipsis": Ellipsis,
    "ellipsis first": (Ellipsis, slice(1, 4)),
    "ellipsis last": (slice(1, 3), Ellipsis),
    "ellipsis between": (slice(1, 3), Ellipsis, slice(0, 2)),
    "ellipsis for nothing": (slice(1, 3), Ellipsis, slice(None), slice(0, 2)),
    "every second": (Ellipsis, slice(None, None, 2)),
    "every third": (Ellipsis, slice(1, None, 3)),
}

#: Left to torchax's own code.
OTHERS: dict[str, Any] = {
    "int": 2,
    "negative int": -1,
    "int and slice": (slice(None), 2),
    "ellipsis and int": (Ellipsis, 3),
    "step": slice(None, None, 2),
    "stepped unevenly": (Ellipsis, slice(1, None, 4)),
    "list": (slice(None), [0, 3]),
    "none": (None, slice(1, 2)),
    "empty": slice(2, 2),
}


def start() -> torch.Tensor:
    return torch.arange(4 * 5 * 6, dtype=torch.float32).reshape(SHAPE)


@pytest.mark.parametrize(
    "value",
    [7.0, torch.linspace(-1, 1, 6), torch.linspace(-1, 1, 5)[:, None]],
    ids=["scalar", "row", "column"],
)
def test_values_broadcast_and_take_the_dtype_of_the_target(value: Any) -> None:
    expected = start().bfloat16()
    expected[1:3] = value
    given = value if isinstance(value, float) else jnp.asarray(value.numpy())
    x = jnp.asarray(to_numpy(start().bfloat16()))
    found = to_torch(write_slice(x, slice(1, 3), given))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["addcmul_", "addcdiv_", "cumsum_", "add_"])
def test_operators_in_place_change_what_a_view_shows(name: str) -> None:
    assert IN_PLACE.name == "torchax-in-place-on-views"

    def change(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        x = x + 0
        view = x[..., :1]
        others = {"cumsum_": (0,), "add_": (value,)}.get(name, (value, value))
        getattr(view, name)(*others)
        return x

    given = start(), torch.full((4, 5, 1), 2.0)
    assert torch.equal(found_by(change, *given, patches=(IN_PLACE,)), change(*given))


@pytest.mark.parametrize("key", [*BOXES.values(), *OTHERS.values()], ids=str)
@pytest.mark.parametrize("through_view", [False, True], ids=["tensor", "view"])
def test_torch_code_assigns_as_in_torch(through_view: bool, key: Any) -> None:
    """In a traced block, to a tensor itself and through a view of it."""
    value = torch.full(start()[key].shape, -1.0)

    def assign(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        x = x + 0
        if through_view:
            x[key].copy_(value)
        else:
            x[key] = value
        return x

    found = found_by(assign, start(), value, patches=SLICE_ASSIGNMENT)
    assert torch.equal(found, assign(start(), value))


def test_an_update_through_a_view_reaches_the_tensor() -> None:
    def add(x: torch.Tensor) -> torch.Tensor:
        x = x + 0
        x[1:3].add_(100)
        x[..., 2:].mul_(2)
        return x

    found = found_by(add, start(), patches=SLICE_ASSIGNMENT)
    assert torch.equal(found, add(start()))


def test_a_slice_of_other_dims_is_written_through() -> None:
    numbers = []

    def assign(x: torch.Tensor) -> torch.Tensor:
        numbers.append(x[1:, 2].tolist())
        x = x + 0
        x[:, 1:3].view(4, 2, 2, 3)[:, :, 1] = torch.full((4, 2, 3), -1.0)
        x[0].view(-1)[:2] = 7.0
        return x

    found = found_by(assign, start(), patches=(*SLICE_ASSIGNMENT, VIEW_ARRAY))
    assert torch.equal(found, assign(start()))
    assert numbers[0] == numbers[1]


def test_a_bool_mask_is_written_by_torchax() -> None:
    def assign(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + 0
        x[mask] = -1.0
        return x

    given = start(), start() % 2 == 0
    assert torch.equal(
        found_by(assign, *given, patches=SLICE_ASSIGNMENT), assign(*given)
    )


def in_brackets(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    x = x + 0
    x[:, 1:3] = value
    return x


def through_a_view(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    x = x + 0
    x[:, 1:3].copy_(value)
    return x


@pytest.mark.parametrize(
    ("name", "assign"),
    [
        ("torchax-slice-assignment-tensor", in_brackets),
        ("torchax-slice-assignment-view", through_a_view),
    ],
)
def test_each_patch_joins_slices_where_torchax_scatters(name: str, assign: Any) -> None:
    (patch,) = (p for p in SLICE_ASSIGNMENT if p.name == name)

    def program(*patches: Patch) -> str:
        runtime = model_runtime(mesh=None, platform="cpu", patches=patches)
        call = jax.jit(traced(runtime, assign))
        return str(
            call.lower(start().numpy(), np.ones((4, 2, 6), np.float32)).as_text()
        )

    joined, plain = program(patch), program()
    assert "stablehlo.concatenate" in joined
    assert "stablehlo.scatter" not in joined
    assert "stablehlo.scatter" in plain
    assert "stablehlo.concatenate" not in plain


# --- the failure it cures


@torch.no_grad()
def rotated_transformer(patches: tuple[Patch, ...]) -> float:
    """How far a tiny CogVideoX transformer under jit is from torch, at batch 1."""
    module, inputs = make_transformer("5b"), transformer_inputs("5b", 1)
    expected = module(**inputs).sample
    runtime = model_runtime(
        mesh=None,
        platform="cpu",
        patches=(*patches, CONSTANTS, *PATCHES[1:]),
        overrides=FLOAT32_NORMS,
    )
    ported = PortedModule(module, runtime)
    weights = {name: to_numpy(t.detach()) for name, t in ported.tensors().items()}
    given = jax.tree.map(to_numpy, inputs)
    call = jax.jit(lambda weights, given: apply(ported, weights, **given)["sample"])
    return float((to_torch(call(weights, given)) - expected).abs().max())


def _copy_to_a_view(self: Any, key: Any, value: Any) -> None:
    self[key].copy_(value)


#: Makes ``x[key] = value`` what other models write as ``x[key].copy_(value)``.
THROUGH_A_VIEW = Patch(
    name="test-assign-through-a-view",
    target="torchax.tensor:Tensor.__setitem__",
    replacement=_copy_to_a_view,
    reason="the same program by the other way to write it",
    upstream="",
)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("torchax-slice-assignment-tensor", ()),
        ("torchax-slice-assignment-view", (THROUGH_A_VIEW,)),
    ],
)
def test_a_rotated_transformer_is_exact_with_each_patch_and_wrong_without(
    name: str, way: tuple[Patch, ...]
) -> None:
    """When the last line fails, jaxlib is fixed and the patch can go."""
    (patch,) = (p for p in SLICE_ASSIGNMENT if p.name == name)
    others = () if way else tuple(p for p in SLICE_ASSIGNMENT if p is not patch)
    assert (
        rotated_transformer((patch, *others, *way)) < TOLERANCES["transformer float32"]
    )
    assert rotated_transformer((*others, *way)) > 1e-3


def test_type_as_makes_a_new_tensor() -> None:
    assert TYPE_AS.name == "torchax-type-as"
    runtime = model_runtime(mesh=None, platform="cpu", patches=(TYPE_AS,))
    with runtime.tracing() as env:
        half = env.j2t_iso(jnp.ones((1, 2, 3, 3), jnp.bfloat16))
        full = half.float()
        found = full.type_as(half)
        assert (full.dtype, found.dtype) == (torch.float32, torch.bfloat16)
        # The check of torch itself, before any of torchax's own code.
        weight = env.j2t_iso(jnp.ones((2, 2, 1, 1), jnp.bfloat16))
        bias = env.j2t_iso(jnp.ones((2,), jnp.bfloat16))
        assert torch.nn.functional.conv2d(found, weight, bias).dtype == torch.bfloat16
