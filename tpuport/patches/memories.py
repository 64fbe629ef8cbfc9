"""What tensors share memory in torch, and where in the memory each of them lies.

A view keeps the tensor that it was made of, as in torch. Nothing else happens until one
of those that share memory is written to: then the others get the new numbers. Where
each one lies in the memory, torch itself says, by strides of tensors without numbers.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import torch
from torch.utils import _mode_utils

from tpuport.core.tracing.deferred_tensors import defer
from tpuport.core.tracing.strided import ORDERED, Strided

#: Where a tensor keeps its place in a memory, and what it is a view of.
PLACE, BASE = "_tpuport_place", "_tpuport_base"
#: Says of a tensor that its strides are unknown.
UNKNOWN = "_tpuport_strides_unknown"

#: Views whose elements come in the order of the memory.
_ORDERLY = {"alias", "detach", "expand", "narrow", "select", "slice", "split"}
_ORDERLY |= {"split_with_sizes", "squeeze", "unbind", "unsqueeze", "view", "chunk"}
_ORDERLY |= {"__getitem__", "unflatten"}
#: Functions and methods that give a view or a copy, depending on strides.
PERHAPS_COPYING = {"reshape", "reshape_as", "flatten", "ravel", "contiguous"}
_ORDERLY |= PERHAPS_COPYING


class Memory:
    """What some tensors share, as torch's storage.

    Attributes:
        members: the tensors, those among them that are still there.
        perhaps: memories that may be this one.
    """

    __slots__ = ("__weakref__", "_most", "_root", "members", "perhaps")

    def __init__(self, root: Any) -> None:
        self._root = weakref.ref(root)
        self.members: list[weakref.ref[Any]] = []
        self._most = 32
        self.perhaps: list[weakref.ref[Memory]] = []

    @property
    def root(self) -> Any:
        """The tensor that the others are views of; its views keep it alive."""
        return self._root()

    def replace_root(self, root: Any) -> None:
        self._root = weakref.ref(root)
        for tensor in self.living():
            vars(tensor)[BASE] = root

    def living(self) -> list[Any]:
        """The members, without what is no longer there."""
        found = [(one, one()) for one in self.members]
        self.members = [one for one, tensor in found if tensor is not None]
        return [tensor for _, tensor in found if tensor is not None]

    def add(self, tensor: Any) -> None:
        self.members.append(weakref.ref(tensor))
        if len(self.members) > self._most:
            self._most = 2 * len(self.living()) + 32

    def doubt(self, other: Memory) -> None:
        """Note that ``other``, and all that may be ``other``, may be this one."""
        for one in (*other.perhaps, weakref.ref(other)):
            found = one()
            if found is not None:
                self.perhaps.append(one)
                found.perhaps.append(weakref.ref(self))


class Place:
    """Where a tensor is in a memory: by a step from another one; the root by none.

    ``perhaps``: of another order in the memory, it would be a copy.
    """

    __slots__ = ("_meta", "memory", "orderly", "parent", "perhaps", "step")

    def __init__(self, memory: Memory, parent: Place | None, step: Any) -> None:
        self.memory, self.parent, self.step = memory, parent, step
        if parent is None:
            self.orderly = UNKNOWN not in vars(memory.root)
            self.perhaps = False
        else:
            self.orderly = parent.orderly and step.name in _ORDERLY
            self.perhaps = parent.perhaps
        self._meta: Any = None

    def meta(self) -> torch.Tensor | None:
        """The tensor without numbers; ``None`` if torch cannot tell where it lies."""
        if self._meta is None:
            with by_torch():
                self._make()
        return self._meta if isinstance(self._meta, torch.Tensor) else None

    def _make(self) -> None:
        waiting, place = [], self
        while place._meta is None and place.parent is not None:
            waiting.append(place)
            place = place.parent
        if place._meta is None:
            root = place.memory.root
            shape, dtype = tuple(root.shape), root.dtype
            place._meta = torch.empty(shape, dtype=dtype, device="meta")
        before = place._meta
        for place in reversed(waiting):
            found = before is not False and place.step(before)
            before = place._meta = found if share(before, found) else False

    def strided(self) -> Strided | None:
        meta = self.meta()
        return None if meta is None else Strided.of(meta)


class Step:
    """An operator that makes a view."""

    __slots__ = ("args", "func", "index", "kwargs", "name")

    def __init__(self, func: Any, args: Any, kwargs: Any, index: int | None) -> None:
        self.func, self.args, self.kwargs, self.index = func, args, kwargs, index
        self.name = name_of(func)

    def __call__(self, tensor: torch.Tensor) -> Any:
        try:
            found = self.func(tensor, *self.args, **self.kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None  # an argument with numbers of the program, say
        return found if self.index is None else found[self.index]


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    with _mode_utils.no_dispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def share(one: Any, other: Any) -> bool:
    if not isinstance(other, torch.Tensor) or one.dtype != other.dtype:
        return False
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def name_of(func: Any) -> str:
    return getattr(func, "__name__", "").partition(".")[0]


_classes: dict[Any, tuple[bool, bool]] = {}


def _class_of(value: Any) -> tuple[bool, bool]:
    """Whether a value is a tensor of torchax or a slice; whether it is a slice."""
    kind: Any = type(value)
    if kind not in _classes:
        from torchax.tensor import Tensor
        from torchax.view import View

        _classes[kind] = issubclass(kind, Tensor | View), issubclass(kind, View)
    return _classes[kind]


def is_array(value: Any) -> bool:
    """Whether a value is a tensor of torchax, or a slice of one."""
    return _class_of(value)[0]


def is_slice(value: Any) -> bool:
    return _class_of(value)[1]


def join(tensor: Any, place: Place) -> None:
    place.memory.add(tensor)
    kept = vars(tensor)
    kept[PLACE] = place
    if place.parent is not None:
        kept[BASE] = place.memory.root


def leave(tensor: Any) -> None:
    place = vars(tensor).pop(PLACE, None)
    vars(tensor).pop(BASE, None)
    if place is not None:
        members = place.memory.members
        place.memory.members = [one for one in members if one() is not tensor]


def taken_out(tensor: Any) -> Any:
    """Take a tensor out of its memory, which keeps the numbers.

    Returns:
        the root of the memory.
    """
    place = place_of(tensor)
    place.meta()
    root = place.memory.root
    if root is tensor:
        root = tensor._env.j2t_iso(tensor.jax())
        if UNKNOWN in vars(tensor):
            setattr(root, UNKNOWN, True)
        place.memory.replace_root(root)
    leave(tensor)
    return root


def place_of(tensor: Any) -> Place:
    """The place of a tensor or of a slice, in the memory of its own or of others."""
    if is_slice(tensor):
        place = place_of(tensor.parent)
        return Place(place.memory, place, _step_of(tensor.view_info))
    found: Place | None = vars(tensor).get(PLACE)
    if found is None:
        found = Place(Memory(tensor), None, None)
        join(tensor, found)
    return found


def _step_of(info: Any) -> Step:
    """How torch makes a slice, or the view of a slice."""
    if hasattr(info, "slices"):
        return Step(torch.Tensor.__getitem__, (info.slices,), {}, None)
    return Step(torch.Tensor.view, (info.shape,), {}, None)


def strides_known(tensor: Any) -> bool:
    """Whether the elements of a tensor come in the order of the memory, for sure."""
    while is_slice(tensor):
        tensor = tensor.parent
    place: Place | None = vars(tensor).get(PLACE)
    return UNKNOWN not in vars(tensor) if place is None else place.orderly


def written(tensor: Any, place: Place) -> None:
    """Hand what was written to a tensor on to all that share its memory."""
    memory = place.memory
    for reference in memory.perhaps:
        other = reference()
        for one in other.living() if other is not None else ():
            defer(one, _unreadable)
    members = [one for one in memory.living() if one is not tensor]
    if place.perhaps or any(vars(one)[PLACE].perhaps for one in members):
        setattr(memory.root, ORDERED, True)
    if not members and memory.root is tensor:
        return
    where = place.strided()
    if where is None:
        for one in members:
            defer(one, _unreadable)
        leave(tensor)
        return
    value = jnp.broadcast_to(tensor.jax(), where.size)
    whole: Any = value
    if place.parent is not None:
        whole = where.written(memory.root.jax(), value)
    if whole is None:
        raise RuntimeError(
            "a write in place to a view that shows an element more than once: write to "
            "a clone()"
        )
    if memory.root is not tensor:
        _set(memory.root, whole)
    for one in members:
        if one is memory.root:
            continue
        other = vars(one)[PLACE].strided()
        if other is None:
            defer(one, _unreadable)
        elif not other.apart(where, whole.size):
            _set(one, other.read(whole))


def _set(tensor: Any, value: Any) -> None:
    """Give a tensor its numbers without telling others."""
    place = vars(tensor).pop(PLACE, None)
    tensor._elem = value
    if place is not None:
        vars(tensor)[PLACE] = place


def _unreadable() -> Any:
    raise RuntimeError(
        "reads a tensor after a write in place to a tensor that may share its memory "
        "in torch, by reshape, flatten, contiguous or another dtype: write to view() "
        "or to clone()"
    )
