"""Small pipelines of diffusers with random weights, one for each class that we know.

``examples.yaml`` describes them. Weights, prompts and noise follow from fixed seeds, so
upstream's pipeline and a ported one see equal numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import diffusers
import numpy as np
import torch
import transformers
import yaml
from diffusers.pipelines import ltx2
from torch.nn.attention import flex_attention

from tests.pipelines import parts
from tpuport.core.pipelines.small import without_cleaning

Made = tuple[Any, dict[str, Any]]
"""A pipeline, and the keywords of its call, a generator left out."""


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


class _Named(NamedTuple):
    """A class or function, and what it is given."""

    name: str
    given: Any


class _Loader(yaml.SafeLoader):
    """Reads ``!NAME`` as :class:`_Named`."""


def _named(loader: _Loader, name: str, node: Any) -> _Named:
    mapping = isinstance(node, yaml.MappingNode)
    read = loader.construct_mapping if mapping else loader.construct_sequence
    return _Named(name, read(node, deep=True))


_Loader.add_multi_constructor("!", _named)


def read(file: Path) -> dict[str, Any]:
    """A file in the notation of ``examples.yaml``; :func:`built` makes its values."""
    found: dict[str, Any] = yaml.load(file.read_text(), _Loader)
    return found


@functools.cache
def all_examples() -> dict[str, Example]:
    """Every example, by class."""
    described = read(Path(__file__).with_name("examples.yaml"))["examples"]
    return {
        name: Example(
            name=name,
            make=functools.partial(_make, name.partition("-")[0], parts, others, call),
            **about,
        )
        for name, about in described.items()
        for parts, others, call in [
            (about.pop("parts"), about.pop("others", {}), about.pop("call"))
        ]
    }


def _make(
    name: str,
    first: Mapping[str, Any],
    others: Mapping[str, Any],
    call: Mapping[str, Any],
) -> Made:
    """The pipeline of a class with its parts, and the keywords of its call."""
    made: dict[str, Any] = {}
    tokenizer: Any = None
    rest = {part: value for part, value in others.items() if part not in first}
    for part, value in (*first.items(), *rest.items()):
        made[part] = built(value, tokenizer)
        tokenizer = made[part] if "tokenizer" in part else tokenizer
    kind = getattr(diffusers, name)
    if issubclass(kind, diffusers.ModularPipeline):
        pipeline = kind()
        pipeline.update_components(**made)
    else:
        pipeline = kind(**made)
    given = {k: built(v) for k, v in call.items() if v is not None}
    return pipeline, given


def built(value: Any, tokenizer: Any = None) -> Any:
    """What a value describes; a tokenizer gives the numbers that the value names."""
    if isinstance(value, dict):
        return {name: built(one, tokenizer) for name, one in value.items()}
    if type(value) is list:
        return [built(one, tokenizer) for one in value]
    if isinstance(value, str) and value.startswith("$"):
        return _number(value[1:], tokenizer)
    if not isinstance(value, _Named):
        return value
    kind, given = _class_of(value.name), built(value.given, tokenizer)
    if isinstance(given, list):
        return kind(*given)
    if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
        return kind(kind.config_class(**given))
    return kind(**given)


def _number(name: str, tokenizer: Any) -> int:
    word, _, more = name.partition("+")
    if word == "words":
        return len(tokenizer) + int(more or 0)
    if word in ("bos", "eos", "pad"):
        return int(getattr(tokenizer, f"{word}_token_id"))
    return int(tokenizer.convert_tokens_to_ids(name))


def _class_of(path: str) -> Any:
    name, *rest = path.split(".")
    for place in (parts, diffusers, transformers, ltx2, SimpleNamespace(torch=torch)):
        if (found := getattr(place, name, None)) is not None:
            return functools.reduce(getattr, rest, found)
    raise ValueError(f"nobody has {path}")


def made(one: Example) -> Made:
    """The pipeline in float32 and evaluation mode, and the keywords of its call."""
    torch.manual_seed(0)
    pipeline, call = one.make()
    without_cleaning()
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


def saved(pipeline: Any, folder: Path) -> Path:
    """The folder, with the pipeline as ``save_pretrained`` writes it."""
    modular = isinstance(pipeline, diffusers.ModularPipeline)
    pipeline.save_pretrained(
        str(folder), **{"overwrite_modular_index": True} if modular else {}
    )
    return folder
