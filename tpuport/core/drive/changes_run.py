"""Which patches and overrides run while a pipeline's modules are traced."""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

from tpuport.core.drive.rehearsal import rehearse
from tpuport.core.reports import Reporter
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
        patches=tuple(
            replace(patch, replacement=_replacement(patch, ran))
            for patch in target.patches
        ),
        overrides=tuple(
            replace(one, make=functools.partial(_made, one, ran))
            for one in target.overrides
        ),
    )
    return counted, ran


def never_run(
    pipeline: Any, target: Target, given: Mapping[str, Any], patches: Sequence[Patch]
) -> list[str]:
    """The names of patches on functions that one call of a pipeline never runs.

    Args:
        pipeline: without weights.
        given: keywords of the call.
    """
    counted, ran = counting(target)
    rehearse(pipeline, counted, given, Reporter())
    return [
        patch.name
        for patch in patches
        if not ran[patch.name] and inspect.isroutine(pkgutil.resolve_name(patch.target))
    ]


def _replacement(patch: Patch, ran: Counter[str]) -> Any:
    new: Any = patch.replacement
    if isinstance(new, str):
        new = pkgutil.resolve_name(new)

    def counted(function: Any) -> Any:
        if isinstance(function, staticmethod | classmethod):
            return type(function)(counted(function.__func__))
        is_function = isinstance(function, FunctionType)
        return _counted(function, patch.name, ran) if is_function else function

    return (lambda original: counted(new(original))) if patch.wraps else counted(new)


def _made(
    override: OpOverride, ran: Counter[str], context: OpContext
) -> Callable[..., Any]:
    return _counted(override.make(context), override.name, ran)


def _counted(function: Any, name: str, ran: Counter[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        ran[name] += 1
        return function(*args, **kwargs)

    return run
