"""The place between upstream's pipeline and its modules.

Upstream's code on the host calls a module; the outermost ``forward`` that is called runs
as a compiled program. A loop that upstream keeps on the host (chunks, frames, tiles of an
autoencoder) stays there, and the forwards that the loop calls are the programs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tpuport.core.seam.entry import Entry, Target, Uploads
from tpuport.core.tracing.context import tracing_now


class Seam:
    """Stands at the forwards of some components until :meth:`close`.

    Args:
        components: name -> module. Every ``forward`` in them is taken over.
        target: what programs are made for.
    """

    def __init__(
        self, components: Mapping[str, torch.nn.Module], target: Target
    ) -> None:
        self.target = target
        self.entries: dict[str, Entry] = {}
        self._uploads = Uploads(sharding=target.replicated)
        self._held: list[tuple[torch.nn.Module, Any]] = []
        for name, component in components.items():
            for path, module in component.named_modules():
                self._stand_at(f"{name}.{path}".rstrip("."), module)

    def close(self) -> None:
        """Give the modules their own forward back, and the devices their memory."""
        for module, before in reversed(self._held):
            vars(module).pop("forward", None)
            if before is not None:
                vars(module)["forward"] = before
        self._held.clear()
        self.entries.clear()

    def _stand_at(self, name: str, module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
            return
        original = module.forward
        entries, target, uploads = self.entries, self.target, self._uploads

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if tracing_now():
                return original(*args, **kwargs)
            entry = entries.get(name)
            if entry is None:
                entry = entries[name] = Entry(module, original, name, target, uploads)
            return entry(*args, **kwargs)

        self._held.append((module, vars(module).get("forward")))
        vars(module)["forward"] = forward


def modules_of(pipeline: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The components of a pipeline that are torch modules."""
    found: Iterable[tuple[str, Any]] = pipeline.components.items()
    for name, component in found:
        if isinstance(component, torch.nn.Module):
            yield name, component
