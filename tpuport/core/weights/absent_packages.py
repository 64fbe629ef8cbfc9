"""Packages that upstream's code needs and that are not installed.

Diffusers imports an optional package at the top of a module if the package is there. A
function that uses the package without asking again ends in a NameError, long after the
weights were read.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
import sys
import textwrap
import traceback
import types
from collections.abc import Iterable, Iterator
from typing import Any

from diffusers.utils.import_utils import BACKENDS_MAPPING

from tpuport.core.files.atomic import one_line

_INSTALL = re.compile(r"pip install (?:-U |--upgrade )?([A-Za-z][\w.-]*)")


def needs_of(cls: Any) -> list[str]:
    """What to install for a class that only stands in for upstream's."""
    backends = vars(cls).get("_backends", ())
    known = [name for name in backends if name in BACKENDS_MAPPING]
    absent = [name for name in known if not BACKENDS_MAPPING[name][0]()]
    return [_to_install(name) for name in absent or backends]


def absent_packages(classes: Iterable[type]) -> list[str]:
    """What to install to make and call ``classes``, as far as their code tells.

    A package counts if a function that ``__call__`` may reach uses the package under no
    condition, and no function asks whether the package is there. A package counts too
    if ``__init__`` makes an object of a class that stands in for one of the package.
    """
    classes = list(classes)
    reached: dict[types.FunctionType, None] = {}
    for cls in classes:
        _reach(cls.__call__, cls, reached)
    asked = {name for function in reached for name in _codes_names(function)}
    found = {_to_install(package) for cls in classes for package in _stood_in(cls)}
    for function in reached:
        guarded = _guarded_imports(function.__module__)
        for name in _codes_names(function) & guarded.keys():
            package, guards = guarded[name]
            bound = name in function.__globals__ or guards & asked
            if not bound and _always_used(function, name):
                found.add(_to_install(package))
    return sorted(found)


def _stood_in(cls: Any) -> Iterator[str]:
    """Missing packages for whose classes ``__init__`` names a class of its module."""
    made = inspect.unwrap(cls.__init__)
    if not isinstance(made, types.FunctionType):
        return
    guarded = _guarded_imports(made.__module__)
    for name in _codes_names(made) & guarded.keys():
        known = made.__globals__.get(name)
        if inspect.isclass(known) and known.__module__ == made.__module__:
            yield guarded[name][0]


def absent_of(error: BaseException) -> str | None:
    """What to install if ``error`` tells of a missing package; else ``None``."""
    package: str | None = None
    if isinstance(error, NameError) and error.__traceback__ is not None:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        guarded = _guarded_imports(frame.f_globals.get("__name__", ""))
        package, _ = guarded.get(error.name or "", (None, None))
    elif isinstance(error, ImportError):
        told = _INSTALL.search(one_line(error))
        if told:
            return told[1]
        package = (error.name or "").partition(".")[0]
        package = package if package and not _there(package) else None
    return package and _to_install(package)


def _reach(function: Any, cls: type, found: dict[types.FunctionType, None]) -> None:
    """Add ``function`` and the functions of diffusers that its code names."""
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType) or function in found:
        return
    found[function] = None
    for name in _codes_names(function):
        method = inspect.getattr_static(cls, name, None)
        for one in (
            function.__globals__.get(name),
            getattr(method, "__func__", method),
        ):
            if str(getattr(one, "__module__", "")).startswith("diffusers."):
                _reach(one, cls, found)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _codes_names(function: types.FunctionType) -> set[str]:
    return {name for code in _codes(function.__code__) for name in code.co_names}


def _always_used(function: types.FunctionType, name: str) -> bool:
    """Whether a name is used outside of all conditions of the function."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, ast.Name) and node.id == name:
            return True
        if not isinstance(node, ast.If | ast.IfExp | ast.Try | ast.BoolOp):
            left += ast.iter_child_nodes(node)
    return False


@functools.cache
def _guarded_imports(module: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Names that a module imports from missing packages, if they are there.

    With each its package, and the names that stand for its presence: in the condition
    of the import, and set beside it.
    """
    found: dict[str, tuple[str, frozenset[str]]] = {}
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):  # no module with a source
        return found
    for guard in ast.walk(tree):
        if not isinstance(guard, ast.If):
            continue
        names = frozenset(n.id for n in ast.walk(guard) if isinstance(n, ast.Name))
        for statement in guard.body:
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                continue
            for alias in statement.names:
                where = getattr(statement, "module", None) or alias.name
                package = where.partition(".")[0]
                if not getattr(statement, "level", 0) and not _there(package):
                    bound = alias.asname or alias.name.partition(".")[0]
                    found.setdefault(bound, (package, names))
    return found


def _there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _to_install(package: str) -> str:
    """The name of a package for pip; diffusers knows those that differ."""
    _, told = BACKENDS_MAPPING.get(package, (None, ""))
    found = _INSTALL.search(one_line(told))
    return found[1] if found else package
