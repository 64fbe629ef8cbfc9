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
    arrays,
    bounds,
    difference,
    furthest,
    measured,
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


@dataclass(frozen=True, slots=True)
class Parts:
    """What :func:`first_apart` found.

    Attributes:
        apart: the first part that differs by itself; ``None`` if none does.
        measured: whether upstream's code ran in float64; else each part may differ by
            :data:`tpuport.core.drive.rounding.MOST`.
    """

    apart: Apart | None
    measured: bool = True


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
) -> Parts:
    """The first part of a module that differs by itself.

    Args:
        ours: upstream's code, to be ported.
        inside: the part or the method that was called; empty of the module itself.
        records: of the call by upstream's code.

    Raises:
        PartsError: the parts cannot run so.
    """
    roots = [inside] if inside in records else _outermost(records)
    known = True
    for root in roots:
        start = f"{root}." if root else ""
        below = [p for p in records if p == root or p.startswith(start)]
        within = {path[len(start) :]: records[path] for path in below}
        one, other = (each.get_submodule(root) for each in (ours, theirs))
        found = _apart_in(one, other, within, target)
        known &= found.measured
        if found.apart is not None:
            path = f"{start}{found.apart.path}".rstrip(".")
            return Parts(replace(found.apart, path=path), known)
    return Parts(None, known)


def _outermost(paths: Collection[str]) -> list[str]:
    return [p for p in paths if not any(p.startswith(f"{o}.") for o in paths)]


def _apart_in(
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    records: Mapping[str, Record],
    target: Target,
) -> Parts:
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
    worth = measured(run, alone)
    rounding = iter(bounds([one for each in upstreams for one in each], worth))
    above = {path: _above(path, records) for path in records}
    hold = {above[path] for path in others}
    places = [(path, path in others) for path in records]
    places += [(above[path], above[path] in hold) for path in records]
    for (path, other), found, expected in zip(places, made, upstreams, strict=True):
        each = [next(rounding) for _ in expected]
        apart, allowed = furthest(found, expected, each)
        like = [one.shape for one in found] == [one.shape for one in expected]
        if apart <= allowed or other or not like:
            continue  # a part in another form shows in what holds the part
        one, two = (each.get_submodule(path) for each in (ours, theirs))
        op = "" if target.claims else _operator(one, two, records[path][0], target)
        return Parts(Apart(path, apart, allowed, op), worth is not None)
    return Parts(None, worth is not None)


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
        tensor = isinstance(result, torch.Tensor)
        if tensor and (result.is_floating_point() or result.is_complex()):
            getter = func.__name__ == "__get__"  # of x.mT, say
            self.names.append((func.__self__ if getter else func).__name__)
            self.results.append(result.detach().clone())
        return result


def _operator(
    ours: torch.nn.Module, theirs: torch.nn.Module, given: Called, target: Target
) -> str:
    """The first operator of a module whose result differs, of equal operators.

    Results follow from those before: what rounding allows is measured of each so.
    """
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

    random, ran = torch.get_rng_state(), []

    def run(
        watched: torch.nn.Module, own: Callable[[Any], Any] = copied
    ) -> list[torch.Tensor]:
        torch.set_rng_state(random)
        args, kwargs = own(given)
        with torch.no_grad():
            found: list[torch.Tensor] = watched(*args, **kwargs)
        ran.append([*seen])
        return found

    expected = arrays(run(Watched(theirs)))
    names, worth = [*seen], measured(run, Watched(theirs))
    same = all(one == names for one in ran)
    rounding = bounds(expected, worth if same else None)
    twin = port_module(Watched(ours), target, Reporter())
    try:
        made = arrays(run(twin))
    except TpuportError:
        return ""
    finally:
        unported(twin)
    each = zip(seen, made, names, expected, rounding, strict=False)
    for name, result, other, one, allowed in each:
        if name != other:
            return f"{other}, where the port runs {name}"
        if difference([result], [one]) > allowed:
            return name
    longer = max(seen, names, key=len)[min(len(seen), len(names)) :]
    whose = "the port" if len(seen) > len(names) else "upstream"
    return f"{longer[0]}, which only {whose} runs" if longer else ""
