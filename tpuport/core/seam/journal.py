"""The calls of a port's modules, and the arrays that are on the devices already."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding

from tpuport.core.arrays import to_numpy
from tpuport.core.reports import CompileReport, Reporter
from tpuport.errors import UsageError


@dataclass(frozen=True, slots=True)
class Called:
    """One call of a module by upstream's code.

    Attributes:
        name: of the module: its component, and the path within.
        started: on the clock of :func:`time.perf_counter`.
        seconds: until the result was on the host.
        compiled: the program that was made for the call; ``None`` if there was one.
    """

    name: str
    started: float
    seconds: float
    compiled: CompileReport | None = None

    @property
    def component(self) -> str:
        """The component of the pipeline."""
        return self.name.partition(".")[0]


class Journal:
    """The last calls of a port, and who is told of them."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.calls: deque[Called] = deque(maxlen=1 << 16)
        self.on_call: Callable[[str], None] = lambda name: None


@dataclass(kw_only=True, slots=True)
class Uploads:
    """Arrays of tensors that are on the devices already."""

    sharding: NamedSharding
    _known: dict[int, tuple[Any, int, jax.Array]] = field(default_factory=dict)

    def array(self, tensor: torch.Tensor) -> jax.Array:
        """The tensor on the devices; uploaded once if nothing writes to it."""
        if tensor.is_inference():
            return self._put(tensor)
        known = self._known.get(id(tensor))
        if known and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        array = self._put(tensor)
        self.note(tensor, array)
        return array

    def note(self, tensor: torch.Tensor, array: jax.Array) -> None:
        """``array`` is ``tensor`` on the devices."""
        key = id(tensor)
        known = self._known

        def forget(_: Any) -> None:
            known.pop(key, None)

        known[key] = (weakref.ref(tensor, forget), tensor._version, array)

    def _put(self, tensor: torch.Tensor) -> jax.Array:
        try:
            return jax.device_put(to_numpy(tensor), self.sharding)
        except OverflowError as error:
            raise UsageError(
                f"an argument {tensor.dtype} {[*tensor.shape]} has {error}; programs "
                "count in 32 bits"
            ) from None
