"""Small pipelines of diffusers with random weights, one for each class that we know.

A family's file makes them with ``@example(...)``. Weights, prompts and noise follow
from fixed seeds, so upstream's pipeline and a ported one see equal numbers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import torch
from torch.nn.attention import flex_attention

Made = tuple[Any, dict[str, Any]]
"""A pipeline, and the keywords of its call, a generator left out."""

FAMILIES = (
    "animatediff",
    "cogvideox",
    "cosmos",
    "hunyuan",
    "kandinsky",
    "ltx",
    "modular.pictures",
    "modular.videos",
    "others",
    "sana",
    "wan",
)
"""The files of this folder that hold examples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One pipeline class.

    Attributes:
        name: of the class in diffusers.
        make: makes the pipeline and the keywords of its call.
        kind: what is special, in a few words, for the table.
        refused: why the class does not run; empty if it does.
        gate: whether the default run of the tests has it; others are ``slow``.
    """

    name: str
    make: Callable[[], Made]
    kind: str = ""
    refused: str = ""
    gate: bool = False


EXAMPLES: dict[str, Example] = {}


def example(
    name: str, *, kind: str = "", refused: str = "", gate: bool = False
) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Register a function that makes a pipeline of the class ``name``."""

    def register(make: Callable[[], Made]) -> Callable[[], Made]:
        assert name not in EXAMPLES, name
        EXAMPLES[name] = Example(
            name=name, make=make, kind=kind, refused=refused, gate=gate
        )
        return make

    return register


def all_examples() -> dict[str, Example]:
    """Every example, by class."""
    for family in FAMILIES:
        importlib.import_module(f"tests.pipelines.{family}")
    return EXAMPLES


def made(one: Example) -> Made:
    """The pipeline in float32 and evaluation mode, and the keywords of its call."""
    torch.manual_seed(0)
    pipeline, call = one.make()
    _leave_prompts()
    # Torch's compiler takes seconds, and fails once torchax is imported.
    torch.compiler.set_stance("force_eager")
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    for component in pipeline.components.values():
        if isinstance(component, torch.nn.Module):
            prepared(component)
    if hasattr(pipeline, "set_progress_bar_config"):
        pipeline.set_progress_bar_config(disable=True)
    return pipeline, call


def prepared(module: torch.nn.Module) -> torch.nn.Module:
    """The module in float32 and evaluation mode, with no weight that is zero."""
    # Torch's compiler takes seconds, and fails once torchax is imported.
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    # Layers that begin as zeros would hide all that comes before them.
    for weight in module.parameters():
        if not weight.any():
            torch.nn.init.normal_(weight, std=0.1)
    return module.eval().float()


def _leave_prompts() -> None:
    """Let upstream leave prompts as they are if ``ftfy`` is missing.

    Pipelines clean prompts with that package, which diffusers does not install. The
    prompts here are clean.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("diffusers.") and hasattr(module, "basic_clean"):
            vars(module).setdefault("ftfy", SimpleNamespace(fix_text=str))


def run(pipeline: Any, call: dict[str, Any]) -> list[np.ndarray]:
    """The arrays that a call makes: frames in [0, 1], and sound where there is some."""
    torch.manual_seed(3)  # for pipelines that draw without the generator
    generator = torch.Generator("cpu").manual_seed(3)
    out = pipeline(**{"output_type": "np", **call}, generator=generator)
    return [np.asarray(value) for value in out.values() if value is not None]


def difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference; NaN and another shape count as infinite.

    Of arrays beyond [-1, 1], such as frames in linear light, a share of the largest
    value.
    """
    assert len(found) == len(expected)
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape or not np.isfinite(other).all():
            return float("inf")
        scale = max(1.0, float(np.abs(other).max()))
        worst = max(worst, float(np.abs(one - other).max()) / scale)
    return worst if worst == worst else float("inf")


def seeded(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers of a shape."""
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed))


def saved(pipeline: Any, folder: Path) -> Path:
    """The folder, with the pipeline as ``save_pretrained`` writes it."""
    modular = isinstance(pipeline, diffusers.ModularPipeline)
    pipeline.save_pretrained(
        str(folder), **{"overwrite_modular_index": True} if modular else {}
    )
    return folder
