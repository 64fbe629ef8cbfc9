"""The plan of a pipeline: rehearsed, its programs compiled."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tpuport.core.arrays import torch_dtype
from tpuport.core.cost.kernel_cycles import KernelsMet, keep_schedules
from tpuport.core.drive.rehearsal import Rehearsal, rehearse, without_weights
from tpuport.core.enums import StageName
from tpuport.core.mesh.chips import chip as chip_named
from tpuport.core.mesh.device_mesh import place_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import Topology, topology_devices
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.plan.measure import Measured, keep_program, measure
from tpuport.core.plan.plan import Plan, StagePlan
from tpuport.core.reports import Reporter
from tpuport.core.seam.target import Target
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.spec.step_cache import StepCache

_HOST = (
    "the host of this machine works {:.3f} s a step, while the devices make the step "
    "before; if their step is shorter, they wait, which no figure has"
)


class Folders(NamedTuple):
    """Folders of a plan.

    Attributes:
        schedules: of kernels, which are kept from plan to plan.
        dump: for compiled programs, accounts and schedules; ``None`` for no dump.
    """

    schedules: Path
    dump: Path | None = None


def rehearsed(
    folder: PipelineFolder,
    target: Target,
    dtype: str,
    arguments: Mapping[str, Any],
    reporter: Reporter,
    *,
    on_host: Collection[str] = (),
    cache: StepCache | None = None,
    first_step: bool = False,
) -> Rehearsal:
    """The run of a folder's pipeline on ``target``; only configs are read.

    Args:
        on_host: components that run by upstream's code, and so have no programs.
        cache: of steps.
        first_step: end after the first ``scheduler.step``.

    Raises:
        WeightsError: a config does not build its class.
        TpuportError: a module cannot become a program.
    """
    with reporter.timed(f"building {folder.class_name} without weights"):
        pipeline = without_weights(folder, torch_dtype(dtype))
    pipeline.set_progress_bar_config(disable=True)
    with reporter.timed(f"rehearsing {folder.class_name}"):
        return rehearse(
            *(pipeline, target, arguments, Reporter(), on_host, cache),
            first_step=first_step,
        )


def plan_pipeline(
    folder: PipelineFolder,
    found: Rehearsal,
    topology: Topology,
    spec: MeshSpec,
    settings: RunSettings,
    *,
    arguments: Mapping[str, Any],
    stages: Sequence[str],
    kept: Folders,
    reporter: Reporter,
) -> Plan:
    """Compile every program of a rehearsed run and add it up.

    Args:
        stages: those whose programs are compiled.
        kept: where the schedules of kernels are kept, and the dump.

    Raises:
        KernelError, HloError: what was compiled could not be read.
        CompileError: a program does not compile, for another reason than its size.
    """
    chip = chip_named(topology.chip)
    made, kernels, files = _measured(found, topology, spec, stages, kept, reporter)
    accounts = [p.account for programs in made.values() for p in programs]
    notes = [note for account in accounts if account for note in account.notes]
    if found.host_seconds is not None:
        notes.insert(0, _HOST.format(found.host_seconds))
    return Plan(
        files=files,
        model=folder.class_name,
        weights=folder.reference,
        topology=topology.name,
        slices=topology.slices,
        chip=chip,
        mesh=spec,
        settings=dict(found.size)
        | {
            name: value
            for name, value in arguments.items()
            if isinstance(value, bool | int | float | str | None)
        },
        dtype=str(settings.dtype),
        attention=str(settings.attention),
        sharding=settings.sharding,
        blocks=found.blocks,
        stages=tuple(
            StagePlan(
                name=stage,
                programs=tuple(made[stage]),
                chip=chip,
                kernels=tuple(use.as_dict() for use in kernels[stage].uses.values()),
                steps=found.steps if stage == StageName.DENOISE else None,
            )
            for stage in StageName
            if stage in made
        ),
        compiler_flags=tuple(
            dict.fromkeys(
                text
                for program in found.in_stages(stages)
                for text in program.flags.texts
            )
        ),
        sharding_plans=found.plans,
        calls=[
            {
                "name": program.name,
                "stage": program.stage,
                "calls": program.calls,
                "inputs": list(program.inputs),
            }
            for program in found.programs
        ],
        host_seconds=found.host_seconds,
        notes=notes,
    )


def _measured(
    found: Rehearsal,
    topology: Topology,
    spec: MeshSpec,
    stages: Sequence[str],
    kept: Folders,
    reporter: Reporter,
) -> tuple[dict[StageName, list[Measured]], dict[StageName, KernelsMet], list[str]]:
    """Each stage's programs, compiled, their kernels, and the files of the dump."""
    files: list[str] = []
    dump = kept.dump
    chip = chip_named(topology.chip)
    made: dict[StageName, list[Measured]] = {}
    kernels: dict[StageName, KernelsMet] = {}
    for program in found.in_stages(stages):
        wanted = [stage for stage in program.by_stage if stage in stages]
        for stage in wanted:
            kernels.setdefault(stage, KernelsMet(chip, kept.schedules, reporter))
        with reporter.timed(f"compiling {program.name} for {spec} of {topology.title}"):
            measured = measure(
                program,
                topology,
                chip,
                kernels[wanted[0]],
                keep_text=dump is not None,
            )
        program.forget()
        if dump is not None:
            number = sum(map(len, made.values()))
            files += keep_program(dump, measured, number, spec, chip)
            measured = replace(measured, hlo="")
        for stage in wanted:
            one = replace(measured, stage=stage, calls=program.by_stage[stage])
            made.setdefault(stage, []).append(one)
    if dump is not None:
        uses = {k: use for met in kernels.values() for k, use in met.uses.items()}
        files += keep_schedules(uses.values(), dump)
    return made, kernels, files


def topology_mesh(topology: Topology, spec: MeshSpec) -> Any:
    return place_mesh(spec, topology_devices(topology))
