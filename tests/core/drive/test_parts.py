"""Each part of a module is compared on what upstream gave the part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tpuport import targets
from tpuport.core.drive.parts import Apart, Parts, PartsError, first_apart, recorded
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.spec.run_settings import RunSettings


class Inner(torch.nn.Module):
    """Doubles, or nearly so."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Outer(torch.nn.Module):
    """Two parts, of which the second makes what the first does small."""

    def __init__(self, factor: float = 2.0, shrink: float = 1e-6) -> None:
        super().__init__()
        self.first, self.second = Inner(factor), torch.nn.Linear(4, 4)
        self.shrink = shrink
        with torch.no_grad():
            self.second.weight.copy_(torch.eye(4))

    def forward(self, x: torch.Tensor, steps: list[int]) -> torch.Tensor:
        steps.append(1)
        return self.second(self.first(x) * self.shrink) + 1


class Padded(Outer):
    """Hands over more than upstream does, as patches do."""

    def forward(self, x: torch.Tensor, steps: list[int]) -> torch.Tensor:
        more = self.first(torch.nn.functional.pad(x, (0, 3)))
        return self.second(more[..., :4] * self.shrink) + 1


class Alone(Outer):
    """Does without the first part, as native blocks do."""

    def forward(self, x: torch.Tensor, steps: list[int]) -> torch.Tensor:
        return self.second(x * 2 * self.shrink) + 1


class Asks(Outer):
    """Cannot become a program."""

    def forward(self, x: torch.Tensor, steps: list[int]) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x, steps)


class Cancels(torch.nn.Module):
    """Adds a sum that is zero but for rounding, which is another in a program."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = (x - x.mean(-1, keepdim=True)).sum(-1, keepdim=True)
        return torch.complex(x + left, x).conj().imag * self.factor


class AsksForFloat32(Inner):
    """Does not run in float64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return super().forward(x)


def found(ours: torch.nn.Module) -> Apart | None:
    torch.manual_seed(0)
    theirs, call = Outer(), (torch.rand(2, 4), [])
    theirs.second.load_state_dict(ours.second.state_dict())  # type: ignore[operator]
    return parts(ours, theirs, *call).apart


def parts(ours: torch.nn.Module, theirs: torch.nn.Module, *call: Any) -> Parts:
    with recorded(theirs) as records, torch.no_grad():
        theirs(*call)
    placed = targets.place_for_port(MeshSpec())
    target = targets.general_target(placed, RunSettings())
    return first_apart(ours, theirs, "", records, target)


@pytest.mark.parametrize("make", [Outer, Padded, Alone])
def test_what_is_as_upstreams_is_no_fault(make: Callable[[], Any]) -> None:
    assert found(make()) is None


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: Outer(2.001), "first"),  # of which 1e-9 is left in the result
        (lambda: Outer(shrink=1e-2), ""),
        (lambda: Alone(shrink=1e-2), ""),
    ],
)
def test_the_part_that_differs_is_named(make: Callable[[], Any], path: str) -> None:
    told = found(make())
    assert told is not None
    assert told.path == path
    assert told.apart > told.allowed


def test_parts_that_become_no_program_are_told() -> None:
    with pytest.raises(PartsError, match=r"test_parts\.py"):
        found(Asks())


def test_an_operator_is_not_named_for_the_rounding_of_those_before() -> None:
    torch.manual_seed(0)
    told = parts(Cancels(2.001), Cancels(), torch.randn(8, 77)).apart
    assert told is not None
    assert told.op == "mul"


@pytest.mark.parametrize(("factor", "path"), [(2.00001, None), (2.001, "")])
def test_what_does_not_run_in_float64_may_differ_by_the_most(
    factor: float, path: str | None
) -> None:
    told = parts(AsksForFloat32(factor), AsksForFloat32(), torch.rand(2, 4))
    assert not told.measured
    assert (told.apart and told.apart.path) == path
    assert parts(Inner(), Inner(), torch.rand(2, 4)).measured
