"""Small modules of diffusers with random weights, for what no video pipeline has.

    python -m tests.modules.small > table.md

The transformers and autoencoders of the examples are there too, with the arguments of
the first calls that upstream's pipeline makes. The command makes the table of modules:
how near the port comes, and the share of the parameters that lies in stacked blocks.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch.utils import _pytree as pytree

import tests.conftest  # noqa: F401  (the devices, before jax is imported)
import tpuport
from tests.pipelines.example import (
    Example,
    all_examples,
    built,
    made,
    prepared,
    read,
    run,
)
from tpuport.core.seam.blocks import alike_blocks, named_in
from tpuport.errors import TpuportError

KINDS = ("transformers", "autoencoders")
CONFIGS: dict[str, Any] = read(Path(__file__).with_name("modules.yaml"))["modules"]
"""By class; a class that an example holds needs none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of one module's method.

    Attributes:
        module: upstream's.
        method: ``forward``, ``encode`` or ``decode``.
        args, kwargs: of the call.
    """

    module: torch.nn.Module
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The class, and the method if it is not ``forward``."""
        path = (type(self.module).__name__, self.method)
        return ".".join(path).removesuffix(".forward")

    def on(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """The tensors that a module answers with."""
        torch.manual_seed(1)  # for modules that draw
        kwargs = {name: _again(value) for name, value in self.kwargs.items()}
        with torch.no_grad():
            return tensors_of(getattr(module, self.method)(*self.args, **kwargs))

    def difference(self, mesh: str) -> float:
        """The largest difference of the port, as a share of upstream's largest value.

        NaN and another shape count as infinite.
        """
        expected = self.on(self.module)
        found = self.on(tpuport.port(self.module, mesh=mesh, progress=False))
        if [x.shape for x in found] != [x.shape for x in expected]:
            return math.inf
        return largest(found, expected)

    def from_float64(self, found: list[torch.Tensor]) -> float:
        """The largest difference from upstream's result in float64, as a share."""
        module = copy.deepcopy(self.module).double()
        with torch.no_grad():
            exact = getattr(module, self.method)(
                *map(_doubled, self.args),
                **{name: _doubled(value) for name, value in self.kwargs.items()},
            )
        return largest(found, tensors_of(exact))


def _again(value: Any) -> Any:
    """The value; a generator begins anew with each call."""
    if isinstance(value, torch.Generator):
        return torch.Generator().manual_seed(value.initial_seed())
    return value


def _doubled(value: Any) -> Any:
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floats else value


def largest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, as a share of the largest value; NaN is infinite."""
    worst = max(
        float((f - e).abs().max() / e.abs().max())
        for f, e in zip(found, expected, strict=True)
        if e.numel()
    )
    return worst if worst == worst else math.inf


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in what a module gives back, such as an output or a distribution."""
    if isinstance(value, torch.Tensor):
        plain = torch.view_as_real(value) if value.is_complex() else value
        return [plain if plain.dtype == torch.float64 else plain.float()]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        value = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [tensor for part in value for tensor in tensors_of(part)]


def configured(name: str) -> list[Call]:
    """The forward of a class in ``CONFIGS``; of an autoencoder its halves too."""
    inputs = built(CONFIGS[name]["inputs"])
    torch.manual_seed(0)
    module = prepared(getattr(diffusers, name)(**built(CONFIGS[name]["config"])))
    calls = [Call(module=module, method="forward", kwargs=inputs)]
    if hasattr(module, "decode"):
        (sample,) = inputs.values()
        calls.append(Call(module=module, method="encode", args=(sample,), kwargs={}))
        with torch.no_grad():
            (latents, *_) = module.encode(sample, return_dict=False)
        if not isinstance(latents, torch.Tensor):
            latents = latents.mode()
        calls.append(Call(module=module, method="decode", args=(latents,), kwargs={}))
    return calls


def called(one: Example) -> list[Call]:
    """The first call of each module of an example, as upstream's pipeline makes it."""
    pipeline, call = made(one)
    found: dict[str, Call] = {}
    for component in pipeline.components.values():
        kind = type(component).__module__
        if not any(kind.startswith(f"diffusers.models.{k}") for k in KINDS):
            continue
        for method in ("forward", "encode", "decode"):
            if hasattr(component, method):
                vars(component)[method] = _noting(component, method, found)
    run(pipeline, call)
    for noted in found.values():
        for method in ("forward", "encode", "decode"):
            vars(noted.module).pop(method, None)
    return list(found.values())


def _noting(module: Any, method: str, found: dict[str, Call]) -> Callable[..., Any]:
    original = getattr(module, method)

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        noted = Call(module=module, method=method, args=given[0], kwargs=given[1])
        found.setdefault(noted.name, noted)
        return original(*args, **kwargs)

    return noting


def share(name: str) -> float | None:
    """The part of a class's parameters in stacks; ``None`` without defaults.

    Children that no method of the class's file names are in no program, such as heads
    that a pipeline calls by themselves: they do not count.
    """
    try:
        with torch.device("meta"):
            module = getattr(diffusers, name)()
    except (TypeError, ValueError):
        return None
    held = 0
    for stack in alike_blocks(module):
        held += sum(p.numel() for block in stack.blocks for p in block.parameters())
    named = named_in(type(module).__module__)
    used = [child for name, child in module.named_children() if name in named]
    own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return held / (own + sum(p.numel() for c in used for p in c.parameters()))


def _all_calls() -> Iterator[Call]:
    for name in CONFIGS:
        yield from configured(name)
    for one in all_examples().values():
        if not one.refused:
            yield from called(one)


def main() -> None:
    """Print the table."""
    known: set[str] = set()
    print("| module | largest difference | in stacks, by default |")
    print("| --- | --- | --- |")
    for call in _all_calls():
        if call.name in known:
            continue
        known.add(call.name)
        try:
            worst = call.difference("dp=1")
            told = f"{worst:.0e}" if worst < 1e-5 else f"**{worst:.0e}**"
        except TpuportError as error:
            told = f"no: {error}"
        part = share(type(call.module).__name__)
        stacks = "-" if part is None else f"{part:.0%}"
        print(f"| {call.name} | {told} | {stacks} |", flush=True)


if __name__ == "__main__":
    main()
