"""The parts of a module beside upstream's own, each on what upstream gave the part."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tpuport.core.drive.rounding import (
    LEAST,
    bound,
    difference,
    exactly,
    in_float64,
    wide,
)
from tpuport.core.reports import Reporter
from tpuport.core.seam.ported import port_module
from tpuport.core.seam.ported import unport as unported
from tpuport.core.seam.target import Target
from tpuport.core.seam.values import copied, tensors_in
from tpuport.errors import TpuportError

Called = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call."""
Record = tuple[Called, list[np.ndarray]]
"""The first call of a module by upstream's code, and the result."""


class PartsError(TpuportError):
    """With what upstream hands over, the parts of a module do not become programs."""


@dataclass(frozen=True, slots=True)
class Apart:
    """A part of a module that differs by itself.

    Attributes:
        path: in the module.
        apart, allowed: how far, and how far rounding may take it.
        op: the first operator whose result differs; empty where each by itself is as
            upstream's.
    """

    path: str
    apart: float
    allowed: float
    op: str = ""


@contextlib.contextmanager
def recorded(module: torch.nn.Module) -> Iterator[dict[str, Record]]:
    """The calls of all parts of a module, by path, in the order in which they end."""
    found: dict[str, Record] = {}
    given: dict[str, Called] = {}

    def before(path: str, _: Any, args: Any, kwargs: Any) -> None:
        if path not in given:
            given[path] = copied((args, kwargs))

    def after(path: str, _: Any, args: Any, result: Any) -> None:
        if path not in found:
            found[path] = given[path], arrays(result)

    with contextlib.ExitStack() as stack:
        for path, child in module.named_modules():
            one, other = (functools.partial(each, path) for each in (before, after))
            begin = child.register_forward_pre_hook(one, with_kwargs=True)
            end = child.register_forward_hook(other)
            stack.callback(begin.remove)
            stack.callback(end.remove)
        yield found


class _Running:
    """What the hooks of a run read and keep. Hooks are copied with their module."""

    given: dict[str, list[torch.Tensor] | None]
    found: dict[str, list[torch.Tensor]]
    #: What the module that holds a part hands to the part.
    handed: dict[str, list[torch.Tensor]]
    #: Parts that got what was handed over: patches have that in another form.
    left: set[str]


_running = _Running()


class _EachAlone(torch.nn.Module):
    """Runs a module so that each part gets what upstream gave the part.

    The results are what each part makes of that, and what the part was handed, so a
    difference is not handed on, and does not get lost in what comes after. Of several
    calls of a part the first counts.
    """

    def __init__(self, module: torch.nn.Module, paths: Sequence[str]) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)
        self.config = getattr(module, "config", {})  # native blocks read it
        self.paths = tuple(paths)
        for path, child in self.module.named_modules():
            child.alone = path  # so no block is like another, and none is scanned
            if path in paths:
                before, after = _hooks(path)
                child.register_forward_pre_hook(before, with_kwargs=True)
                child.register_forward_hook(after)

    def forward(self, given: list[list[torch.Tensor] | None], call: Called) -> Any:
        _running.given = dict(zip(self.paths, given, strict=True))
        _running.found, _running.handed, _running.left = {}, {}, set()
        args, kwargs = call
        self.module(*args, **kwargs)
        made = _running.found, _running.handed
        return [[one.get(path, []) for path in self.paths] for one in made]


def _hooks(path: str) -> tuple[Callable[..., Any], Callable[..., None]]:
    def before(_: Any, args: Any, kwargs: Any) -> Any:
        before = _tensors((args, kwargs))
        _running.handed.setdefault(path, before)
        given = _running.given.pop(path, None)
        if given is None:
            return None
        if [one.shape for one in given] != [one.shape for one in before]:
            _running.left.add(path)
            return None
        own = iter(given)
        values, put = [*args, *kwargs.values()], []
        for one in values:
            put.append(next(own) if isinstance(one, torch.Tensor) else one)
        named = dict(zip(kwargs, put[len(args) :], strict=True))
        return tuple(put[: len(args)]), named

    def after(_: Any, args: Any, result: Any) -> None:
        _running.found.setdefault(path, tensors_in(result))

    return before, after


def _tensors(call: Called) -> list[torch.Tensor]:
    """The tensors that a call is given by themselves: lists may be written to."""
    values = (*call[0], *call[1].values())
    return [one for one in values if isinstance(one, torch.Tensor)]


def first_apart(
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    inside: str,
    records: Mapping[str, Record],
    target: Target,
) -> Apart | None:
    """The first part of a module that differs by itself; ``None`` if none does.

    Args:
        ours: upstream's code, to be ported.
        inside: the part or the method that was called; empty of the module itself.
        records: of the call by upstream's code.

    Raises:
        PartsError: the parts cannot run so.
    """
    roots = [inside] if inside in records else _outermost(records)
    for root in roots:
        start = f"{root}." if root else ""
        below = [p for p in records if p == root or p.startswith(start)]
        within = {path[len(start) :]: records[path] for path in below}
        one, other = (each.get_submodule(root) for each in (ours, theirs))
        found = _apart_in(one, other, within, target)
        if found is not None:
            return replace(found, path=f"{start}{found.path}".rstrip("."))
    return None


def _outermost(paths: Collection[str]) -> list[str]:
    return [p for p in paths if not any(p.startswith(f"{o}.") for o in paths)]


def _apart_in(
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    records: Mapping[str, Record],
    target: Target,
) -> Apart | None:
    alone = _EachAlone(theirs, [*records])
    others = _in_another_order(records, target)
    given: list[Any] = [
        None if path in others else _tensors(call)
        for path, (call, _) in records.items()
    ]
    random = torch.get_rng_state()

    def run(one: torch.nn.Module, own: Callable[[Any], Any] = copied) -> Any:
        torch.set_rng_state(random)
        with torch.no_grad():
            found, handed = one(own(given), own(records[""][0]))
        return [*found, *handed]

    ported = port_module(_EachAlone(ours, [*records]), target, Reporter())
    try:
        made = [arrays(one) for one in run(ported)]
    except TpuportError as error:
        raise PartsError(str(error)) from error
    finally:
        unported(ported)
    # What the port does not hand to a part is not handed to upstream's either.
    left = _running.left | _running.given.keys()
    given = [None if p in left else g for p, g in zip(records, given, strict=True)]
    upstreams = [arrays(one) for one in run(alone)]
    exact = iter(exactly(functools.partial(run, in_float64(alone), wide)))
    above = {path: _above(path, records) for path in records}
    hold = {above[path] for path in others}
    places = [(path, path in others) for path in records]
    places += [(above[path], above[path] in hold) for path in records]
    for (path, other), found, expected in zip(places, made, upstreams, strict=True):
        allowed = bound(expected, [next(exact) for _ in expected])
        apart = difference(found, expected)
        like = [one.shape for one in found] == [one.shape for one in expected]
        if apart <= allowed or other or not like:
            continue  # a part in another form shows in what holds the part
        one, two = (each.get_submodule(path) for each in (ours, theirs))
        op = "" if target.claims else _operator(one, two, records[path][0], target)
        return Apart(path, apart, allowed, op)
    return None


def _above(path: str, records: Mapping[str, Record]) -> str:
    """The part that hands a part what it is given: lists of parts have no calls."""
    path = path.rpartition(".")[0]
    while path not in records:
        path = path.rpartition(".")[0]
    return path


def _in_another_order(paths: Iterable[str], target: Target) -> set[str]:
    """The parts whose weights native blocks have in another order."""
    claim = target.claims.get(_EachAlone.__name__)
    patterns = [re.compile(one.pattern) for one in claim.transforms] if claim else []
    return {
        path
        for path in paths
        for kind in ("weight", "bias")
        if any(one.fullmatch(f"module.{path}.{kind}") for one in patterns)
    }


def claimed(target: Target, component: str) -> Target:
    """A target for :func:`first_apart` with what a plugin knows of a component."""
    claim = target.claims.get(component)
    if claim is None or not claim.transforms:
        return replace(target, claims={})
    own = [
        replace(one, pattern=rf"module\.(?:{one.pattern})") for one in claim.transforms
    ]
    claim = replace(claim, transforms=tuple(own), split=None)
    return replace(target, claims={_EachAlone.__name__: claim})


class _Operators(torch.overrides.TorchFunctionMode):
    """Keeps the name and the floating-point results of every torch function."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.results: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            getter = func.__name__ == "__get__"  # of x.mT, say
            self.names.append((func.__self__ if getter else func).__name__)
            self.results.append(result.detach().clone())
        return result


def _operator(
    ours: torch.nn.Module, theirs: torch.nn.Module, given: Called, target: Target
) -> str:
    """The first operator of a module whose result differs, of equal operators."""
    seen: list[str] = []

    class Watched(torch.nn.Module):
        """Returns what each operator of the module gave."""

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
            with _Operators() as operators:
                self.module(*args, **kwargs)
            seen[:] = operators.names
            return operators.results

    def run(watched: torch.nn.Module) -> tuple[list[str], list[np.ndarray]]:
        args, kwargs = copied(given)
        with torch.no_grad():
            results = arrays(watched(*args, **kwargs))
        return [*seen], results

    upstreams = run(Watched(theirs))
    twin = port_module(Watched(ours), target, Reporter())
    try:
        made = run(twin)
    except TpuportError:
        return ""
    finally:
        unported(twin)
    for name, result, other, expected in zip(*made, *upstreams, strict=False):
        if name != other:
            return f"{other}, where the port runs {name}"
        if difference([result], [expected]) > LEAST:
            return name
    longer = max(made[0], upstreams[0], key=len)
    longer = longer[min(len(made[0]), len(upstreams[0])) :]
    whose = "the port" if len(made[0]) > len(upstreams[0]) else "upstream"
    return f"{longer[0]}, which only {whose} runs" if longer else ""


def arrays(value: Any) -> list[np.ndarray]:
    return [one.detach().float().numpy().copy() for one in tensors_in(value)]
