"""Values of upstream's code as JSON and tensors, without pickle.

What a module answers, and what a scheduler knows, goes to a file and comes back. The
classes that come back are those of upstream's libraries. None is called but collections
and enums.
"""

from __future__ import annotations

import enum
import importlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from typing_extensions import TypeIs

from tpuport.core.arrays import dtype_name, torch_dtype
from tpuport.core.seam.device_tensors import DeviceTensor
from tpuport.errors import ArtifactError, TpuportError

#: Packages whose classes a file may name.
_LIBRARIES = frozenset({"collections", "diffusers", "torch", "transformers"})
#: Objects within objects, at most.
_DEEPEST = 32
Later = Callable[[], torch.Tensor | None]
Place = Callable[[torch.Tensor], torch.Tensor]
"""Gives a tensor that was on the devices back to them."""


class KeptError(TpuportError):
    """A value that no file can hold."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A value taken apart.

    Attributes:
        plain: JSON; a tensor is a number in ``tensors``.
        tensors: on the CPU, contiguous, of no one else; on ``meta`` where the shape
            and the dtype alone are kept.
        later: of tensors on the devices, by number, what gives them, once.
    """

    plain: Any
    tensors: tuple[torch.Tensor, ...]
    later: Mapping[int, Later] = field(default_factory=dict)

    def value(self, place: Place = lambda tensor: tensor) -> Any:
        """The value, with tensors of its own; of shapes alone, zeros on the host."""
        return _Giving(self.settled().tensors, place).value(self.plain)

    def settled(self) -> Kept:
        """With the tensors on the devices that somebody reads; of others, shapes."""
        tensors = list(self.tensors)
        for number, give in self.later.items():
            found = give()
            if found is not None:
                tensors[number] = found
        return Kept(self.plain, tuple(tensors))


def kept(value: Any, *, always: bool = False) -> Kept:
    """``value``, copied; tensors on the devices once it is settled.

    Args:
        always: whether tensors on the devices are wanted that nobody reads.

    Raises:
        KeptError: a part of it is of a class that no file can hold.
    """
    return _take(value, _Taking(always=always))


def shape_of(value: Any) -> Kept:
    """``value`` with the shapes and dtypes of its tensors alone; nothing is read.

    Raises:
        KeptError: as of :func:`kept`.
    """
    return _take(value, _Taking(with_values=False))


def _take(value: Any, taking: _Taking) -> Kept:
    plain = taking.plain(value, 0)
    return Kept(plain, tuple(taking.tensors), taking.later)


@dataclass(slots=True)
class _Taking:
    with_values: bool = True
    always: bool = False
    tensors: list[torch.Tensor] = field(default_factory=list)
    later: dict[int, Later] = field(default_factory=dict)

    def plain(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            # JSON has no NaN and no infinity.
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, torch.Tensor):
            found: dict[str, Any] = {"tensor": self._number(value)}
            # Upstream's operators round by the order in memory too.
            if self.with_values and _scattered(value):
                found["strides"] = list(value.stride())
            if _on_devices(value) and value.arithmetic is not None:
                found["devices"] = True
            return found
        if isinstance(value, np.ndarray | np.generic):
            array = np.ascontiguousarray(value)
            number = self._number(torch.from_numpy(array.copy()))
            shape = None if isinstance(value, np.generic) else list(value.shape)
            return {"array": number, "shape": shape}
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            # What ran as a program says torchax's, which is the host's for upstream.
            return {"device": str(value) if value.type == "meta" else "cpu"}
        if depth == _DEEPEST:
            raise KeptError(f"a {kind.__name__} is nested more than {_DEEPEST} deep")
        return self._whole(value, kind, depth + 1)

    def _whole(self, value: Any, kind: Any, depth: int) -> Any:
        if kind is list:
            return [self.plain(part, depth) for part in value]
        if isinstance(value, tuple):
            parts = [self.plain(part, depth) for part in value]
            return {"tuple": parts} if kind is tuple else _named(kind, parts=parts)
        if isinstance(value, enum.Enum):
            return _named(kind, name=value.name)
        if isinstance(value, dict):
            items = [
                [self.plain(key, depth), self.plain(part, depth)]
                for key, part in value.items()
            ]
            return {"dict": items} if kind is dict else _named(kind, items=items)
        if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
            raise KeptError(f"a {kind.__name__} cannot be kept in a file")
        inside = [[key, self.plain(part, depth)] for key, part in vars(value).items()]
        return _named(kind, attributes=inside)

    def _number(self, tensor: torch.Tensor) -> int:
        number = len(self.tensors)
        on_devices = _on_devices(tensor)
        if self.with_values and on_devices:
            self.later[number] = _Once(tensor.later(always=self.always))
        if on_devices or not self.with_values:
            shape, dtype = tuple(tensor.shape), tensor.dtype
            tensor = torch.empty(shape, dtype=dtype, device="meta")
        else:
            tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.tensors.append(tensor)
        return number


class _Once:
    """Reads the devices at the first call, and holds no array after."""

    def __init__(self, give: Later) -> None:
        self._give: Later | None = give
        self._lock = threading.Lock()
        self._found: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor | None:
        with self._lock:  # a checkpoint is written beside the run
            if self._give is not None:
                self._found, self._give = self._give(), None
            return self._found


def _on_devices(tensor: torch.Tensor) -> TypeIs[DeviceTensor]:
    """Whether the numbers are those on the devices."""
    return isinstance(tensor, DeviceTensor) and not tensor.written


def _scattered(tensor: torch.Tensor) -> bool:
    """Whether the order in memory is another than that of a C array."""
    return not tensor.is_contiguous() and all(tensor.stride())


def _named(kind: type, **content: Any) -> dict[str, Any]:
    where = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__.partition(".")[0] not in _LIBRARIES:
        raise KeptError(f"a {where} cannot be kept in a file")
    return {"class": where, **content}


@dataclass(frozen=True, slots=True)
class _Giving:
    tensors: Sequence[torch.Tensor]
    place: Place

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.value(part) for part in plain]
        if not isinstance(plain, dict):
            return plain
        if "class" in plain:
            return self._of_class(plain)
        ((kind, content), *more) = plain.items()
        if kind == "float":
            return float(content)
        if kind == "tensor":
            found, how = self._tensor(content), dict(more)
            if "strides" in how:
                found = torch.empty_strided(
                    found.shape, how["strides"], dtype=found.dtype
                ).copy_(found)
            known = not self.tensors[content].is_meta
            return self.place(found) if known and "devices" in how else found
        if kind == "array":
            array = self._tensor(content).numpy()
            shape = dict(more)["shape"]
            return array.reshape(()).take(0) if shape is None else array.reshape(shape)
        if kind == "dtype":
            return torch_dtype(content)
        if kind == "device":
            return torch.device(content)
        if kind == "tuple":
            return tuple(self.value(part) for part in content)
        if kind == "dict":
            return {self.value(key): self.value(part) for key, part in content}
        raise ArtifactError(f"a kept value has the unknown kind {kind!r}")

    def _tensor(self, number: int) -> torch.Tensor:
        tensor = self.tensors[number]
        if tensor.is_meta:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return tensor.clone()

    def _of_class(self, plain: Mapping[str, Any]) -> Any:
        kind = _class(plain["class"])
        # A class is called only where the call makes a plain collection.
        if "name" in plain and issubclass(kind, enum.Enum):
            return kind[plain["name"]]
        if "parts" in plain and issubclass(kind, tuple):
            parts = [self.value(part) for part in plain["parts"]]
            return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
        if "items" in plain and issubclass(kind, dict):
            items = {self.value(k): self.value(part) for k, part in plain["items"]}
            return kind(**items) if hasattr(kind, "to_tuple") else kind(items)
        if "attributes" not in plain:
            raise ArtifactError(f"a kept value names {plain['class']} for another kind")
        made = kind.__new__(kind)
        vars(made).update({name: self.value(v) for name, v in plain["attributes"]})
        return made


def _class(where: str) -> Any:
    """A class of upstream's libraries."""
    module, _, path = where.partition(":")
    if module.partition(".")[0] not in _LIBRARIES:
        raise ArtifactError(
            f"a kept value names {where}, which is no class of upstream"
        )
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ArtifactError(f"a kept value names {where}: {error}") from None
    if not isinstance(found, type):
        raise ArtifactError(f"a kept value names {where}, which is no class")
    return found
