"""The calls of a port's modules, and the arrays that are on the devices already."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import torch
from jax.sharding import NamedSharding

from tpuport.core.arrays import to_numpy
from tpuport.core.reports import CompileReport, Reporter
from tpuport.core.seam.device_tensors import DeviceTensor
from tpuport.errors import UsageError


@dataclass(frozen=True, slots=True)
class Called:
    """One call of a module by upstream's code.

    Attributes:
        name: of the module: its component, and the path within.
        started: on the clock of :func:`time.perf_counter`.
        seconds: until the result was there; a denoiser's, until the call was made.
        compiled: the program that was made for the call; ``None`` if there was one.
    """

    name: str
    started: float
    seconds: float
    compiled: CompileReport | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A call that upstream's pipeline makes.

    Attributes:
        name: the component, and the path or the method within.
        module: what is called.
        args, kwargs: of the call.
        answer: makes the call.
    """

    name: str
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: Callable[..., Any]

    def run(self) -> Any:
        """The result."""
        return self.answer(*self.args, **self.kwargs)


class Between(Protocol):
    """What computes between the calls of modules."""

    def compute(self, *, everything: bool = True) -> None:
        """Compute what was recorded; not everything: what waits for no call."""

    def step(self) -> Callable[[], None] | None:
        """A scheduler's step ended; gives what waits for a result that is not there."""

    def of_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that was on the devices when it was recorded on a tape."""


class AtOnce:
    """The host computes: everything is there at once."""

    def compute(self, *, everything: bool = True) -> None:
        pass

    def step(self) -> Callable[[], None] | None:
        return None

    def of_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class Journal:
    """The last calls of a port, who is told of them, and who answers them.

    Attributes:
        between: computes between the calls.
        on_call: told the name of what upstream's pipeline is about to call.
        answer: gives the result of a call; by default, by running the call.
        ran: the last program that ran, compiled.
        op_by_op: whether programs run op by op, to debug.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.calls: deque[Called] = deque(maxlen=1 << 16)
        self.on_call: Callable[[str], None] = lambda name: None
        self.answer: Callable[[Asked], Any] = Asked.run
        self.ran: Any = None
        self.op_by_op = False
        self.between: Between = AtOnce()
        self._inside = False

    def call(self, asked: Asked) -> Any:
        """The result of a call.

        A call by a component's own code is a part of the call that led there.
        """
        if self._inside:
            return asked.run()
        self._inside = True
        try:
            self.on_call(asked.name)
            # Also before a call that a tape answers: programs begin and end where they
            # do in a run from the beginning.
            self.between.compute(everything=False)
            return self.answer(asked)
        finally:
            self._inside = False


@dataclass(kw_only=True, slots=True)
class Uploads:
    """Arrays of tensors that are on the devices already."""

    _known: dict[int, tuple[Any, int, jax.Array]] = field(default_factory=dict)

    def array(self, tensor: torch.Tensor, sharding: NamedSharding) -> jax.Array:
        """The tensor on the devices; uploaded once if nothing writes to it."""
        if isinstance(tensor, DeviceTensor):
            if (array := tensor.on_devices) is not None:
                return moved(array, sharding)
            tensor = tensor.on_host()
        if tensor.is_inference():
            return _put(tensor, sharding)
        key = id(tensor)
        known = self._known.get(key)
        if known and known[0]() is tensor and known[1] == tensor._version:
            return moved(known[2], sharding)
        array = _put(tensor, sharding)

        def forget(_: Any) -> None:
            self._known.pop(key, None)

        self._known[key] = (weakref.ref(tensor, forget), tensor._version, array)
        return array


def moved(array: Any, sharding: NamedSharding) -> Any:
    """The array where it is wanted."""
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    return jax.device_put(array, sharding)


def _put(tensor: torch.Tensor, sharding: NamedSharding) -> jax.Array:
    try:
        # A copy: JAX may share the memory of the host, and upstream writes to tensors.
        return jax.device_put(to_numpy(tensor).copy(), sharding)
    except OverflowError as error:
        raise UsageError(
            f"an argument {tensor.dtype} {[*tensor.shape]} has {error}; programs "
            "count in 32 bits"
        ) from None
