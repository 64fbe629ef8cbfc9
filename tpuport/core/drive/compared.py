"""A ported pipeline beside upstream's own code, call by call, and where they part.

Every call that upstream's pipeline makes of a component is answered twice: by the port,
whose answer goes on, and by a twin of the pipeline. Where the two differ, the parts of
the module are ported one by one, on what upstream gave them, and then the operators of
the smallest part that differs.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from tpuport.core.files.atomic import one_line
from tpuport.core.reports import Reporter
from tpuport.core.seam.journal import Asked
from tpuport.core.seam.ported import modules_of, port_module, port_pipeline, seam_of
from tpuport.core.seam.ported import unport as unported
from tpuport.core.seam.target import Target
from tpuport.core.seam.values import copied, tensors_in
from tpuport.errors import TpuportError

#: The largest difference in float32, as a share of the largest value or of 1.
MOST = 1e-4
Called = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call."""


@dataclass(kw_only=True)
class Compared:
    """A pipeline's run on a mesh beside upstream's.

    Attributes:
        mesh: in words.
        worst: the largest difference of what the pipeline makes; ``None`` if it failed.
        calls: by the name of what was called, how often and the largest difference.
        first: the call that differs first; empty if none does.
        part: the smallest module that differs by itself, and its class: its own forward
            differs, or a native form that takes its place.
        op: the first operator of ``part`` whose result differs, or what the port runs
            in its place; empty where each operator by itself is as upstream's.
        error: what was refused.
        patches: the names of the patches that ran while modules were traced.
    """

    mesh: str
    worst: float | None = None
    calls: dict[str, tuple[int, float]] = field(default_factory=dict)
    first: str = ""
    part: str = ""
    op: str = ""
    error: str = ""

    @property
    def equal(self) -> bool:
        """Whether all is as upstream's."""
        return not self.error and not self.first and _near(self.worst)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; a difference without bound is ``None``."""
        calls = {n: [count, _finite(w)] for n, (count, w) in self.calls.items()}
        worst = _finite(self.worst)
        return {**asdict(self), "worst": worst, "calls": calls, "equal": self.equal}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A pipeline in float32, once to be ported and once as it is.

    Attributes:
        ours, theirs: with equal weights.
        arguments: makes the keywords of a call, with a generator of its own.
    """

    ours: Any
    theirs: Any
    arguments: Callable[[], Mapping[str, Any]]

    def expected(self) -> list[np.ndarray]:
        """What upstream's own code makes."""
        return self._made(self.theirs)

    def compare(
        self, target: Target, expected: list[np.ndarray], *, calls: bool = True
    ) -> Compared:
        """Run the port, and find where it parts from upstream's code.

        Args:
            target: what programs are made for.
            expected: from :meth:`expected`.
            calls: compare each call; without, a run that makes the same is enough.
        """
        shape = dict(target.mesh.shape)
        used = [f"{axis}={size}" for axis, size in shape.items() if size > 1]
        found = Compared(mesh=",".join(used) or "one device")
        given: dict[str, Called] = {}
        port_pipeline(self.ours, target)
        try:
            if calls:
                seam = seam_of(self.ours)
                seam.journal.answer = lambda one: self._both(one, found, given)
            found.worst = difference(self._made(self.ours), expected)
        except TpuportError as error:
            found.error = one_line(error)
        finally:
            unported(self.ours)
        if not calls and not found.equal:
            return self.compare(target, expected)
        if found.first:
            name = found.first
            found.part, found.op = self._part(name, given[name], target)
        return found

    def _made(self, pipeline: Any) -> list[np.ndarray]:
        torch.manual_seed(0)  # of pipelines that draw without a generator
        output = pipeline(**self.arguments())
        values = output.values() if hasattr(output, "values") else [output]
        return [np.asarray(value) for value in values if value is not None]

    def _both(self, asked: Asked, found: Compared, first: dict[str, Called]) -> Any:
        """The port's answer to a call, compared with upstream's."""
        given = copied((asked.args, asked.kwargs))
        random = torch.get_rng_state()
        theirs = self._theirs(asked.name, copied(given))
        torch.set_rng_state(random)
        ours = asked.run()
        worst = difference(_arrays(ours), _arrays(theirs))
        count, before = found.calls.get(asked.name, (0, 0.0))
        found.calls[asked.name] = count + 1, max(before, worst)
        if not _near(worst) and not found.first:
            found.first = asked.name
            first[asked.name] = given
        return ours if _near(worst) else theirs

    def _theirs(self, name: str, given: Called) -> Any:
        args, kwargs = given
        with torch.no_grad():
            return attrgetter(name)(self.theirs)(*args, **kwargs)

    def _part(self, name: str, given: Called, target: Target) -> tuple[str, str]:
        """The smallest part of a component whose own forward differs, and where."""
        component = name.partition(".")[0]
        module = modules_of(self.theirs)[component]
        claim = target.claims.get(component)
        if claim is not None and claim.transforms:
            assert target.general is not None  # parts hold weights as upstream does
            target = target.general
        target = replace(target, claims={})
        with _recorded(module) as records:
            self._theirs(name, given)
        inside = name.partition(".")[2]
        at = inside if inside in records else ""
        while (part := _differing(module, records, at, target)) is not None:
            at = part
        part = module.get_submodule(at)
        op = _operator(part, records[at][0], target) if at in records else ""
        kind = type(part).__name__
        return f"{component}.{at} ({kind})" if at else f"{component} ({kind})", op


_Record = tuple[Called, list[np.ndarray]]
"""The first call of a module by upstream's code, and the result."""


@contextlib.contextmanager
def _recorded(module: torch.nn.Module) -> Iterator[dict[str, _Record]]:
    """The calls of all parts of a module, by path, in the order in which they end."""
    found: dict[str, _Record] = {}
    given: dict[str, Called] = {}

    def before(path: str, _: Any, args: Any, kwargs: Any) -> None:
        if path not in given:
            given[path] = copied((args, kwargs))

    def after(path: str, _: Any, args: Any, result: Any) -> None:
        if path not in found:
            found[path] = given[path], _arrays(result)

    with contextlib.ExitStack() as stack:
        for path, child in module.named_modules():
            one, other = (functools.partial(each, path) for each in (before, after))
            begin = child.register_forward_pre_hook(one, with_kwargs=True)
            end = child.register_forward_hook(other)
            stack.callback(begin.remove)
            stack.callback(end.remove)
        yield found


def _differing(
    module: torch.nn.Module, records: Mapping[str, _Record], at: str, target: Target
) -> str | None:
    """The first part below ``at`` that differs by itself; ``None`` if none does."""
    start = f"{at}." if at else ""
    below = [path for path in records if path.startswith(start) and path != at]
    for path in below:
        if any(path.startswith(f"{other}.") for other in below):
            continue  # a part of a part
        child, (given, expected) = module.get_submodule(path), records[path]
        twin = port_module(child, target, Reporter())
        try:
            args, kwargs = copied(given)
            with torch.no_grad():
                result = _arrays(twin(*args, **kwargs))
        except TpuportError:
            return path
        finally:
            unported(twin)
        if not _near(difference(result, expected)):
            return path
    return None


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


def _operator(module: torch.nn.Module, given: Called, target: Target) -> str:
    """The first operator of a module whose result differs, of equal operators."""
    seen: list[str] = []

    class Watched(torch.nn.Module):
        """Returns what each operator of the module gave."""

        def __init__(self) -> None:
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
            results = _arrays(watched(*args, **kwargs))
        return [*seen], results

    theirs = run(Watched())
    twin = port_module(Watched(), target, Reporter())
    try:
        ours = run(twin)
    except TpuportError:
        return ""
    finally:
        unported(twin)
    pairs = zip(*ours, *theirs, strict=False)
    for name, result, other, expected in pairs:
        if name != other:
            return f"{other}, where the port runs {name}"
        if not _near(difference([result], [expected])):
            return name
    longer = max(ours[0], theirs[0], key=len)[min(len(ours[0]), len(theirs[0])) :]
    whose = "the port" if len(ours[0]) > len(theirs[0]) else "upstream"
    return f"{longer[0]}, which only {whose} runs" if longer else ""


def _arrays(value: Any) -> list[np.ndarray]:
    return [one.detach().float().numpy().copy() for one in tensors_in(value)]


def difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest difference, as a share of the largest value or of 1.

    Other shapes, and NaN on one side, are infinite.
    """
    worst = 0.0
    if [one.shape for one in found] != [other.shape for other in expected]:
        return float("inf")
    for one, other in zip(found, expected, strict=True):
        if one.dtype.kind not in "fiub" or not one.size:
            continue
        wide, truth = one.astype(np.float64), other.astype(np.float64)
        same = (wide == truth) | (np.isnan(wide) & np.isnan(truth))
        apart = np.where(same, 0.0, np.abs(wide - truth))
        scale = max(1.0, float(np.abs(truth[np.isfinite(truth)]).max(initial=0.0)))
        here = float(apart.max()) / scale
        worst = max(worst, here if here == here else float("inf"))
    return worst


def _finite(worst: float | None) -> float | None:
    return worst if worst is not None and math.isfinite(worst) else None


def _near(worst: float | None) -> bool:
    return worst is not None and worst < MOST
