"""The calls of a port's modules, and the arrays that are on the devices already."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch

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
        self._noticed: set[str] = set()

    def notice(self, text: str) -> None:
        """Tell something once."""
        if text not in self._noticed:
            self._noticed.add(text)
            self.reporter.say(text)

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

    def array(self, tensor: torch.Tensor, place: jax.ShapeDtypeStruct) -> jax.Array:
        """The tensor on the devices; uploaded once if nothing writes to it.

        Args:
            place: its sharding, and its shape there: a picture that is split may have
                more rows and columns than the tensor.
        """
        if isinstance(tensor, DeviceTensor):
            if (array := tensor.on_devices) is not None:
                return _moved(array, tuple(tensor.shape), place)
            tensor = tensor.on_host()
        if tensor.is_inference():
            return _put(tensor, place)
        key = id(tensor)
        known = self._known.get(key)
        if known and known[0]() is tensor and known[1] == tensor._version:
            return _moved(known[2], tuple(tensor.shape), place)
        array = _put(tensor, place)

        def forget(_: Any) -> None:
            self._known.pop(key, None)

        self._known[key] = (weakref.ref(tensor, forget), tensor._version, array)
        return array


def moved(array: Any, sharding: Any) -> Any:
    """The array where it is wanted."""
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    return jax.device_put(array, sharding)


def _moved(
    array: jax.Array, real: tuple[int, ...], place: jax.ShapeDtypeStruct
) -> jax.Array:
    """An array as a program takes it.

    Args:
        real: its shape without phantom rows and columns.
    """
    if array.shape != place.shape:
        return _fitted(array, real, place)
    return moved(array, place.sharding)


def _fitted(
    array: jax.Array, real: tuple[int, ...], place: jax.ShapeDtypeStruct
) -> jax.Array:
    """An array with other phantom rows and columns."""

    def fit(array: jax.Array) -> jax.Array:
        array = array[tuple(map(slice, real))]
        return jnp.pad(array, _widths(real, place.shape))

    fitted: jax.Array = jax.jit(fit, out_shardings=place.sharding)(array)
    return fitted


def _widths(real: Sequence[int], padded: Sequence[int]) -> list[tuple[int, int]]:
    return [(0, m - n) for n, m in zip(real, padded, strict=True)]


def _put(tensor: torch.Tensor, place: jax.ShapeDtypeStruct) -> jax.Array:
    try:
        array = to_numpy(tensor)
        # A copy: JAX may share the memory of the host, and upstream writes to tensors.
        # Where a picture gets phantoms they are the copy.
        if array.shape == place.shape:
            copied = array.copy()
        else:
            copied = np.pad(array, _widths(array.shape, place.shape))
        return jax.device_put(copied, place.sharding)
    except OverflowError as error:
        raise UsageError(
            f"an argument {tensor.dtype} {[*tensor.shape]} has {error}; programs "
            "count in 32 bits"
        ) from None
