"""Choosing a mesh, and finding what fits: on plans whose figures are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tpuport.cli.shown.plan_text import everything
from tpuport.core.cost.hlo import HloError
from tpuport.core.cost.kernel_cycles import KernelError
from tpuport.core.cost.program_time import Account, Row
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import Topology, parse_topology
from tpuport.core.plan.build_ahead import CompileError
from tpuport.core.plan.measure import Measured, Memory
from tpuport.core.plan.plan import Plan, StagePlan
from tpuport.core.plan.search import Candidate, advise, rank
from tpuport.core.spec.request import Request
from tpuport.core.spec.variant import FrameRule, SizeRule
from tpuport.errors import MeshError, UsageError

V6E = chip("v6e")
GIB = 2**30

REQUEST = Request(
    prompts=("",),
    negative_prompts=("",),
    seeds=((0,),),
    batch_size=1,
    height=128,
    width=256,
    num_frames=33,
    fps=8,
    num_inference_steps=4,
    guidance_scale=6.0,
)


def measured(gib: float, seconds: float, **changes: Any) -> Measured:
    """A program that takes so much memory, 4 GiB of it weights, and time."""
    size = int(gib * GIB)
    row = Row("op", "fusion", "", "other", 1, 1.0, seconds, bound="vector unit")
    fits = size <= V6E.hbm_usable_bytes
    values: dict[str, Any] = {
        "stage": "denoise",
        "program": "step",
        "component": "transformer",
        "calls": 4,
        "memory": Memory(
            weights=4 * GIB,
            inputs=0,
            temporaries=size - 4 * GIB - 1000,
            code=1000,
            resident=0,
            total=size,
        ),
        "limit": V6E.hbm_usable_bytes,
        "lower_seconds": 1.0,
        "compile_seconds": 2.0,
        "account": Account(seconds, [row]) if fits else None,
        "flops": 1e12,
        "devices": 8,
        "error": "" if fits else "too large",
    }
    return Measured(**{**values, **changes})


def plan_of(
    mesh: MeshSpec, program: Measured, request: Request = REQUEST, **changes: Any
) -> Plan:
    stage = StagePlan(name=program.stage, programs=(program,), chip=V6E)
    values: dict[str, Any] = {
        "model": "m",
        "variant": "v",
        "weights": "w",
        "topology": "v6e-8",
        "chip": V6E,
        "mesh": mesh,
        "settings": request.as_dict(),
        "dtype": "bfloat16",
        "attention": "auto",
        "sharding": "default",
        "blocks": "upstream",
        "stages": (stage,),
    }
    return Plan(**{**values, **changes})


class Fake:
    """A planner whose programs take what ``costs`` says of (mesh, request)."""

    def __init__(self, meshes: Sequence[str], costs: Any, weights: Any = None) -> None:
        self.meshes = [MeshSpec.parse(m) for m in meshes]
        self.costs = costs
        self.weights = weights or (lambda spec: 4 * GIB)
        self.chip = V6E
        self.topology = parse_topology("v6e-8")
        self.port = SimpleNamespace(components={"transformer": SimpleNamespace()})
        self.variant = SimpleNamespace(
            frames=FrameRule(step=8), sizes=SizeRule(multiple=16)
        )
        self.compiled: list[tuple[str, int, int]] = []
        self.said: list[str] = []
        self.say = self.said.append

    def _stages(self) -> list[Any]:
        return [SimpleNamespace(name="denoise")]

    def legal_meshes(self) -> list[MeshSpec]:
        return self.meshes

    def weight_bytes(self, spec: MeshSpec) -> int:
        return int(self.weights(spec))

    def sharding_plans(self, spec: MeshSpec) -> list[Any]:
        size = self.weight_bytes(spec)
        return [SimpleNamespace(component="transformer", bytes_per_device=size)]

    def elsewhere(self, topology: Topology) -> Fake:
        found = Fake([], self.costs, self.weights)
        found.topology = topology
        found.port = self.port
        return found

    def default_mesh(self) -> MeshSpec:
        return MeshSpec(dp=2, sp=self.topology.devices // 2)

    def check_mesh(self, spec: MeshSpec) -> None:
        if spec.size == 32:
            raise MeshError("32 devices divide nothing")

    def request(self, spec: MeshSpec) -> Request:
        return REQUEST

    def requests(self, spec: MeshSpec) -> Any:
        def check(request: Request) -> None:
            if request.num_frames == 25:
                raise UsageError("25 is not a count this one takes")

        return SimpleNamespace(check=check)

    def plan(
        self,
        spec: MeshSpec,
        *,
        request: Request | None = None,
        stages: Sequence[str] | None = None,
        keep: bool = True,
    ) -> Plan:
        asked = request or REQUEST
        self.compiled.append((str(spec), asked.num_frames, asked.height))
        return plan_of(spec, self.costs(spec, asked), asked)


def test_meshes_are_ranked_by_time_among_those_that_fit() -> None:
    def costs(spec: MeshSpec, request: Request) -> Measured:
        by_tp = {1: (40, 0.1), 2: (20, 0.7), 4: (10, 0.5), 8: (8, 0.9)}
        return measured(*by_tp[spec.tp])

    fake = Fake(["dp=2,sp=4,tp=1", "dp=2,sp=2,tp=2", "dp=2,tp=4", "tp=8"], costs)
    found: Any = rank(fake, budget=540)  # type: ignore[arg-type]
    assert [c.mesh.tp for c in found] == [4, 2, 8, 1]
    assert [c.plan.fits for c in found] == [True, True, True, False]
    shown = [c.as_dict() for c in found]
    assert [d["seconds_per_step"] for d in shown] == [0.5, 0.7, 0.9, None]
    assert all(d["compiled"] for d in shown)


def test_meshes_whose_weights_are_too_large_are_not_compiled() -> None:
    fake = Fake(
        ["dp=2,sp=4,tp=1", "tp=8"],
        lambda spec, request: measured(10, 0.5),
        weights=lambda spec: 40 * GIB / spec.tp,
    )
    found: Any = rank(fake, budget=540)  # type: ignore[arg-type]
    assert [c[0] for c in fake.compiled] == ["dp=1,sp=1,tp=8"]
    assert "weights alone" in found[-1].reason
    assert found[-1].as_dict()["compiled"] is False


def test_without_time_left_only_the_first_mesh_is_compiled() -> None:
    fake = Fake(["dp=2,tp=4", "tp=8"], lambda spec, request: measured(10, 0.5))
    found: Any = rank(fake, budget=0)  # type: ignore[arg-type]
    assert len(fake.compiled) == 1
    assert "not compiled" in found[-1].reason


def test_a_mesh_that_is_skipped_for_its_weights_does_not_use_up_the_budget() -> None:
    fake = Fake(
        ["dp=2,sp=4,tp=1", "dp=2,tp=4", "tp=8"],
        lambda spec, request: measured(10, 0.5),
        weights=lambda spec: 40 * GIB / spec.tp,
    )
    found: Any = rank(fake, budget=0)  # type: ignore[arg-type]
    assert [c[0] for c in fake.compiled] == ["dp=2,sp=1,tp=4"]
    assert [c.left_out for c in found] == ["", "budget", "weights"]


def test_what_was_compiled_comes_before_what_was_not() -> None:
    """So that the plan of a run that fits nowhere is not compiled once more."""
    fake = Fake(["dp=2,tp=4", "tp=8"], lambda spec, request: measured(40, 0.5))
    found: Any = rank(fake, budget=0)  # type: ignore[arg-type]
    assert [str(c.mesh) for c in found] == ["dp=2,sp=1,tp=4", "dp=1,sp=1,tp=8"]
    assert [c.plan is None for c in found] == [False, True]


@pytest.mark.parametrize(
    "error",
    [KernelError("no\nschedule"), HloError("no count"), CompileError("no room")],
)
def test_a_mesh_that_cannot_be_read_is_listed_and_the_search_goes_on(
    error: Exception,
) -> None:
    def costs(spec: MeshSpec, request: Request) -> Measured:
        if spec.tp == 4:
            raise error
        return measured(10, 0.5)

    fake = Fake(["dp=2,tp=4", "tp=8"], costs)
    # Without time, too: nothing was compiled before the second.
    found: Any = rank(fake, budget=0)  # type: ignore[arg-type]
    assert [str(c.mesh) for c in found] == ["dp=1,sp=1,tp=8", "dp=2,sp=1,tp=4"]
    assert found[-1].left_out == "error"
    assert found[-1].reason == f"not read: {' '.join(str(error).split())}"
    plan = plan_of(found[0].mesh, measured(10, 0.5))
    plan.meshes = [c.as_dict() for c in found]
    assert f"dp=2,sp=1,tp=4: {found[-1].reason}" in everything(plan)


def test_a_search_fails_where_no_mesh_is_left() -> None:
    def costs(spec: MeshSpec, request: Request) -> Measured:
        raise KernelError(f"not on {spec}")

    fake = Fake(["dp=2,sp=4", "dp=2,tp=4", "tp=8"], costs)
    fake.weights = lambda spec: 40 * GIB / spec.tp
    with pytest.raises(KernelError, match="not on dp=2,sp=1,tp=4"):
        rank(fake, budget=540)  # type: ignore[arg-type]
    assert len(fake.compiled) == 2


def test_meshes_that_a_search_found_not_to_fit_are_not_tried_again() -> None:
    """By estimate both others fit; one was compiled, one there was no time for."""

    def costs(spec: MeshSpec, request: Request) -> Measured:
        return measured(20 if spec.dp == 8 else 40, 0.5)

    fake = Fake(["dp=2,tp=4", "dp=4,tp=2", "dp=8"], costs)
    plan = fake.plan(fake.meshes[0])
    known = [
        Candidate(mesh=fake.meshes[0], weight_bytes=0, plan=plan),
        Candidate(mesh=fake.meshes[1], weight_bytes=0, plan=fake.plan(fake.meshes[1])),
        Candidate(mesh=fake.meshes[2], weight_bytes=0, left_out="budget"),
    ]
    fake.compiled.clear()
    fake.weights = lambda spec: GIB
    found: Any = advise(fake, plan, ranked=known, budget=540)  # type: ignore[arg-type]
    tried = [
        mesh for mesh, frames, height in fake.compiled if (frames, height) == (33, 128)
    ]
    assert tried == ["dp=8,sp=1,tp=1"]
    assert found[0] == {
        "change": "mesh",
        "to": "dp=8,sp=1,tp=1",
        "hbm_bytes_per_chip": 20 * GIB,
        "verified": True,
    }


def test_advice_goes_on_after_what_cannot_be_read() -> None:
    def costs(spec: MeshSpec, request: Request) -> Measured:
        if request.num_frames == 17:
            raise KernelError("no schedule")
        return measured(40 * request.num_frames / 33, 0.5)

    fake = Fake(["dp=2,tp=4"], costs)
    found: Any = advise(  # type: ignore[arg-type]
        fake, fake.plan(MeshSpec.parse("dp=2,tp=4")), budget=540
    )
    assert ("9 frames", True) in {(a["to"], a["verified"]) for a in found}
    assert "17 frames is left out: no schedule" in fake.said


def test_advice_is_the_nearest_mesh_length_and_size_that_fit() -> None:
    """40 GiB of 33 frames: 36 of activations, which go with frames and area."""

    def costs(spec: MeshSpec, request: Request) -> Measured:
        area = request.height * request.width / (128 * 256)
        share = request.num_frames / 33 * area / (spec.tp / 4)
        return measured(4 + 36 * share, 0.5)

    fake = Fake(["dp=2,tp=4", "tp=8"], costs)
    asked = MeshSpec.parse("dp=2,tp=4")
    short = fake.plan(asked)
    assert not short.fits
    found: Any = advise(fake, short, budget=540)  # type: ignore[arg-type]
    changes = {a["change"]: (a["to"], a["verified"]) for a in found}
    # 25 frames would fit, but are refused.
    assert changes["frames"] == ("17 frames", True)
    assert changes["size"] == ("192x96", True)
    assert changes["topology"] == ("v6e-16", False)
    # The estimate of the other mesh is too pessimistic to be tried.
    assert "mesh" not in changes


def test_what_the_budget_leaves_out_is_called_an_estimate() -> None:
    fake = Fake(["dp=2,tp=4"], lambda spec, request: measured(40, 0.5))
    found: Any = advise(  # type: ignore[arg-type]
        fake, fake.plan(MeshSpec.parse("dp=2,tp=4")), budget=-1
    )
    assert len(fake.compiled) == 1
    assert {a["verified"] for a in found} == {False}


def test_an_estimate_is_told_with_what_those_before_it_missed() -> None:
    """Each compiled one takes 1.5 times its estimate; three are compiled."""

    def costs(spec: MeshSpec, request: Request) -> Measured:
        return measured(1.5 * (4 + 36 * request.num_frames / 97), 0.5)

    fake = Fake(["dp=2,tp=4"], costs)
    fake.request = lambda spec: replace(REQUEST, num_frames=97)  # type: ignore[method-assign]
    asked = plan_of(MeshSpec.parse("dp=2,tp=4"), measured(40, 0.5))
    found: Any = advise(fake, asked, budget=540)  # type: ignore[arg-type]
    (frames,) = [a for a in found if a["change"] == "frames"]
    tried = [c[1] for c in fake.compiled if c[2] == REQUEST.height]
    assert tried == [73, 65, 57]
    assert frames["verified"] is False
    # 49 frames: 22.2 GiB by estimate, 33.3 with what the others missed.
    assert frames["to"] == "41 frames"
    told = frames["hbm_bytes_per_chip"] / GIB
    assert told == pytest.approx(1.5 * (4 + 36 * 41 / 97))


def sliced(gib: float, weights: Any, **memory: float) -> dict[str, Any] | None:
    """The slice that is advised for a program on v6e-8, dp=2,sp=4."""
    spec = MeshSpec(dp=2, sp=4)
    parts = {name: int(size * GIB) for name, size in memory.items()}
    parts = {"inputs": 0, "code": 0, "resident": 0, **parts}
    held = int(weights(spec))
    total = int(gib * GIB)
    program = measured(
        gib,
        0.5,
        memory=Memory(
            weights=held,
            temporaries=total - held - sum(parts.values()),
            total=total,
            **parts,
        ),
    )
    fake = Fake([], lambda spec, request: program, weights)
    found = advise(fake, fake.plan(spec), budget=-1)  # type: ignore[arg-type]
    return next((a for a in found if a["change"] == "topology"), None)


def test_only_what_is_split_shrinks_on_a_larger_slice() -> None:
    # 10 GiB of weights that every device has, 2 of code, 3 of outputs that are kept;
    # 25 of temporaries, half of it on twice the devices.
    memory = {"code": 2, "resident": 3}
    found = sliced(40, lambda spec: 10 * GIB, **memory)
    assert found is not None
    assert (found["to"], found["verified"]) == ("v6e-16", False)
    assert found["mesh"] == {"dp": 2, "sp": 8, "tp": 1}
    assert found["hbm_bytes_per_chip"] == int(27.5 * GIB)


def test_a_slice_is_advised_only_where_the_estimate_fits() -> None:
    # 25 GiB stay: 25 + 16 / 2 is too much, 32 devices are refused, 25 + 16 / 8 fits.
    found = sliced(41, lambda spec: 25 * GIB)
    assert found is not None
    assert found["to"] == "v6e-64"
    assert found["hbm_bytes_per_chip"] == 27 * GIB
    # Weights that are larger than a chip are so on any slice, unless they are split.
    assert sliced(41, lambda spec: 31.5 * GIB) is None
    found = sliced(41, lambda spec: 8 * 31.5 * GIB / spec.size)
    assert found is not None
    assert found["to"] == "v6e-16"


def test_a_plan_that_does_not_fit_has_no_time_and_says_what_to_change() -> None:
    plan = plan_of(MeshSpec.parse("dp=2,tp=4"), measured(40, 0.5))
    plan.advice = [
        {
            "change": "mesh",
            "to": "dp=1,sp=1,tp=8",
            "hbm_bytes_per_chip": 20 * GIB,
            "verified": True,
        }
    ]
    found = plan.as_dict()
    assert found["fits"] is False
    assert found["hbm_bytes_per_chip"] == 40 * GIB
    assert found["seconds_per_step"] is None
    assert found["stage_seconds"]["denoise"] is None
    shown = everything(plan)
    assert "does not fit: 40.00 GiB of 31.25 GiB" in shown
    assert "change mesh to dp=1,sp=1,tp=8: 20.00 GiB (compiled)" in shown
    assert "no time" in shown


def test_the_kernels_of_a_plan_are_those_of_its_stages() -> None:
    mesh = MeshSpec.parse("dp=2,tp=4")

    def of(stage: str, *keys: str) -> Plan:
        plan = plan_of(mesh, measured(10, 0.5, stage=stage))
        kernels = tuple({"key": key} for key in keys)
        return replace(plan, stages=(replace(plan.stages[0], kernels=kernels),))

    both = of("denoise", "a", "b").joined(of("decode", "c", "b"))
    assert [use["key"] for use in both.kernels] == ["a", "b", "c"]
    assert both.as_dict()["kernels"] == list(both.kernels)
    # A stage that another one takes the place of takes its kernels along.
    left = replace(both, stages=both.stages[:1]).joined(of("decode", "d"))
    assert [use["key"] for use in left.kernels] == ["a", "b", "d"]


def test_stages_add_up_to_the_run() -> None:
    mesh = MeshSpec.parse("dp=2,tp=4")
    denoise = plan_of(mesh, measured(10, 0.5))
    decode = plan_of(mesh, measured(20, 0.25, stage="decode", calls=2, devices=1))
    joined = decode.joined(denoise)
    found = joined.as_dict()
    assert [s.name for s in joined.stages] == ["denoise", "decode"]
    assert found["stage_seconds"] == {
        "encode": None,
        "denoise": pytest.approx(2.0),
        "decode": pytest.approx(0.5),
    }
    assert found["run_seconds"] == pytest.approx(2.5)
    assert found["hbm_bytes_per_chip"] == 20 * GIB
    assert found["compile_seconds"] == 4.0
    assert found["program_bytes"] == 2000
    assert found["utilization"] == pytest.approx(1e12 / (0.5 * 8 * V6E.peak_flops))
