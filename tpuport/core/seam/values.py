"""What upstream's code hands to a module and gets back: tensors in any structure.

A value is taken apart into its tensors and a form. The form is hashable: two calls with
equal forms and tensors of equal shapes run the same program.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tpuport.errors import TpuportError

#: Types that are told apart by their value.
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    slice,
    range,
)
#: Objects within objects, at most: a reference back to a parent must end.
_DEEPEST = 8


@dataclass(frozen=True, slots=True)
class Form:
    """The structure of a value, without its tensors.

    Attributes:
        kind: ``"tensor"``, ``"plain"``, ``"same"`` (told apart by identity),
            ``"list"``, ``"tuple"``, ``"dict"``, ``"object"`` or ``"function"``.
        value: of a plain value or one told by identity; the globals of a function; the
            class of other values.
        keys: of a dict, the names of an object's attributes, or a function's code.
        parts: the forms inside.
        hashed: the hash of all this.
    """

    kind: str
    value: Any = None
    keys: tuple[Any, ...] = ()
    parts: tuple[Form, ...] = ()
    hashed: int = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Once: the attributes of a large model are looked up at every call.
        own = hash((self.kind, self.value, self.keys, self.parts))
        object.__setattr__(self, "hashed", own)

    def __hash__(self) -> int:
        return self.hashed


@dataclass(frozen=True, slots=True)
class _Plain:
    """A plain value with its type: 1, 1.0 and True are equal in Python."""

    type: type
    text: str
    value: Any = dataclasses.field(compare=False)


class _Same:
    """An object that equals itself alone; it is kept alive, so its id is its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class FormError(TpuportError):
    """A value with tensors that cannot be put together again."""


def take_apart(
    value: Any,
    leaves: list[Any],
    containers: list[Any],
    plain: list[Any] | None = None,
) -> Form:
    """The form of ``value``.

    Args:
        value: any Python value.
        leaves: the tensors found are added here, in order.
        containers: the lists, dicts and objects found are added here, in order: a
            module may change them in place.
        plain: objects without tensors are added here; their plain attributes are part
            of the form.

    Raises:
        FormError: a collection of an unknown class holds tensors.
    """
    return _Taking(leaves, containers, [] if plain is None else plain).form(value, 0)


def put_together(
    form: Form, leaves: Iterator[Any], containers: list[Any] | None = None
) -> Any:
    """The value of a form, with the next ``leaves`` in place of its tensors."""
    if form.kind == "tensor":
        return next(leaves)
    if form.kind in ("plain", "same"):
        return form.value.value
    if containers is None:
        containers = []
    is_output = dataclasses.is_dataclass(form.value) and form.kind == "dict"
    made: Any
    if form.kind in ("list", "dict", "object") and not is_output:
        kind = form.value
        made = kind.__new__(kind) if form.kind == "object" else kind()
        containers.append(made)
        found = (put_together(part, leaves, containers) for part in form.parts)
        if form.kind == "list":
            made.extend(found)
        else:
            inside(made).update(zip(form.keys, found, strict=True))
        return made
    parts = [put_together(part, leaves, containers) for part in form.parts]
    if form.kind == "function":
        cells = tuple(types.CellType(part) for part in parts)
        return types.FunctionType(
            form.keys[0], form.value.value, form.keys[1], None, cells
        )
    if form.kind == "tuple":
        named = hasattr(form.value, "_fields")
        return form.value(*parts) if named else form.value(parts)
    return form.value(**dict(zip(form.keys, parts, strict=True)))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, in order."""
    leaves: list[torch.Tensor] = []
    take_apart(value, leaves, [])
    return leaves


def copied(value: Any) -> Any:
    """A value whose tensors and collections are its own."""
    leaves: list[torch.Tensor] = []
    form = take_apart(value, leaves, [])
    return put_together(form, (leaf.detach().clone() for leaf in leaves))


def inside(container: Any) -> dict[Any, Any]:
    """What a dict holds, or the attributes of an object, to be changed in place."""
    return container if isinstance(container, dict) else vars(container)


@dataclass(slots=True)
class _Taking:
    leaves: list[Any]
    containers: list[Any]
    plain: list[Any]

    def form(self, value: Any, depth: int) -> Form:
        if isinstance(value, torch.Tensor):
            self.leaves.append(value)
            return Form("tensor")
        kind: Any = type(value)
        if isinstance(value, _PLAIN):
            return Form("plain", _Plain(kind, repr(value), value))
        if isinstance(value, list):
            self.containers.append(value)
            return Form("list", kind, (), self._each(value, depth))
        if isinstance(value, tuple):
            return Form("tuple", kind, (), self._each(value, depth))
        if isinstance(value, dict) and (
            kind in (dict, OrderedDict) or dataclasses.is_dataclass(kind)
        ):
            if not dataclasses.is_dataclass(kind):
                self.containers.append(value)
            keys = tuple(value)
            return Form("dict", kind, keys, self._each(value.values(), depth))
        if isinstance(value, types.FunctionType) and _holds_tensors(_bound(value), 2):
            made = _Same(value.__globals__), (value.__code__, value.__name__)
            return Form("function", *made, self._each(_bound(value), depth))
        if isinstance(value, Collection) and _holds_tensors(value, _DEEPEST - depth):
            raise FormError(
                f"a {kind.__name__} with tensors cannot go through a program; use a "
                "list, a tuple or a dict"
            )
        if depth < _DEEPEST and _may_hold_tensors(value, _DEEPEST - depth):
            self.containers.append(value)
            parts = vars(value)
            return Form("object", kind, tuple(parts), self._each(parts.values(), depth))
        if callable(value) or not hasattr(value, "__dict__"):
            return Form("same", _Same(value))
        self.plain.append(value)
        # The object is handed on as it is; what it says is part of the form.
        told = [(n, repr(v)) for n, v in vars(value).items() if isinstance(v, _PLAIN)]
        return Form("same", _Same(value), tuple(told))

    def _each(self, values: Any, depth: int) -> tuple[Form, ...]:
        return tuple(self.form(value, depth + 1) for value in values)


def _bound(function: types.FunctionType) -> tuple[Any, ...]:
    """What a function takes from where it was made."""
    return tuple(cell.cell_contents for cell in function.__closure__ or ())


def _holds_tensors(value: Any, depth: int) -> bool:
    """Whether an object has tensors among its attributes, at any depth."""
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (*_PLAIN, type, torch.nn.Module)):
        return False
    if isinstance(value, Mapping):
        return any(_holds_tensors(part, depth - 1) for part in value.values())
    if isinstance(value, Sequence | Set | deque):
        return any(_holds_tensors(part, depth - 1) for part in value)
    if isinstance(value, types.FunctionType):
        return _holds_tensors(_bound(value), depth - 1)
    if callable(value) or not hasattr(value, "__dict__"):
        return False
    return any(_holds_tensors(part, depth - 1) for part in vars(value).values())


def _may_hold_tensors(value: Any, depth: int) -> bool:
    """Whether an object holds tensors, or is a cache with places for tensors."""
    named = "cache" in type(value).__name__.lower() and hasattr(value, "__dict__")
    return (named and not callable(value)) or _holds_tensors(value, depth)


def names_of(form: Form) -> list[str]:
    """Names of a call's tensors, for people.

    Args:
        form: of the arguments by position and by name.
    """
    args, kwargs = form.parts
    return [*_named(args, "argument "), *_named(kwargs, "")]


def _named(form: Form, name: str) -> Iterator[str]:
    if form.kind == "tensor":
        yield name
    keys = form.keys if form.kind in ("dict", "object") else range(len(form.parts))
    for key, part in zip(keys, form.parts, strict=False):
        top = not name or name == "argument "
        yield from _named(part, f"{name}{key}" if top else f"{name}[{key!r}]")


def content_of(container: Any) -> list[Any]:
    """What a list, a dict or an object holds now."""
    if isinstance(container, list):
        return list(container)
    return list(inside(container).items())


def same_content(one: list[Any], other: list[Any]) -> bool:
    """Whether two contents are the same objects, or equal numbers and texts."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, tuple) and isinstance(b, tuple):
            return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
        return a is b or (isinstance(a, int | str | float) and bool(a == b))

    return len(one) == len(other) and all(map(same, one, other))


def equal(one: Any, other: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Whether two values are equal, tensors and objects by what they hold.

    Args:
        seen: pairs of objects that are under way.
    """
    seen = set() if seen is None else seen
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.nn.Module):
        return True  # the module is elsewhere in the tree, and compared there
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and not one.is_meta and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(
            equal(one[key], other[key], seen) for key in one
        )
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(
            equal(*pair, seen) for pair in zip(one, other, strict=True)
        )
    parts = _parts(one)
    if parts is None:
        return bool(one == other)
    if (id(one), id(other)) in seen:
        return True
    seen.add((id(one), id(other)))
    return equal(parts, _parts(other), seen)


def _parts(value: Any) -> dict[str, Any] | None:
    """The parts of an object to compare; ``None`` if ``==`` compares the object."""
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, types.MethodType):
        return {"function": value.__func__}
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return {"code": value.__code__, "default": value.__defaults__, "cells": cells}
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return None
    return vars(value)
