"""The plan of a pipeline's run: on a mesh, or on the best one."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpuport.cli.asked.environment import cache_folder
from tpuport.cli.asked.settings import PROMPT, Settings
from tpuport.cli.runs.checks import PipelineCall, check_on_host, check_vae, prompts_of
from tpuport.cli.runs.size_class import sized
from tpuport.cli.runs.video_run import find
from tpuport.core.drive.rehearsal import Rehearsal
from tpuport.core.enums import Dtype, StageName, WeightsOn
from tpuport.core.mesh.mesh_spec import MeshSpec, divisors
from tpuport.core.mesh.slices import Topology, topology_devices
from tpuport.core.pipelines.call_arguments import arguments_of, as_arrays
from tpuport.core.plan.pipeline_plan import Folders, plan_pipeline, topology_mesh
from tpuport.core.plan.plan import Plan
from tpuport.core.reports import Reporter
from tpuport.errors import MeshError


def plan_run(
    settings: Settings,
    topology: Topology,
    stages: Sequence[str],
    *,
    budget: float,
    dump: Path | None = None,
    reporter: Reporter,
) -> Plan:
    """Plan the run that the settings ask for; of the folder only configs are read.

    Args:
        stages: names of those to plan.
        budget: seconds that a search for a mesh may take; a compile that has begun is
            finished.
        dump: a folder for compiled programs, accounts and schedules.
    """
    call = prepared(settings, stages, reporter)
    call.settle(dtype=settings.dtype or Dtype.BFLOAT16)
    one = _One(**vars(call), topology=topology, stages=stages, dump=dump)
    if settings.search:
        return _best(one, budget)
    return one.plan(settings.mesh or one.default_mesh(topology_devices(topology)))


def prepared(
    settings: Settings, stages: Sequence[str], reporter: Reporter
) -> PipelineCall:
    """The call; of the folder only configs are there."""
    folder = find(settings, reporter)
    check_on_host(settings, folder)
    check_vae(settings, folder)
    arguments = arguments_of(folder, sized(settings, folder, reporter))
    folder.check_packages(arguments)
    if "prompt" in folder.parameters:
        arguments |= prompts_of(settings, settings.prompt or (PROMPT,))
    arguments |= as_arrays(folder)
    latent = folder.blocks is None and "output_type" in folder.all_parameters
    if latent and stages == [StageName.DENOISE]:
        arguments["output_type"] = "latent"
    call = PipelineCall(
        settings=settings,
        folder=folder.fetched(reporter, weights=False),
        reporter=reporter,
        arguments=arguments,
    )
    call.settle_host()
    return call


@dataclass(kw_only=True)
class _One(PipelineCall):
    """Plans of one run on one slice."""

    topology: Topology
    stages: Sequence[str]
    dump: Path | None
    _again: bool = False

    def rehearse(self, spec: MeshSpec) -> Rehearsal:
        again, self._again = self._again, True
        return self.rehearsed(topology_mesh(self.topology, spec), quiet=again)

    def plan(self, spec: MeshSpec) -> Plan:
        """The plan on a mesh; what does not fit streams where that is left open."""
        found = self.rehearse(spec)
        plan = self.on_chips(spec, found)
        large = {p.component for p in plan.programs if p.error} & found.may_stream
        if not large or self.settings.weights_on != WeightsOn.AUTO:
            return plan
        self.streamed = frozenset(large)
        streaming = self.on_chips(spec, self.rehearse(spec))
        return streaming if streaming.fits else plan

    def on_chips(self, spec: MeshSpec, found: Rehearsal) -> Plan:
        schedules = cache_folder(self.settings.cache_dir) / "schedules"
        return plan_pipeline(
            self.folder,
            found,
            self.topology,
            spec.resolve(self.topology.devices),
            self.settings,
            arguments=self.arguments,
            stages=self.stages,
            kept=Folders(schedules, self.dump),
            reporter=self.reporter,
        )


def _best(one: _One, budget: float) -> Plan:
    """The plan of the fastest mesh that fits; the others are in ``meshes``."""
    started = time.monotonic()
    count = one.topology.devices
    slices = one.topology.slices
    first = MeshSpec(dp=slices, sp=count // slices)
    found = one.rehearse(first)
    heads, rows = _heads_and_rows(found)
    # Two calls of a guided step take one half of the devices each.
    rows = math.lcm(rows, 2)
    plans = [one.on_chips(first, found)]
    others = [s for s in _legal(count, heads, rows, slices) if s != first]
    while others and time.monotonic() - started <= budget:
        spec = others.pop(0)
        plans.append(one.on_chips(spec, one.rehearse(spec)))
    if others:
        left = ", ".join(map(str, others))
        one.reporter.say(f"no time to plan {left}: give more with --budget SECONDS")
    seconds = [plan.seconds_per_step or float("inf") for plan in plans]
    order = sorted(range(len(plans)), key=lambda i: (not plans[i].fits, seconds[i]))
    best = plans[order[0]]
    if not best.fits:
        best = one.plan(best.mesh)
    best.files = sorted({name for plan in plans for name in plan.files})
    best.meshes = [
        {
            "mesh": plans[i].mesh.shape,
            "compiled": True,
            "fits": plans[i].fits,
            "seconds_per_step": plans[i].seconds_per_step,
            "stage_seconds": plans[i].seconds,
            "hbm_bytes_per_chip": plans[i].hbm_bytes,
        }
        for i in order
    ]
    return best


def _heads_and_rows(found: Rehearsal) -> tuple[list[int], int]:
    records = [
        record
        for program in found.programs
        if StageName.DENOISE in program.by_stage
        for record in program.attention
    ]
    return [r.query[1] for r in records], max((r.query[0] for r in records), default=1)


def _legal(count: int, heads: Sequence[int], rows: int, slices: int) -> list[MeshSpec]:
    """The meshes of all devices whose axes all have something to split."""
    found = []
    for dp in divisors(count):
        for tp in divisors(count // dp):
            across = dp % slices == 0 and rows % dp == 0
            if across and all(n % tp == 0 for n in heads):
                found.append(MeshSpec(dp=dp, sp=count // dp // tp, tp=tp))
    if not found:
        raise MeshError(f"no mesh of {count} devices fits heads {heads}, rows {rows}")
    return found
