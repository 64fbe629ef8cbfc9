"""The best mesh for a run, and what to change where a run does not fit.

Both compile: an estimate only orders what is tried, and the time that may be spent is
bounded. Each result says whether it was compiled or estimated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpuport.core.cost.hlo import HloError
from tpuport.core.cost.kernel_cycles import KernelError
from tpuport.core.files.atomic import one_line
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import TOPOLOGY_NAMES, parse_topology
from tpuport.core.plan.build_ahead import CompileError
from tpuport.core.plan.plan import DENOISE, Plan
from tpuport.core.plan.planner import Planner
from tpuport.core.spec.request import Request
from tpuport.core.spec.variant import Variant
from tpuport.errors import MeshError, ShardingError, TpuportError, UsageError

#: The most changes of each kind that are compiled.
TRIES = 3

#: What is wrong with one mesh, and says nothing of the others.
UNREAD = (CompileError, KernelError, HloError)

#: Larger slices that are looked at.
MOST_SLICES = 4


#: Why a mesh has no plan, the more promising first: there was no time for it, its
#: weights are too large, it did not compile or what was compiled could not be read.
LEFT_OUT = BUDGET, WEIGHTS, ERROR = "budget", "weights", "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A mesh in a search.

    Attributes:
        mesh: the mesh.
        weight_bytes: of one device.
        plan: of the stage that decides; ``None`` where there is none.
        left_out: why there is none: one of :data:`LEFT_OUT`.
        reason: the same in words.
    """

    mesh: MeshSpec
    weight_bytes: int
    plan: Plan | None = None
    left_out: str = ""
    reason: str = ""

    @property
    def seconds(self) -> float | None:
        """Seconds of the deciding stage; ``None`` if it does not fit."""
        if self.plan is None or not self.plan.fits:
            return None
        return self.plan.seconds

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        plan = self.plan
        return {
            "mesh": self.mesh.shape,
            "compiled": plan is not None,
            "fits": plan and plan.fits,
            "weight_bytes_per_chip": self.weight_bytes,
            "hbm_bytes_per_chip": plan and plan.hbm_bytes,
            "seconds_per_step": plan and plan.seconds_per_step,
            "stage_seconds": plan and plan.seconds,
            "compile_seconds": plan and plan.compile_seconds,
            "left_out": self.left_out or None,
            "reason": self.reason,
        }


def rank(planner: Planner, *, budget: float) -> list[Candidate]:
    """The legal meshes, the fastest that fit first, then the others.

    The denoising stage decides, or the first planned stage if denoising is not planned.
    Meshes whose weights alone are too large are not compiled. After the first compile,
    neither are meshes that the budget has no time for. A mesh whose program cannot be
    read is listed with its error.

    Raises:
        KernelError, HloError: the first mesh's error, if no other mesh was compiled.
    """
    names = [s.name for s in planner._stages()]
    deciding = DENOISE if DENOISE in names else names[0]
    started = time.perf_counter()
    found: list[Candidate] = []
    failed: list[TpuportError] = []
    longest = 0.0
    # Most promising first: dp shares nothing but weights, then even halves of sp, tp.
    likely = sorted(planner.legal_meshes(), key=lambda m: (-m.dp, abs(m.sp - m.tp)))
    for spec in likely:
        begun = time.perf_counter()
        weights = planner.weight_bytes(spec)
        plan, left_out, told = None, "", ""
        if weights > planner.chip.hbm_usable_bytes:
            left_out, told = WEIGHTS, "its weights alone are larger than the memory"
        elif any(c.plan for c in found) and begun - started + longest > budget:
            left_out = BUDGET
            told = f"not compiled: the search may take {budget:.0f} s"
        else:
            try:
                plan = planner.plan(spec, stages=[deciding])
            except UNREAD as error:
                failed.append(error)
                left_out, told = ERROR, f"not read: {one_line(error)}"
            longest = max(longest, time.perf_counter() - begun)
        found.append(
            Candidate(
                mesh=spec,
                weight_bytes=weights,
                plan=plan,
                left_out=left_out,
                reason=told,
            )
        )
    if failed and all(c.plan is None for c in found):
        raise failed[0]
    return sorted(found, key=_rank_key)


def _rank_key(candidate: Candidate) -> tuple[int, float]:
    if candidate.seconds is not None:
        return (0, candidate.seconds)
    if candidate.plan is not None:
        return (1, float(candidate.plan.hbm_bytes))
    return (2 + LEFT_OUT.index(candidate.left_out), float(candidate.weight_bytes))


def advise(
    planner: Planner,
    plan: Plan,
    *,
    ranked: Sequence[Candidate] = (),
    budget: float,
) -> list[dict[str, Any]]:
    """What to change so that a run fits: a mesh, a shorter or smaller video, a slice.

    Each change is the nearest that fits: by compiling the programs that did not fit
    (``verified``), or by estimate if no compile within the budget found one. Meshes in
    ``ranked`` that do not fit, or could not be read, are not tried again.
    """
    stages = [s.name for s in plan.stages if not all(p.fits for p in s.programs)]
    known = {c.mesh for c in ranked if c.seconds is None and c.left_out != BUDGET}
    until = time.perf_counter() + budget
    meshes = [
        _on_mesh("mesh", planner, plan, planner, spec)
        for spec in planner.legal_meshes()
        if spec not in {*known, plan.mesh}
    ]
    smaller = list(_smaller(planner, plan))
    changes = (
        sorted(meshes, key=lambda change: change.estimate),
        *([c for c in smaller if c.kind == kind] for kind in ("frames", "size")),
    )
    found = [_first_that_fits(planner, each, stages, until) for each in changes]
    return [advice for advice in (*found, _slice(planner, plan)) if advice]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """Something to try: what changes, to what, on which mesh, with estimated bytes."""

    kind: str
    to: str
    mesh: MeshSpec
    request: Request | None = None
    estimate: float

    def advice(self, size: float, *, verified: bool) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "change": self.kind,
            "to": self.to,
            "hbm_bytes_per_chip": int(size),
            "verified": verified,
        }


def _first_that_fits(
    planner: Planner, changes: Iterable[_Change], stages: list[str], until: float
) -> dict[str, Any] | None:
    """The first change that fits as compiled, or else by estimate."""
    limit = planner.chip.hbm_usable_bytes
    left = [c for c in changes if c.estimate <= limit]
    worst = 1.0
    for _ in range(min(TRIES, len(left))):
        if time.perf_counter() > until:
            break
        change = left.pop(0)
        # The dump has what was asked about, not what was tried in its place.
        try:
            plan = planner.plan(
                change.mesh, request=change.request, stages=stages, keep=False
            )
        except UNREAD as error:
            planner.say(f"{change.to} is left out: {one_line(error)}")
            continue
        if plan.fits:
            return change.advice(plan.hbm_bytes, verified=True)
        worst = max(worst, plan.hbm_bytes / change.estimate)
    # What was compiled was larger than its estimate: so may be what was not.
    for change in left:
        if change.estimate * worst <= limit:
            return change.advice(change.estimate * worst, verified=False)
    return None


def _estimate(plan: Plan, ratio: float, grown: Mapping[str, int]) -> float:
    """Bytes of a device for the program that then needs most.

    Code stays as large as it is, and so do outputs of other calls that a stage keeps.

    Args:
        plan: what was compiled.
        ratio: what inputs and temporaries of programs on all devices are multiplied by.
        grown: bytes of a device that the weights of each component take more.
    """
    found = [0.0]
    for stage in plan.stages:
        components = {program.component for program in stage.programs}
        # Whether a program's weights are of a component or lie there for another one.
        more = sum(grown.get(name, 0) for name in components)
        for program in stage.programs:
            memory = program.memory
            moving = memory.inputs + memory.temporaries
            kept = memory.weights + memory.code + memory.resident
            found.append(kept + more + moving * ratio)
    return max(found)


def _weights(planner: Planner, spec: MeshSpec) -> dict[str, int]:
    """Bytes of each component's weights on one device of a mesh."""
    return {p.component: p.bytes_per_device for p in planner.sharding_plans(spec)}


def _on_mesh(
    kind: str, planner: Planner, plan: Plan, other: Planner, spec: MeshSpec
) -> _Change:
    """The run on another mesh, of the same slice or of the slice of ``other``.

    A device's activations go with its rows and tokens. What tp splits of them is split
    on both meshes, what it leaves whole is not: about half each.
    """
    before = plan.mesh
    share = (
        (before.dp * before.sp) / (spec.dp * spec.sp) * (1 + before.tp / spec.tp) / 2
    )
    here, there = _weights(planner, before), _weights(other, spec)
    grown = {name: there[name] - here[name] for name in here if name in there}
    to = str(spec) if kind == "mesh" else other.topology.name
    return _Change(kind=kind, to=to, mesh=spec, estimate=_estimate(plan, share, grown))


def _sizes(request: Request, variant: Variant) -> Iterator[tuple[str, dict[str, Any]]]:
    """Shorter videos and smaller pictures of about the same shape, large ones first.

    Each in words, with what changes in the request.
    """
    lengths, sizes = variant.frames, variant.sizes
    frames = request.num_frames - lengths.step
    while lengths.allows(frames):
        yield f"{frames} frames", {"num_frames": frames}
        frames -= lengths.step
    for height in range(request.height, 0, -sizes.multiple):
        width = request.width * height // request.height
        width -= width % sizes.multiple
        asked = (height, width) == (request.height, request.width)
        if not asked and sizes.allows(height) and sizes.allows(width):
            yield f"{width}x{height}", {"height": height, "width": width}


def _smaller(planner: Planner, plan: Plan) -> Iterator[_Change]:
    """The legal runs of a shorter or a smaller video."""
    request = planner.request(plan.mesh)
    for text, changes in _sizes(request, planner.variant):
        try:
            changed = replace(request, **changes)
            planner.requests(plan.mesh).check(changed)
        except UsageError:
            continue
        whole = math.prod(getattr(request, name) for name in changes)
        share = math.prod(changes.values()) / whole
        yield _Change(
            kind="frames" if "num_frames" in changes else "size",
            to=text,
            mesh=plan.mesh,
            request=changed,
            estimate=_estimate(plan, share, {}),
        )


def _slice(planner: Planner, plan: Plan) -> dict[str, Any] | None:
    """The next larger slice of the same chip that should do, by estimate.

    On the mesh that is the default there. Weights that every device holds whole, code,
    and what runs on one device of any slice, do not shrink with more chips.
    """
    here = planner.topology
    slices = (parse_topology(name) for name in TOPOLOGY_NAMES)
    larger = [s for s in slices if s.chip == here.chip and s.devices > here.devices]
    for topology in sorted(larger, key=lambda t: t.devices)[:MOST_SLICES]:
        other = planner.elsewhere(topology)
        try:
            spec = other.default_mesh()
            other.check_mesh(spec)
        except (MeshError, ShardingError, UsageError):
            continue
        change = _on_mesh("topology", planner, plan, other, spec)
        if change.estimate <= planner.chip.hbm_usable_bytes:
            advice = change.advice(change.estimate, verified=False)
            return {**advice, "mesh": spec.shape}
    return None
