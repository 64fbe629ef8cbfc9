"""Tells whether a call changed tensors that live on: of its module, of its arguments.

A denoiser may keep keys and values of frames that are done. Such a call is made again
when a run goes on; others need not be.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tpuport.core.seam.device_tensors import version
from tpuport.core.seam.journal import Asked
from tpuport.core.seam.module_state import Attributes, ModuleTree
from tpuport.core.seam.values import FormError, take_apart

_Seen = list[tuple[torch.Tensor, int]]
"""Tensors, and how often each was written to."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a call may change, at one moment.

    Attributes:
        own: the tensors in attributes of the module.
        given: those in the arguments.
    """

    own: _Seen
    given: _Seen

    def same(self, other: Look) -> bool:
        """Whether the tensors are the same ones, and nothing was written to them."""
        return _same(self.own, other.own) and _same(self.given, other.given)

    def digest(self, before: Look) -> int:
        """A digest of the arguments that a call since ``before`` only read."""
        old = {id(tensor): version for tensor, version in before.given}
        found = 0
        for tensor, count in self.given:
            if old.get(id(tensor)) == count:
                data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                found = zlib.crc32(data.numpy(), found)
        return found


class StateWatch:
    """Looks at what calls of one module may change."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._attributes = Attributes(ModuleTree(module))

    def look(self, asked: Asked) -> Look:
        """The tensors in the module's attributes, and in the arguments of a call."""
        given: list[torch.Tensor] = []
        try:
            take_apart((asked.args, asked.kwargs), given, [])
        except FormError:  # a collection that no program takes
            given = [torch.empty(0)]
        return Look(_seen(self._attributes.state().tensors), _seen(given))


def _seen(tensors: Iterable[torch.Tensor]) -> _Seen:
    return [(tensor, version(tensor)) for tensor in tensors]


def _same(one: _Seen, other: _Seen) -> bool:
    now, before = ([(id(tensor), n) for tensor, n in seen] for seen in (one, other))
    return now == before
