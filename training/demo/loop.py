"""A loop that trains, keeps a running mean of the weights, and resumes where it was."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

#: Seconds between two checkpoints.
_KEEP = 120.0
#: Steps between two lines.
_SHOWN = 100


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        steps: all of them.
        rate: the highest learning rate.
        warmup: steps until there.
        mean: how much of the running mean of the weights stays at each step.
        seed: of all that is drawn.
        half: compute in bfloat16, as autocast does.
        products: a regex of the weights that Muon trains.
    """

    steps: int
    rate: float
    warmup: int = 200
    mean: float = 0.998
    seed: int = 0
    half: bool = False
    products: str = ""


def device() -> torch.device:
    """A GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


Drawn = dict[str, torch.Tensor]
Shapes = tuple[torch.Size, ...]


def train(
    modules: Sequence[nn.Module],
    draw: Callable[[int, torch.Generator], Drawn],
    loss: Callable[..., torch.Tensor],
    recipe: Recipe,
    checkpoint: Path,
) -> None:
    """Minimise ``loss``; at the end the modules have the running mean of their weights.

    Args:
        modules: what is trained, in place.
        draw: the tensors of a step, on the device, given its number and a CPU generator
            that depends on the seed and the step alone, so that a resumed run draws
            what it would have drawn.
        loss: takes what ``draw`` gave by name; on a GPU it is recorded once for tensors
            of one shape.
        recipe: how.
        checkpoint: a file, written every two minutes and at the end. Where it is there,
            training goes on from it.
    """
    weights = [p for module in modules for p in module.parameters()]
    means = [weight.detach().clone() for weight in weights]
    optimizers = _optimizers(modules, recipe)
    first = _resumed(checkpoint, weights, means, optimizers)

    def slopes(drawn: Drawn) -> torch.Tensor:
        # Some CPUs have units for bfloat16, ten times as fast.
        with torch.autocast(device().type, torch.bfloat16, enabled=recipe.half):
            value = loss(**drawn)
        value.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        return value.detach()

    recorded = _Recorded(slopes, weights)
    total, counted = torch.zeros((), device=device()), 0
    began = kept = time.monotonic()
    for step in range(first, recipe.steps):
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        total += recorded(draw(step, generator))
        counted += 1
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate * _share(step, recipe)
            optimizer.step()
        share = min(recipe.mean, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(means, weights, 1 - share)
        if step % _SHOWN == _SHOWN - 1:
            mean = float(total) / counted
            each = (time.monotonic() - began) / (step - first + 1)
            print(f"step {step + 1} loss {mean:.5f} {each * 1000:.0f} ms", flush=True)
            if not math.isfinite(mean):
                raise ValueError(f"the mean loss of steps up to {step} is {mean}")
            counted = 0
            total.zero_()
        if time.monotonic() - kept > _KEEP or step == recipe.steps - 1:
            _keep(checkpoint, step + 1, weights, means, optimizers)
            kept = time.monotonic()
    with torch.no_grad():
        torch._foreach_copy_(weights, means)


def _optimizers(
    modules: Sequence[nn.Module], recipe: Recipe
) -> list[torch.optim.Optimizer]:
    """Muon for the products of blocks, AdamW for all else."""
    named = [pair for module in modules for pair in module.named_parameters()]
    products = [p for n, p in named if p.ndim == 2 and re.fullmatch(recipe.products, n)]
    others = [p for _, p in named if not any(p is one for one in products)]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, betas=(0.9, 0.99), weight_decay=0.01)
    ]
    if products:
        made.append(
            torch.optim.Muon(
                products, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
            )
        )
    return made


class _Recorded:
    """The gradients of a step; on a GPU by a graph of kernels, one for each shape.

    A small model's step has thousands of small kernels, which take longer to start one
    by one than to run.
    """

    def __init__(
        self, slopes: Callable[[Drawn], torch.Tensor], weights: Sequence[nn.Parameter]
    ) -> None:
        self._slopes, self._weights = slopes, weights
        self._calls: Counter[Shapes] = Counter()
        self._graphs: dict[Shapes, tuple[Any, Drawn, torch.Tensor]] = {}

    def __call__(self, drawn: Drawn) -> torch.Tensor:
        shapes = tuple(one.shape for one in drawn.values())
        self._calls[shapes] += 1
        if device().type == "cpu":
            return self._fresh(drawn)
        if (
            self._calls[shapes] <= 3
        ):  # kernels choose their ways before they are recorded
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                value = self._fresh(drawn)
            torch.cuda.current_stream().wait_stream(stream)
            return value
        if shapes not in self._graphs:
            given = {name: one.clone() for name, one in drawn.items()}
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                value = self._fresh(given)
            self._graphs[shapes] = graph, given, value
        graph, given, value = self._graphs[shapes]
        for name, one in drawn.items():
            given[name].copy_(one)
        graph.replay()
        return value

    def _fresh(self, drawn: Drawn) -> torch.Tensor:
        for weight in self._weights:
            if weight.grad is not None:
                weight.grad.zero_()
        return self._slopes(drawn)


def _share(step: int, recipe: Recipe) -> float:
    """The learning rate's share: up over the first steps, down over the last fifth.

    In between it stays, so that a run can be made longer where it was not long enough.
    """
    up = (step + 1) / recipe.warmup
    down = (recipe.steps - step) / (0.2 * recipe.steps)
    return min(1.0, up, down)


def _resumed(
    checkpoint: Path,
    weights: list[nn.Parameter],
    means: list[torch.Tensor],
    optimizers: list[torch.optim.Optimizer],
) -> int:
    """The step to go on with; fills weights, means and optimizers from the file."""
    if not checkpoint.exists():
        return 0
    kept = torch.load(checkpoint, map_location="cpu", weights_only=True)
    with torch.no_grad():
        for name, places in (("weights", weights), ("means", means)):
            for place, value in zip(places, kept[name], strict=True):
                place.copy_(value)
    for optimizer, state in zip(optimizers, kept["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    print(f"goes on from step {kept['step']} of {checkpoint}", flush=True)
    return int(kept["step"])


def _keep(
    checkpoint: Path,
    step: int,
    weights: list[nn.Parameter],
    means: list[torch.Tensor],
    optimizers: list[torch.optim.Optimizer],
) -> None:
    part = checkpoint.with_suffix(".part")
    torch.save(
        {
            "step": step,
            "weights": [weight.detach() for weight in weights],
            "means": means,
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        },
        part,
    )
    part.replace(checkpoint)
