"""Views that torchax computes as copies, kept equal to what they are views of.

A view keeps the tensor that it was made of, as in torch. Nothing else happens until one
of those that share memory is written to: then the others get the new numbers. Where
each one lies in the memory, torch itself says, by strides of tensors without numbers.

Whether ``reshape``, ``flatten`` and ``contiguous`` copy depends on strides too. Arrays
have none: tensors that enter a program count as contiguous, and so does what operators
make of such tensors, as far as :data:`_KEEPING` and :data:`_MAKING` know. Of others it
is unknown whether the result is a copy. If one of the two is written to, the other
cannot be read: reading is an error.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

import jax.numpy as jnp
import torch
from torch.utils import _mode_utils

from tpuport.core.tracing.deferred_tensors import defer
from tpuport.core.tracing.patching import Patch
from tpuport.patches.strided import Strided

#: Where a tensor keeps its place in a memory, and what it is a view of.
_PLACE, _BASE = "_tpuport_place", "_tpuport_base"
#: Says of a tensor that its strides are unknown.
_UNKNOWN = "_tpuport_strides_unknown"

#: Functions and methods that give a view or a copy, depending on strides.
_PERHAPS_COPYING = {"reshape", "reshape_as", "flatten", "ravel", "contiguous"}
#: Views whose elements come in the order of the memory.
_ORDERLY = {"alias", "detach", "expand", "narrow", "select", "slice", "split"}
_ORDERLY |= {"split_with_sizes", "squeeze", "unbind", "unsqueeze", "view", "chunk"}
_ORDERLY |= {"reshape", "flatten", "ravel", "contiguous", "__getitem__", "unflatten"}
#: Functions that give views, where an override takes their place.
_VIEWS = {"chunk", "expand", "permute", "select", "split", "squeeze", "tensor_split"}
_VIEWS |= {
    "transpose",
    "unbind",
    "unflatten",
    "unsqueeze",
    "view",
    "narrow",
    "diagonal",
}
_VIEWS |= {"movedim", "swapaxes", "t", "unfold", "view_as_complex", "view_as_real"}
#: Operators that change the dims of a tensor and no number.
_TURNING = {"squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_"}
_TURNING |= {"detach_"}
#: Operators whose result is contiguous, whatever they are given.
_MAKING = {"linear", "mm", "bmm", "addmm", "baddbmm", "layer_norm", "rms_norm", "stack"}
_MAKING |= {"native_layer_norm", "softmax", "_softmax", "log_softmax", "embedding"}
_MAKING |= {"gather", "repeat", "tile", "one_hot", "_unsafe_view"}
#: Those whose result is contiguous if all that they are given is; pointwise ones too.
_KEEPING = {"cat", "clone", "_to_copy", "to", "pad", "constant_pad_nd", "dropout"}
_KEEPING |= {"sum", "mean", "amax", "amin", "var", "cumsum", "group_norm", "where"}
_KEEPING |= {"conv1d", "conv2d", "conv3d", "convolution", "interpolate", "type_as"}
_KEEPING |= {"empty_like", "zeros_like", "ones_like", "full_like", "masked_fill"}
_KEEPING |= {"native_group_norm", "index_put", "copy", "new_zeros", "new_ones"}


class _Kind(Enum):
    VIEW = auto()
    PERHAPS_COPYING = auto()
    TURNING = auto()
    MAKING = auto()
    KEEPING = auto()
    CONVERTING = auto()
    OTHER = auto()


class _Memory:
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
        self.perhaps: list[weakref.ref[_Memory]] = []

    @property
    def root(self) -> Any:
        """The tensor that the others are views of; its views keep it alive."""
        return self._root()

    def replace_root(self, root: Any) -> None:
        self._root = weakref.ref(root)
        for tensor in self.living():
            vars(tensor)[_BASE] = root

    def living(self) -> list[Any]:
        """The members, without what is no longer there."""
        found = [(one, one()) for one in self.members]
        self.members = [one for one, tensor in found if tensor is not None]
        return [tensor for _, tensor in found if tensor is not None]

    def add(self, tensor: Any) -> None:
        self.members.append(weakref.ref(tensor))
        if len(self.members) > self._most:
            self._most = 2 * len(self.living()) + 32

    def doubt(self, other: _Memory) -> None:
        """Note that ``other``, and all that may be ``other``, may be this one."""
        for one in (*other.perhaps, weakref.ref(other)):
            found = one()
            if found is not None:
                self.perhaps.append(one)
                found.perhaps.append(weakref.ref(self))


class _Place:
    """Where a tensor is in a memory: by a step from another one; the root by none."""

    __slots__ = ("_meta", "memory", "orderly", "parent", "step")

    def __init__(self, memory: _Memory, parent: _Place | None, step: Any) -> None:
        self.memory, self.parent, self.step = memory, parent, step
        if parent is None:
            self.orderly = _UNKNOWN not in vars(memory.root)
        else:
            self.orderly = parent.orderly and step.name in _ORDERLY
        self._meta: Any = None

    def meta(self) -> torch.Tensor | None:
        """The tensor without numbers; ``None`` if torch cannot tell where it lies."""
        if self._meta is None:
            with _by_torch():
                self._make()
        return self._meta if isinstance(self._meta, torch.Tensor) else None

    def _make(self) -> Any:
        if self._meta is not None:
            return self._meta
        if self.parent is None:
            root = self.memory.root
            shape, dtype = tuple(root.shape), root.dtype
            self._meta = torch.empty(shape, dtype=dtype, device="meta")
            return self._meta
        before = self.parent._make()
        found = before is not False and self.step(before)
        self._meta = found if _share(before, found) else False
        return self._meta

    def strided(self) -> Strided | None:
        meta = self.meta()
        return None if meta is None else Strided.of(meta)


class _Step:
    """An operator that makes a view."""

    __slots__ = ("args", "func", "index", "kwargs", "name")

    def __init__(self, func: Any, args: Any, kwargs: Any, index: int | None) -> None:
        self.func, self.args, self.kwargs, self.index = func, args, kwargs, index
        self.name = _name(func)

    def __call__(self, tensor: torch.Tensor) -> Any:
        try:
            found = self.func(tensor, *self.args, **self.kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None  # an argument with numbers of the program, say
        return found if self.index is None else found[self.index]


@contextlib.contextmanager
def _by_torch() -> Iterator[None]:
    with _mode_utils.no_dispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def _share(one: Any, other: Any) -> bool:
    if not isinstance(other, torch.Tensor) or one.dtype != other.dtype:
        return False
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _name(func: Any) -> str:
    return getattr(func, "__name__", "").partition(".")[0]


_kinds: dict[Any, _Kind] = {}


def _kind(func: Any) -> _Kind:
    """What an operator is to those that share memory."""
    found = _kinds.get(func)
    if found is None:
        found = _kinds[func] = _kind_of(func, _name(func))
    return found


def _kind_of(func: Any, name: str) -> _Kind:
    named = {
        _Kind.PERHAPS_COPYING: _PERHAPS_COPYING,
        _Kind.TURNING: _TURNING,
        _Kind.MAKING: _MAKING,
        _Kind.CONVERTING: {"to"},
        _Kind.KEEPING: _KEEPING,
    }
    for kind, names in named.items():
        if name in names:
            return kind
    if getattr(func, "is_view", False) or name in _VIEWS:
        return _Kind.VIEW
    packet: Any = getattr(torch.ops.aten, name, None) if name else None
    known = isinstance(packet, torch._ops.OpOverloadPacket)
    overloads = [getattr(packet, one) for one in packet.overloads()] if known else []
    pointwise = any(torch.Tag.pointwise in one.tags for one in overloads)
    return _Kind.KEEPING if pointwise else _Kind.OTHER


_classes: dict[Any, tuple[bool, bool]] = {}


def _class_of(value: Any) -> tuple[bool, bool]:
    """Whether a value is a tensor of torchax or a slice; whether it is a slice."""
    kind: Any = type(value)
    if kind not in _classes:
        from torchax.tensor import Tensor
        from torchax.view import View

        _classes[kind] = issubclass(kind, Tensor | View), issubclass(kind, View)
    return _classes[kind]


def _is_array(value: Any) -> bool:
    """Whether a value is a tensor of torchax, or a slice of one."""
    return _class_of(value)[0]


def _is_slice(value: Any) -> bool:
    return _class_of(value)[1]


def _join(tensor: Any, place: _Place) -> None:
    place.memory.add(tensor)
    kept = vars(tensor)
    kept[_PLACE] = place
    if place.parent is not None:
        kept[_BASE] = place.memory.root


def _leave(tensor: Any) -> None:
    place = vars(tensor).pop(_PLACE, None)
    vars(tensor).pop(_BASE, None)
    if place is not None:
        members = place.memory.members
        place.memory.members = [one for one in members if one() is not tensor]


def _place_of(tensor: Any) -> _Place:
    """The place of a tensor or of a slice, in the memory of its own or of others."""
    if _is_slice(tensor):
        place = _place_of(tensor.parent)
        return _Place(place.memory, place, _step_of(tensor.view_info))
    found: _Place | None = vars(tensor).get(_PLACE)
    if found is None:
        found = _Place(_Memory(tensor), None, None)
        _join(tensor, found)
    return found


def _step_of(info: Any) -> _Step:
    """How torch makes a slice, or the view of a slice."""
    if hasattr(info, "slices"):
        return _Step(torch.Tensor.__getitem__, (info.slices,), {}, None)
    return _Step(torch.Tensor.view, (info.shape,), {}, None)


def _strides_known(tensor: Any) -> bool:
    """Whether the elements of a tensor come in the order of the memory, for sure."""
    while _is_slice(tensor):
        tensor = tensor.parent
    place: _Place | None = vars(tensor).get(_PLACE)
    return _UNKNOWN not in vars(tensor) if place is None else place.orderly


def _source(args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """What a view is made of, and the other arguments."""
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("input", rest.pop("self", None)), (), rest


def _note_view(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    source, args, kwargs = _source(args, kwargs)
    if not _is_array(source):
        return
    several = isinstance(result, list | tuple)
    for index, part in enumerate(result) if several else [(None, result)]:
        if part is source or not _is_array(part) or _is_slice(part):
            continue
        if _PLACE not in vars(part):
            place = _place_of(source)
            step = _Step(func, args, kwargs, index)
            _join(part, _Place(place.memory, place, step))


def _note_result(kind: _Kind, args: Any, kwargs: Any, result: Any) -> None:
    """Mark results whose strides are unknown."""
    if kind is _Kind.MAKING:
        return
    given = [*args, *kwargs.values()] if kwargs else args
    known, found = True, False
    for one in given:
        for part in one if isinstance(one, list | tuple) else (one,):
            if _is_array(part):
                found = True
                known = known and kind is not _Kind.OTHER and _strides_known(part)
    if not found or known:
        return
    for part in result if isinstance(result, list | tuple) else (result,):
        own = _is_array(part) and not _is_slice(part)
        if own and part is not given[0]:
            setattr(part, _UNKNOWN, True)


def _noted(kind: _Kind, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    if kind in (_Kind.VIEW, _Kind.PERHAPS_COPYING):
        _note_view(func, args, kwargs, result)
    else:
        _note_result(kind, args, kwargs, result)


def _perhaps_copied(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The result of ``reshape`` and the like: a view or a copy, as in torch."""
    source, args, kwargs = _source(args, kwargs)
    if not _is_array(source) or not _is_array(result):
        return result
    step = _Step(func, args, kwargs, None)
    alone = not _is_slice(source) and _PLACE not in vars(source)
    if not (alone and _strides_known(source)) or "memory_format" in kwargs:
        place = _place_of(source)
        meta = place.meta()
        found: Any = None
        if meta is not None:
            with _by_torch():
                found = step(meta)
        known = found is not None and _UNKNOWN not in vars(place.memory.root)
        if not known or not _share(meta, found):
            result = _copied(result, source)
            if not known:
                _place_of(result).memory.doubt(place.memory)
            if not known or not found.is_contiguous():
                vars(result)[_UNKNOWN] = True
            return result
    _note_view(func, (source, *args), kwargs, result)
    return result


def _copied(result: Any, source: Any) -> Any:
    """``result`` with a memory of its own."""
    if result is source:
        return source._env.j2t_iso(source.jax())
    _leave(result)
    return result


def _turned(func: Any, tensor: Any, args: Any, kwargs: Any) -> Any:
    """Change the dims of a tensor, which stays what it was for those that share it."""
    place, env = _place_of(tensor), tensor._env
    place.meta()
    root = place.memory.root
    before = env.j2t_iso(tensor.jax())
    if root is tensor:
        root = before
        place.memory.replace_root(root)
    functional = getattr(torch.ops.aten, _name(func)[:-1])
    with env._dispatch_mode:
        turned = functional(before, *args, **kwargs)
    _leave(tensor)
    tensor._elem = turned.jax()
    step = _Step(functional, args, kwargs, None)
    vars(tensor)[_BASE] = root
    _join(tensor, _Place(place.memory, place, step))
    return tensor


def _converted(args: Any, kwargs: Any, result: Any) -> Any:
    """The result of ``to``: the tensor itself unless something changes."""
    source: Any = args[0] if args else None
    if not _is_array(source) or not _is_array(result):
        return result
    # to(device, dtype, non_blocking, copy): both flags by position is rare.
    flags = [one for one in args[1:] if isinstance(one, bool)]
    copied = kwargs.get("copy", len(flags) > 1 and flags[1])
    if copied or kwargs.get("memory_format") is torch.channels_last:
        return _copied(result, source)
    same = _is_slice(source) and result.dtype == source.dtype
    return source if same else result


def _on_operator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Every operator of ATen."""

    def __torch_dispatch__(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kind, kwargs = _kind(func), kwargs or {}
        if kind is _Kind.TURNING and _is_array(args[0]) and not _is_slice(args[0]):
            return _turned(func, args[0], args[1:], kwargs)
        result = original(self, func, types, args, kwargs)
        _noted(kind, func, args, kwargs, result)
        return result

    return __torch_dispatch__


def _on_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Every function and method of torch."""

    def __torch_function__(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kind, kwargs = _kind(func), kwargs or {}
        if kind is _Kind.TURNING and _is_array(args[0]) and not _is_slice(args[0]):
            return _turned(func, args[0], args[1:], kwargs)
        result = original(self, func, types, args, kwargs)
        if kind is _Kind.PERHAPS_COPYING:
            return _perhaps_copied(func, args, kwargs, result)
        if kind is _Kind.CONVERTING:
            return _converted(args, kwargs, result)
        # What torchax leaves to torch arrives as operators.
        if func in self.env._ops:
            _noted(kind, func, args, kwargs, result)
        return result

    return __torch_function__


def _on_set(original: Callable[..., Any]) -> Callable[..., Any]:
    """Whatever is set on a tensor of torchax."""

    def __setattr__(self: Any, name: str, value: Any) -> None:
        original(self, name, value)
        if name == "_elem":
            place = self.__dict__.get(_PLACE)
            if place is not None:
                _written(self, place)

    return __setattr__


def _written(tensor: Any, place: _Place) -> None:
    """Hand what was written to a tensor on to all that share its memory."""
    memory = place.memory
    for reference in memory.perhaps:
        other = reference()
        for one in other.living() if other is not None else ():
            defer(one, _unreadable)
    members = [one for one in memory.living() if one is not tensor]
    if not members and memory.root is tensor:
        return
    where = place.strided()
    if where is None:
        for one in members:
            defer(one, _unreadable)
        _leave(tensor)
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
        other = vars(one)[_PLACE].strided()
        if other is None:
            defer(one, _unreadable)
        elif not other.apart(where, whole.size):
            _set(one, other.read(whole))


def _set(tensor: Any, value: Any) -> None:
    """Give a tensor its numbers without telling others."""
    place = vars(tensor).pop(_PLACE, None)
    tensor._elem = value
    if place is not None:
        vars(tensor)[_PLACE] = place


def _unreadable() -> Any:
    raise RuntimeError(
        "reads a tensor after a write in place to a tensor that may share its memory "
        "in torch, by reshape, flatten, contiguous or another dtype: write to view() "
        "or to clone()"
    )


def _detached(original: Callable[..., Any]) -> Callable[..., Any]:
    def detach(self: Any) -> Any:
        result = original(self)
        _note_view(torch.Tensor.detach, (self,), {}, result)
        return result

    return detach


def flatten(self: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """``torch.Tensor.flatten``, by torch."""
    return torch._C.TensorBase.flatten(self, start_dim, end_dim)


SHARED_MEMORY = tuple(
    Patch(
        name=f"torchax-shared-memory-{name}",
        target=f"torchax.tensor:{target}",
        replacement=replacement,
        wraps=wraps,
        reason="torchax computes views as copies: x.view(-1)[0] = 1 leaves x as it "
        "was, and a view does not see what is written to x",
        upstream="torchax==0.0.13",
        link="https://github.com/google/torchax",
    )
    for name, target, replacement, wraps in (
        ("operator", "XLADispatchMode.__torch_dispatch__", _on_operator, True),
        ("function", "XLAFunctionMode.__torch_function__", _on_function, True),
        ("written", "Tensor.__setattr__", _on_set, True),
        ("detach", "Tensor.detach", _detached, True),
        ("flatten", "Tensor.flatten", flatten, False),
    )
)
"""For any model that writes in place to a view."""
