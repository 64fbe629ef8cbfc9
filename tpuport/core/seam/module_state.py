"""What a module's forward may read besides its arguments and its weights.

Upstream keeps state in attributes: switches, chunk sizes, caches of frames. A plain
attribute is part of a program's key, a tensor in an attribute is an input of the
program, and what forward writes to an attribute is an output.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from tpuport.core.seam.standing import METHODS
from tpuport.core.seam.values import Form, inside, put_together, take_apart

#: Attributes of every torch module; hooks run outside of forward.
OWN_ATTRIBUTES = frozenset(vars(torch.nn.Module())) | {"forward"}
#: Says in transformers that the hooks that collect hidden states are in place.
_HOOKED = "_output_capturing_hooks_installed"
#: Attributes that forward does not read, or that are frozen.
_LEFT_OUT = frozenset(
    {"_internal_dict", "generation_config", "_diffusers_hook", "_tpuport", _HOOKED}
)
#: Forms of one module that are kept, so that equal forms are one object.
_MOST_FORMS = 64


@dataclass(frozen=True, slots=True)
class State:
    """The attributes of a module's tree at one moment.

    Attributes:
        form: their structure and plain values; part of a program's key.
        tensors: the tensors in them.
        containers: the lists, dicts and objects in them.
    """

    form: Form
    tensors: tuple[torch.Tensor, ...]
    containers: tuple[Any, ...]


#: The trees that hold a module, told when a child of the module is assigned.
_TREES: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[ModuleTree]]
_TREES = weakref.WeakKeyDictionary()


def _assigned(parent: torch.nn.Module, name: str, child: Any) -> None:
    """What torch calls when any module is given a child."""
    for tree in _TREES.get(parent, ()):
        tree.assigned += 1


# Of the process, as torch has no such hook of one module.
torch.nn.modules.module.register_module_module_registration_hook(_assigned)


class ModuleTree:
    """A module and all modules inside, walked anew only if a child was replaced.

    Attributes:
        assigned: how often a module of the tree was given a child. An adapter that
            came, changed weights in place and went leaves the same modules and tensors.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = root
        self.assigned = 0
        self._modules: list[torch.nn.Module] = []
        self._children: list[Any] = []

    def modules(self) -> list[torch.nn.Module]:
        """Each module once, in torch's order."""
        now = _inside(m._modules for m in self._modules)
        if not self._modules or not _identical(now, self._children):
            self._modules = list(self.root.modules())
            self._children = _inside(m._modules for m in self._modules)
            for module in self._modules:
                _TREES.setdefault(module, weakref.WeakSet()).add(self)
        return self._modules


class Attributes:
    """The attributes of a module and of all modules inside."""

    def __init__(self, tree: ModuleTree) -> None:
        self._tree = tree
        self._module = tree.root
        self._seen: list[Any] = []
        self._within: list[Any] = []
        self._held: list[Any] = []
        self._state: State | None = None
        self._forms: dict[Form, Form] = {}

    def state(self) -> State:
        """The state now; the one before if nothing was assigned since."""
        modules = self._tree.modules()
        seen = [*map(type, modules), *_inside(map(vars, modules))]
        same = _identical(seen, self._seen) and _identical(
            _held_in(self._within), self._held
        )
        if not same or self._state is None or self._state.tensors:
            leaves: list[torch.Tensor] = []
            containers: list[Any] = []
            plain: list[Any] = []
            form = take_apart(self._values(), leaves, containers, plain)
            if len(self._forms) == _MOST_FORMS:
                self._forms.clear()
            # One object for equal forms: a look at a program's key compares no parts.
            form = self._forms.setdefault(form, form)
            self._state = State(form, tuple(leaves), tuple(containers))
            self._seen = seen
            within = {id(value): value for value in (*containers, *plain)}
            self._within = list(within.values())
            self._held = _held_in(self._within)
        return self._state

    def _values(self) -> tuple[dict[str, dict[str, Any]], tuple[type, ...]]:
        """The attributes of each module by its path, and the classes of all."""
        own = OWN_ATTRIBUTES | _LEFT_OUT | set(METHODS)
        found, kinds = {}, []
        for path, module in self._module.named_modules():
            values = {k: v for k, v in vars(module).items() if k not in own}
            if values:
                found[path] = values
            kinds.append(type(module))
        return found, tuple(kinds)

    @contextlib.contextmanager
    def held(
        self, form: Form, tensors: Iterator[Any], containers: list[Any]
    ) -> Iterator[dict[str, dict[str, Any]]]:
        """The attributes of ``form`` stand while a program is traced.

        The old attributes are put back on exit, and the old hooks: a hook that every
        trace adds would collect twice. Plain objects keep no tensors of the trace, such
        as rotary tables. The lists, dicts and objects in the attributes are added to
        ``containers``.

        Yields:
            the attributes that were assigned, by module and name, once the block ends.
        """
        modules = dict(self._module.named_modules())
        saved = {path: dict(vars(module)) for path, module in modules.items()}
        plain = _plain_objects(modules.values())
        hooks = {path: [*m._forward_hooks.items()] for path, m in modules.items()}
        given: Mapping[str, Mapping[str, Any]]
        given, _ = put_together(form, tensors, containers)
        written: dict[str, dict[str, Any]] = {}
        try:
            for path, values in given.items():
                _assign(modules[path].__dict__, values)
            yield written
            for path, module in modules.items():
                before = {**saved[path], **given.get(path, {})}
                changed = {
                    name: value
                    for name, value in vars(module).items()
                    if name not in OWN_ATTRIBUTES | {_HOOKED}
                    and (name not in before or before[name] is not value)
                }
                if changed:
                    written[path] = changed
        finally:
            for value, before in plain:
                _take_back(value, before)
            for path, module in modules.items():
                now = module.__dict__
                for name in now.keys() - saved[path].keys():
                    del now[name]
                _assign(now, saved[path])
                module._forward_hooks.clear()
                module._forward_hooks.update(hooks[path])

    def write(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Set attributes as forward would have."""
        if not values:
            return
        modules = dict(self._module.named_modules())
        for path, changed in values.items():
            modules[path].__dict__.update(changed)


@contextlib.contextmanager
def forgetting(module: torch.nn.Module) -> Iterator[None]:
    """Functions that keep their results keep none from before the block, or from it.

    ``functools.lru_cache`` in the code of a module would hand the arrays of one trace
    to the next trace, and to upstream.
    """
    kinds = {kind for child in module.modules() for kind in type(child).__mro__}
    owners = [*kinds, *{id(m): m for m in map(inspect.getmodule, kinds)}.values()]
    kept = [
        function
        for owner in owners
        for value in vars(owner).values()
        for function in _wrapped(value)
        if hasattr(function, "cache_clear")
    ]
    for function in kept:
        function.cache_clear()
    try:
        yield
    finally:
        for function in kept:
            function.cache_clear()


@contextlib.contextmanager
def without_numbers(
    module: torch.nn.Module,
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """In this block a module computes shapes alone; yields what empties a tensor."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype)

    with FakeTensorMode(allow_non_fake_inputs=True):
        named = module.named_parameters, module.named_buffers
        tensors = dict(pair for each in named for pair in each(remove_duplicate=False))
        weights = {name: empty(tensor) for name, tensor in tensors.items()}
        with _reparametrize_module(module, weights):
            yield empty


def _wrapped(value: Any) -> Iterator[Any]:
    """A function, the functions that it wraps, and what they take from outside."""
    while callable(value):
        yield value
        if hasattr(value, "__wrapped__"):
            cells = getattr(value, "__closure__", None) or ()
            yield from (cell.cell_contents for cell in cells)
        value = vars(value).get("__wrapped__") if hasattr(value, "__dict__") else None


def _plain_objects(
    modules: Iterable[torch.nn.Module],
) -> list[tuple[Any, dict[str, Any]]]:
    """Objects in attributes that are no modules, and what they hold."""
    values = {id(v): v for m in modules for v in vars(m).values()}.values()
    kinds = torch.nn.Module, torch.Tensor, type, types.FunctionType
    return [
        (value, dict(vars(value)))
        for value in values
        if hasattr(value, "__dict__") and not isinstance(value, kinds)
    ]


def _take_back(value: Any, before: dict[str, Any]) -> None:
    """Undo what a trace assigned to a plain object, if that has tensors."""
    for name, now in list(vars(value).items()):
        tensors = any(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(now))
        if now is before.get(name) or not tensors:
            continue
        if name in before:
            vars(value)[name] = before[name]
        else:
            del vars(value)[name]


def _assign(now: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if now.get(name) is not value:
            now[name] = value


def _inside(dicts: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [value for one in dicts for value in one.values()]


def _held_in(containers: Iterable[Any]) -> list[Any]:
    """What lists, dicts and objects hold now, one after the other."""
    found: list[Any] = []
    for one in containers:
        if isinstance(one, list):
            found += one
        else:
            found += inside(one)
            found += inside(one).values()
    return found


def _identical(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))
