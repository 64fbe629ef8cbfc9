"""Two calls of one step as one program: when, and with which numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import tpuport
from tpuport.core.reports import Reporter
from tpuport.core.seam import program_runs
from tpuport.core.seam.entry import Entry
from tpuport.core.seam.ported import seam_of


class Denoiser(torch.nn.Module):
    """One of one item of the batch: nothing else uses the axis ``dp``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.text = torch.nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, timestep: torch.Tensor, prompt: torch.Tensor
    ) -> tuple[torch.Tensor]:
        mixed = self.inner(x) + self.text(prompt).mean(0) * timestep.cos()
        return (mixed.softmax(-1),)


X = torch.linspace(-1, 1, 12).reshape(3, 4)
T = torch.tensor([0.3])
PROMPT, OTHER = X * 2, X.flip(0) - 1


@pytest.fixture
def module() -> Denoiser:
    torch.manual_seed(1)
    return Denoiser()


@pytest.fixture
def ported(module: Denoiser) -> Iterator[torch.nn.Module]:
    twin = tpuport.port(module, mesh="dp=2,sp=2")
    yield twin
    tpuport.unport(twin)


def runs(ported: torch.nn.Module) -> list[tuple[bool, ...]]:
    """By which inputs differ, the programs that were compiled; () is one call."""
    (entry,) = seam_of(ported).entries.values()
    assert isinstance(entry, Entry)
    return [run for program in entry.programs for run in program.runs]


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(torch.allclose(found, expected, rtol=0, atol=1e-6))


@pytest.mark.parametrize(
    ("mesh", "other", "reads", "expected"),
    [
        ("dp=2,sp=2", OTHER, False, (False, False, True)),
        ("dp=2,sp=2", OTHER, True, ()),
        ("dp=2,sp=2", PROMPT, False, ()),
        ("sp=2", OTHER, False, ()),
    ],
    ids=["as one", "read between", "equal calls", "nothing to gain"],
)
def test_two_calls_run_as_one_if_nobody_read_between_and_both_gain(
    mesh: str,
    other: torch.Tensor,
    reads: bool,
    expected: tuple[bool, ...],
    module: Denoiser,
) -> None:
    twin = tpuport.port(module, mesh=mesh)
    for _ in range(2):
        first = twin(X, T, PROMPT)[0]
        if reads:
            first = first * 1
        (second,) = twin(X, T, other)
        assert close(first, module(X, T, PROMPT)[0])
        assert close(second, module(X, T, other)[0])
    assert runs(twin) == [expected]


def test_arithmetic_on_an_answer_waits_for_the_second_call(
    module: Denoiser, ported: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_runs, "FEWEST", 1)
    first = ported(X, T, PROMPT)[0].mul_(2)[None]
    second = ported(X, T, OTHER)[0]
    mixed = first + 3 * (second - first)
    one, other = 2 * module(X, T, PROMPT)[0][None], module(X, T, OTHER)[0]
    assert close(mixed.on_host(), one + 3 * (other - one))
    assert runs(ported) == [(False, False, True)]


def test_a_call_that_waits_has_the_numbers_of_its_time(
    module: Denoiser, ported: torch.nn.Module
) -> None:
    x = X.clone()
    expected = module(x, T, PROMPT)[0].detach()
    (first,) = ported(x, T, PROMPT)
    x += 1
    (second,) = ported(x, T, OTHER)
    assert close(first, expected)
    assert close(second, module(x, T, OTHER)[0])
    with torch.no_grad():
        (third,) = ported(x, T, PROMPT)
        expected = module(x, T, PROMPT)[0]
        module.inner.weight.data = module.inner.weight * 2
        (fourth,) = ported(x, T, OTHER)
        assert close(third, expected)
        assert close(fourth, module(x, T, OTHER)[0])


def free(ported: torch.nn.Module) -> None:
    (entry,) = seam_of(ported).entries.values()
    entry.free()


@pytest.mark.parametrize("leave", [free, tpuport.unport])
def test_weights_that_leave_the_devices_answer_the_call_that_waits(
    leave: Callable[[torch.nn.Module], object], module: Denoiser
) -> None:
    """Another component may need the room, and the weights change before a read."""
    twin = tpuport.port(module, mesh="dp=2,sp=2")
    (first,) = twin(X, T, PROMPT)
    expected = module(X, T, PROMPT)[0].detach()
    leave(twin)
    with torch.no_grad():
        module.inner.weight.mul_(2)
    assert close(first, expected)


def test_calls_that_cannot_be_one_run_one_by_one(
    module: Denoiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Callable[..., object]:
        def both(*_: object) -> object:
            raise NotImplementedError("no rule for a batch")

        return both

    monkeypatch.setattr(program_runs, "together", fails)
    said: list[str] = []
    reporter = Reporter()
    monkeypatch.setattr(reporter, "say", said.append)
    twin = tpuport.port(module, mesh="dp=2,sp=2", reporter=reporter)
    for _ in range(2):
        (first,), (second,) = twin(X, T, PROMPT), twin(X, T, OTHER)
        assert close(first, module(X, T, PROMPT)[0])
        assert close(second, module(X, T, OTHER)[0])
    assert any("one by one (no rule for a batch)" in line for line in said), said
    assert runs(twin) == [()]
