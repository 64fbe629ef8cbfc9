"""Which patches and overrides run while a pipeline's modules are traced."""

from __future__ import annotations

import functools
import pkgutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

from tpuport.core.seam.target import Target
from tpuport.core.tracing.context import OpContext
from tpuport.core.tracing.op_overrides import OpOverride
from tpuport.core.tracing.patching import Patch


def counting(target: Target) -> tuple[Target, Counter[str]]:
    """The target, and how often its patches and overrides ran, by name.

    A patch that puts something else than a function in place is not counted.
    """
    ran: Counter[str] = Counter()
    counted = replace(
        target,
        patches=tuple(_patch(patch, ran) for patch in target.patches),
        overrides=tuple(_override(override, ran) for override in target.overrides),
    )
    return counted, ran


def _patch(patch: Patch, ran: Counter[str]) -> Patch:
    new: Any = patch.replacement
    if isinstance(new, str):
        new = pkgutil.resolve_name(new)
    if patch.wraps:

        def wrapped(original: Any) -> Any:
            return _counted(new(original), patch.name, ran)

        return replace(patch, replacement=wrapped)
    if isinstance(new, staticmethod | classmethod):
        kind: Any = type(new)
        new = kind(_counted(new.__func__, patch.name, ran))
        return replace(patch, replacement=new)
    return replace(patch, replacement=_counted(new, patch.name, ran))


def _override(override: OpOverride, ran: Counter[str]) -> OpOverride:
    def make(context: OpContext) -> Callable[..., Any]:
        found: Callable[..., Any] = override.make(context)

        @functools.wraps(found)
        def run(*args: Any, **kwargs: Any) -> Any:
            ran[override.name] += 1
            return found(*args, **kwargs)

        return run

    return replace(override, make=make)


def _counted(function: Any, name: str, ran: Counter[str]) -> Any:
    if not isinstance(function, FunctionType):
        return function

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        ran[name] += 1
        return function(*args, **kwargs)

    return run
