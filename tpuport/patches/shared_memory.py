"""Views that torchax computes as copies, kept equal to what they are views of.

Whether ``reshape``, ``flatten`` and ``contiguous`` copy depends on strides. Arrays have
none: tensors that enter a program count as contiguous, and so does what operators make
of such tensors, as far as :data:`_KEEPING` and :data:`_MAKING` know. Of others it is
unknown whether the result is a copy. If one of the two is written to, the other cannot
be read: reading is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tpuport.core.tracing.patching import Patch
from tpuport.patches.memories import (
    BASE,
    PERHAPS_COPYING,
    PLACE,
    UNKNOWN,
    Place,
    Step,
    by_torch,
    is_array,
    is_slice,
    join,
    leave,
    name_of,
    place_of,
    share,
    strides_known,
    taken_out,
    written,
)

#: Functions that give views, where an override takes their place.
_VIEWS = {"chunk", "expand", "permute", "select", "split", "squeeze", "tensor_split"}
_VIEWS |= {"transpose", "unbind", "unflatten", "unsqueeze", "view", "narrow", "t"}
_VIEWS |= {
    "movedim",
    "swapaxes",
    "diagonal",
    "unfold",
    "view_as_complex",
    "view_as_real",
}
#: Operators that change the dims of a tensor and no number.
_TURNING = {"squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_"}
_TURNING |= {"detach_"}
#: Operators whose result is contiguous, whatever they are given.
_MAKING = {"linear", "mm", "bmm", "addmm", "baddbmm", "layer_norm", "rms_norm"}
_MAKING |= {"native_layer_norm", "softmax", "_softmax", "log_softmax", "embedding"}
_MAKING |= {"gather", "repeat", "tile", "one_hot", "_unsafe_view"}
#: Those whose result is contiguous if all that they are given is; pointwise ones too.
_KEEPING = {"cat", "stack", "clone", "_to_copy", "pad", "constant_pad_nd", "dropout"}
_KEEPING |= {"sum", "mean", "amax", "amin", "var", "cumsum", "group_norm", "where"}
_KEEPING |= {"conv1d", "conv2d", "conv3d", "convolution", "interpolate", "type_as"}
_KEEPING |= {"empty_like", "zeros_like", "ones_like", "full_like", "masked_fill"}
_KEEPING |= {"native_group_norm", "index_put", "copy", "new_zeros", "new_ones"}
#: Formats of ``to`` that turn no strides around.
_KEPT = (None, torch.preserve_format, torch.contiguous_format)


class _Kind(Enum):
    VIEW = auto()
    PERHAPS_COPYING = auto()
    TURNING = auto()
    MAKING = auto()
    KEEPING = auto()
    CONVERTING = auto()
    PERHAPS_TURNING = auto()
    OTHER = auto()


_kinds: dict[Any, _Kind] = {}


def _kind(func: Any) -> _Kind:
    """What an operator is to those that share memory."""
    found = _kinds.get(func)
    if found is None:
        found = _kinds[func] = _kind_of(func, name_of(func))
    return found


def _kind_of(func: Any, name: str) -> _Kind:
    named = {
        _Kind.PERHAPS_COPYING: PERHAPS_COPYING,
        _Kind.TURNING: _TURNING,
        _Kind.MAKING: _MAKING,
        _Kind.CONVERTING: {"to"},
        _Kind.PERHAPS_TURNING: {"einsum"},
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


def _source(args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """What a view is made of, and the other arguments."""
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("input", rest.pop("self", None)), (), rest


def _note_view(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    source, args, kwargs = _source(args, kwargs)
    if not is_array(source):
        return
    several = isinstance(result, list | tuple)
    for index, part in enumerate(result) if several else [(None, result)]:
        if part is source or not is_array(part) or is_slice(part):
            continue
        if PLACE not in vars(part):
            place = place_of(source)
            step = Step(func, args, kwargs, index)
            _check_strides(step, place)
            join(part, Place(place.memory, place, step))


def _check_strides(step: Step, place: Place) -> None:
    """torchax counts strides in the tensor, and torch in the memory."""
    meta = place.meta() if step.name == "as_strided" else None
    if meta is not None and not meta.is_contiguous():
        raise RuntimeError("as_strided of a view that is not contiguous: of a clone()")


def _note_result(kind: _Kind, args: Any, kwargs: Any, result: Any) -> None:
    """Mark results whose strides are unknown."""
    if kind is _Kind.MAKING:
        return
    given = [*args, *kwargs.values()] if kwargs else args
    known, found = True, False
    for one in given:
        for part in one if isinstance(one, list | tuple) else (one,):
            if is_array(part):
                found = True
                known = known and kind is _Kind.KEEPING and strides_known(part)
    if not found or known:
        return
    for part in result if isinstance(result, list | tuple) else (result,):
        own = is_array(part) and not is_slice(part)
        if own and part is not given[0]:
            setattr(part, UNKNOWN, True)


def _noted(kind: _Kind, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    if kind in (_Kind.VIEW, _Kind.PERHAPS_COPYING):
        _note_view(func, args, kwargs, result)
        return
    _note_result(kind, args, kwargs, result)
    if kind is _Kind.PERHAPS_TURNING:
        given = [one for one in pytree.tree_leaves((args, kwargs)) if is_array(one)]
        if len(given) == 1:  # of several torch makes a product
            place_of(result).memory.doubt(place_of(given[0]).memory)


def _perhaps_copied(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """The result of ``reshape`` and the like: a view or a copy, as in torch."""
    source, args, kwargs = _source(args, kwargs)
    if not is_array(source) or not is_array(result):
        return result
    step = Step(func, args, kwargs, None)
    alone = not is_slice(source) and PLACE not in vars(source)
    if not (alone and strides_known(source)) or "memory_format" in kwargs:
        place = place_of(source)
        meta = place.meta()
        found: Any = None
        if meta is not None:
            with by_torch():
                found = step(meta)
        known = found is not None and UNKNOWN not in vars(place.memory.root)
        if not known or not share(meta, found):
            result = _copied(result, source)
            always = step.name == "contiguous" and "memory_format" not in kwargs
            if not always and not (known and found.is_contiguous()):
                vars(result)[UNKNOWN] = True
            if not known:
                place_of(result).memory.doubt(place.memory)
            return result
    _note_view(func, (source, *args), kwargs, result)
    if not is_slice(result):
        place_of(result).perhaps = True
    return result


def _copied(result: Any, source: Any) -> Any:
    """``result`` with a memory of its own."""
    if result is source:
        return source._env.j2t_iso(source.jax())
    leave(result)
    return result


def _turned(func: Any, tensor: Any, args: Any, kwargs: Any) -> Any:
    """Change the dims of a tensor, which stays what it was for those that share it."""
    place, env = place_of(tensor), tensor._env
    root = taken_out(tensor)
    functional = getattr(torch.ops.aten, name_of(func)[:-1])
    with env._dispatch_mode:
        turned = functional(env.j2t_iso(tensor.jax()), *args, **kwargs)
    tensor._elem = turned.jax()
    vars(tensor)[BASE] = root
    step = Step(functional, args, kwargs, None)
    join(tensor, Place(place.memory, place, step))
    return tensor


def _converted(args: Any, kwargs: Any, result: Any) -> Any:
    """The result of ``to``: the tensor itself unless something changes."""
    source: Any = args[0] if args else None
    if not is_array(source) or not is_array(result):
        return result
    # to(device, dtype, non_blocking, copy): both flags by position is rare.
    flags = [one for one in args[1:] if isinstance(one, bool)]
    copied = kwargs.get("copy", len(flags) > 1 and flags[1])
    turned = kwargs.get("memory_format") not in _KEPT
    if copied or turned:
        result = _copied(result, source)
        if turned:
            setattr(result, UNKNOWN, True)
            place_of(result).memory.doubt(place_of(source).memory)
    elif is_slice(source) and result.dtype == source.dtype:
        return source
    if result is not source:
        _note_result(_Kind.KEEPING, (source,), {}, result)
    return result


def _on_operator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Every operator of ATen."""

    def __torch_dispatch__(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kind, kwargs = _kind(func), kwargs or {}
        if kind is _Kind.TURNING and is_array(args[0]) and not is_slice(args[0]):
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
        if kind is _Kind.TURNING and is_array(args[0]) and not is_slice(args[0]):
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
            place = self.__dict__.get(PLACE)
            if place is not None:
                written(self, place)

    return __setattr__


def _detached(original: Callable[..., Any]) -> Callable[..., Any]:
    def detach(self: Any) -> Any:
        result = original(self)
        _note_view(torch.Tensor.detach, (self,), {}, result)
        return result

    return detach


def _data(original: Any) -> property:
    """What is assigned to ``data`` takes the tensor out of its memory."""

    def assign(self: Any, other: Any) -> None:
        if other is self:
            return
        taken_out(self)
        self._elem = other.jax()
        place = place_of(other)
        alias = Step(torch.Tensor.detach, (), {}, None)
        join(self, Place(place.memory, place, alias))

    return property(lambda self: self, assign)


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
        ("data", "Tensor.data", _data, True),
        ("flatten", "Tensor.flatten", flatten, False),
    )
)
"""For any model that writes in place to a view."""
