"""A ported pipeline beside upstream's own code, call by call, and where they part.

Every call that upstream's pipeline makes of a component is answered twice: by the port,
whose answer goes on, and by a twin of the pipeline. Of the first call the parts are
compared too, and of the first that differs; then the operators of the smallest part
that differs. All are held to :mod:`tpuport.core.drive.rounding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from tpuport.core.drive.parts import (
    Apart,
    Called,
    PartsError,
    Record,
    claimed,
    first_apart,
    recorded,
)
from tpuport.core.drive.rounding import (
    LEAST,
    MOST,
    Measured,
    arrays,
    bounds,
    comparable,
    difference,
    furthest,
    measured,
)
from tpuport.core.files.atomic import one_line
from tpuport.core.seam.device_tensors import DeviceTensor
from tpuport.core.seam.journal import Asked
from tpuport.core.seam.ported import (
    modules_of,
    port_pipeline,
    seam_of,
)
from tpuport.core.seam.ported import unport as unported
from tpuport.core.seam.target import Target
from tpuport.core.seam.values import copied, put_together, take_apart
from tpuport.errors import TpuportError


@dataclass(kw_only=True)
class Compared:
    """A pipeline's run on a mesh beside upstream's.

    Attributes:
        mesh: in words.
        worst: the largest difference of what the pipeline makes; ``None`` if it failed.
        tensors: how many were compared: results of calls, and what the pipeline makes.
        calls: by the name of what was called, how often and the largest difference.
        bounds: the least that rounding allows in such a call, of calls where that was
            measured: those that differ by more than what is never a fault.
        first: the call that differs first; empty if none does.
        apart, allowed: how far ``part`` differs, and how far rounding may take it.
        part: the smallest module that differs by itself, and its class: its own forward
            differs, or a native form that takes its place.
        op: the first operator of ``part`` whose result differs, or what the port runs
            in its place; empty where each operator by itself is as upstream's.
        whole: the calls whose parts could not be compared by themselves.
        unmeasured: the calls that do not run in float64; they may differ by 1e-4.
        empty: the calls whose results have no numbers to compare.
        nan: the first call where upstream's own result has NaN.
        error: what was refused.
    """

    mesh: str
    worst: float | None = None
    tensors: int = 0
    calls: dict[str, tuple[int, float]] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    first: str = ""
    apart: float = 0.0
    allowed: float = 0.0
    part: str = ""
    op: str = ""
    whole: list[str] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    nan: str = ""
    error: str = ""

    @property
    def equal(self) -> bool:
        """Whether all is as upstream's."""
        near = self.worst is not None and self.worst < MOST
        return not self.error and not self.first and near

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; a difference without bound is ``None``."""
        calls = {n: [count, _finite(w)] for n, (count, w) in self.calls.items()}
        worst = _finite(self.worst)
        found = {"worst": worst, "apart": _finite(self.apart), "calls": calls}
        return {**asdict(self), **found, "equal": self.equal}


@dataclass(frozen=True)
class _Kept:
    """The first call of a name, or the first that differs: what its parts were given.

    Attributes:
        random: the state of torch's generator before the call.
        apart: how far the call differs; ``None`` if it does not.
    """

    records: Mapping[str, Record]
    random: torch.Tensor
    apart: Apart | None


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
        kept: dict[str, _Kept] = {}
        port_pipeline(self.ours, target)
        try:
            if calls:
                seam = seam_of(self.ours)
                seam.journal.answer = lambda one: self._both(one, found, kept)
            found.worst = difference(self._made(self.ours), expected)
            found.tensors += comparable(expected)
            _refuse(expected, found, self.theirs)
        except TpuportError as error:
            found.error = one_line(error)
        finally:
            unported(self.ours)
        if not calls and not found.equal:
            return self.compare(target, expected)
        for name, one in kept.items():
            if found.error and one.apart is None:
                continue  # as upstream's; what is refused is told
            part = self._part(name, one, target, found)
            if part is not None:
                self._tell(found, name, part)
                break
        return found

    def _made(self, pipeline: Any) -> list[np.ndarray]:
        torch.manual_seed(0)  # of pipelines that draw without a generator
        output = pipeline(**self.arguments())
        values = output.values() if hasattr(output, "values") else [output]
        return [np.asarray(value) for value in values if value is not None]

    def _both(self, asked: Asked, found: Compared, kept: dict[str, _Kept]) -> Any:
        """The port's answer to a call, compared with upstream's."""
        name, given = asked.name, _on_host((asked.args, asked.kwargs))
        random = torch.get_rng_state()
        module = modules_of(self.theirs)[name.partition(".")[0]]
        with recorded(module) as records:
            theirs = self._theirs(name, given)
        torch.set_rng_state(random)
        ours = asked.run()
        results = arrays(ours), arrays(theirs)
        compared = comparable(results[1])
        found.tensors += compared
        if not compared:
            _note(found.empty, name)
        if not found.nan and any(np.isnan(one).any() for one in results[1]):
            found.nan = name
        worst, apart, allowed = difference(*results), 0.0, LEAST
        if worst > LEAST:
            worth = self._worth(name, given, random)
            if worth is None:
                _note(found.unmeasured, name)
            apart, allowed = furthest(*results, bounds(results[1], worth))
            found.bounds[name] = min(allowed, found.bounds.get(name, allowed))
        count, before = found.calls.get(name, (0, 0.0))
        found.calls[name] = count + 1, max(before, worst)
        near = apart <= allowed
        if not count or not (near or kept[name].apart):
            own = None if near else Apart("", apart, allowed)
            kept[name] = _Kept(records, random, own)
        return ours if near else theirs

    def _worth(self, name: str, given: Called, random: torch.Tensor) -> Measured | None:
        """What rounding changes in a call by upstream's code."""
        component, _, inside = name.partition(".")

        def run(module: torch.nn.Module, own: Callable[[Any], Any]) -> Any:
            torch.set_rng_state(random)
            args, kwargs = own(given)
            return attrgetter(inside or "__call__")(module)(*args, **kwargs)

        return measured(run, modules_of(self.theirs)[component])

    def _theirs(self, name: str, given: Called) -> Any:
        args, kwargs = copied(given)
        with torch.no_grad():
            return attrgetter(name)(self.theirs)(*args, **kwargs)

    def _tell(self, found: Compared, name: str, part: Apart) -> None:
        """Note where a call differs."""
        component = name.partition(".")[0]
        module = modules_of(self.theirs)[component].get_submodule(part.path)
        place = f"{component}.{part.path}".rstrip(".")
        found.first, found.part = name, f"{place} ({type(module).__name__})"
        found.apart, found.allowed, found.op = part.apart, part.allowed, part.op

    def _part(
        self, name: str, kept: _Kept, target: Target, found: Compared
    ) -> Apart | None:
        """The smallest part of a call that differs by itself, or the call itself."""
        component, _, inside = name.partition(".")
        target = claimed(target, component)
        ours, theirs = (modules_of(p)[component] for p in (self.ours, self.theirs))
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(kept.random)
            try:
                parts = first_apart(ours, theirs, inside, kept.records, target)
            except PartsError:
                found.whole.append(name)
                return kept.apart
        if not parts.measured:
            _note(found.unmeasured, name)
        return parts.apart or kept.apart


def _on_host(value: Any) -> Any:
    """A copy with plain tensors: what is read in float64 later must not become so."""
    leaves: list[torch.Tensor] = []
    form = take_apart(value, leaves, [])
    plain = (o.on_host() if isinstance(o, DeviceTensor) else o for o in leaves)
    return put_together(form, (one.detach().clone() for one in plain))


def _note(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)


def _refuse(expected: list[np.ndarray], found: Compared, pipeline: Any) -> None:
    """Refuse a pipeline by upstream that makes NaN, or nothing to compare."""
    own = f"upstream's own {type(pipeline).__name__}"
    if any(one.dtype.kind in "fc" and np.isnan(one).any() for one in expected):
        where = f", first in {found.nan}" if found.nan else ""
        raise TpuportError(f"{own} makes NaN{where}; give other --weights")
    if not comparable(expected):
        raise TpuportError(f"{own} makes no numbers to compare; change --option")


def _finite(worst: float | None) -> float | None:
    return worst if worst is not None and math.isfinite(worst) else None
