"""Training goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from training.demo import loop
from training.demo.loop import Drawn, Recipe, train


def trained(steps: int, checkpoint: Path, *, until: int | None = None) -> torch.Tensor:
    """Weights of a small model; ``until`` a step, at which the process dies."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def draw(step: int, generator: torch.Generator) -> Drawn:
        if step == until:
            raise KeyboardInterrupt
        return {"given": torch.randn(16, 4, generator=generator)}

    def loss(given: torch.Tensor) -> torch.Tensor:
        return (model(given) - given.sum(1, keepdim=True)).square().mean()

    recipe = Recipe(steps, rate=1e-2, warmup=5, mean=0.9, products=r"0\.weight")
    train([model], draw, loss, recipe, checkpoint)
    return torch.cat([weight.flatten() for weight in model.parameters()]).detach()


def test_a_run_that_died_ends_as_if_it_had_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(40, tmp_path / "whole.pt")
    monkeypatch.setattr(loop, "_KEEP", 0.0)
    with pytest.raises(KeyboardInterrupt):
        trained(40, tmp_path / "died.pt", until=23)
    assert torch.equal(trained(40, tmp_path / "died.pt"), expected)
    assert not torch.equal(trained(41, tmp_path / "other.pt"), expected)


def test_training_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(600, tmp_path / "one.pt")
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] / 10


def test_a_loss_that_is_no_number_ends_it(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="the mean loss of steps up to 99 is nan"):
        train(
            [model],
            lambda step, generator: {"given": torch.full((1, 1), torch.nan)},
            lambda given: model(given).sum(),
            Recipe(100, rate=1e-3),
            tmp_path / "one.pt",
        )
