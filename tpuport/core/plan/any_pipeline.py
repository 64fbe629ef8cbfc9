"""The plan of a pipeline without a plugin: rehearsed, its programs compiled."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpuport.core.arrays import torch_dtype
from tpuport.core.cost.kernel_cycles import KernelsMet, keep_schedules
from tpuport.core.drive.rehearsal import Rehearsal, rehearse, without_weights
from tpuport.core.enums import StageName
from tpuport.core.mesh.chips import chip as chip_named
from tpuport.core.mesh.device_mesh import place_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import Topology, topology_devices
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.plan.build_ahead import Built, build_one, caching
from tpuport.core.plan.dump_folder import keep_program
from tpuport.core.plan.measure import Measured, measure
from tpuport.core.plan.plan import Plan, StagePlan
from tpuport.core.programs.executable_files import ExecutableStore
from tpuport.core.reports import Reporter
from tpuport.core.seam.target import Target
from tpuport.core.spec.run_settings import RunSettings


def rehearsed(
    folder: PipelineFolder,
    target: Target,
    dtype: str,
    arguments: Mapping[str, Any],
    reporter: Reporter,
    *,
    on_host: Collection[str] = (),
) -> Rehearsal:
    """The run of a folder's pipeline on ``target``; only configs are read.

    Args:
        on_host: components that run by upstream's code, and so have no programs.

    Raises:
        WeightsError: a config does not build its class.
        TpuportError: a module cannot become a program.
    """
    with reporter.timed(f"building {folder.class_name} without weights"):
        pipeline = without_weights(folder, torch_dtype(dtype))
    pipeline.set_progress_bar_config(disable=True)
    with reporter.timed(f"rehearsing {folder.class_name}"):
        return rehearse(pipeline, target, arguments, Reporter(), on_host)


def plan_pipeline(
    folder: PipelineFolder,
    found: Rehearsal,
    topology: Topology,
    spec: MeshSpec,
    settings: RunSettings,
    *,
    arguments: Mapping[str, Any],
    stages: Sequence[str],
    cache: Path,
    dump: Path | None = None,
    reporter: Reporter,
) -> Plan:
    """Compile every program of a rehearsed run and add it up.

    Args:
        stages: those whose programs are compiled.
        cache: a folder for the schedules of kernels.
        dump: a folder for compiled programs, accounts and schedules.

    Raises:
        KernelError, HloError: what was compiled could not be read.
        CompileError: a program does not compile, for another reason than its size.
    """
    chip = chip_named(topology.chip)
    made, kernels, files = _measured(
        found, topology, spec, stages, cache, dump, reporter
    )
    return Plan(
        files=files,
        model=folder.class_name,
        variant="",
        weights=folder.reference,
        topology=topology.name,
        chip=chip,
        mesh=spec,
        settings={n: v for n, v in arguments.items() if _plain(v)},
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
        notes=_host_time(found)
        + [
            note
            for programs in made.values()
            for one in programs
            if one.account is not None
            for note in one.account.notes
        ],
    )


def build_pipeline(
    found: Rehearsal,
    stages: Sequence[str],
    folder: Path,
    *,
    attached: bool,
    reporter: Reporter,
) -> list[Built]:
    """Compile every program of a rehearsed run into a folder.

    Args:
        stages: those whose programs are compiled.
        attached: whether the devices are here; see :func:`build_ahead.build`.

    Raises:
        CompileError: a program does not compile, or cannot be serialised.
        ArtifactError: the folder cannot be written.
    """
    store, made = ExecutableStore(folder), []
    with caching(folder, attached):
        for program in found.in_stages(stages):
            started = time.perf_counter()
            key = program.key()
            seconds = time.perf_counter() - started
            told = program.told()
            built = build_one(program, store, key, seconds, told, reporter)
            program.forget()
            made.append(built)
            reporter.say(built.line())
    return made


def _measured(
    found: Rehearsal,
    topology: Topology,
    spec: MeshSpec,
    stages: Sequence[str],
    cache: Path,
    dump: Path | None,
    reporter: Reporter,
) -> tuple[dict[StageName, list[Measured]], dict[StageName, KernelsMet], list[str]]:
    """Each stage's programs, compiled, their kernels, and the files of the dump."""
    files: list[str] = []
    chip = chip_named(topology.chip)
    made: dict[StageName, list[Measured]] = {}
    kernels: dict[StageName, KernelsMet] = {}
    for program in found.in_stages(stages):
        wanted = [stage for stage in program.by_stage if stage in stages]
        for stage in wanted:
            kernels.setdefault(stage, KernelsMet(chip, cache, reporter))
        with reporter.timed(f"compiling {program.name} for {spec} of {topology.name}"):
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


def topology_mesh(topology: Topology, spec: MeshSpec | None) -> Any:
    """The mesh of a plan; all devices along sp where none was named."""
    devices = topology_devices(topology)
    return place_mesh(spec or MeshSpec(sp=len(devices)), devices)


def _host_time(found: Rehearsal) -> list[str]:
    """What a step takes of the host, as a note."""
    if found.host_seconds is None:
        return []
    return [
        f"the host of a rehearsal takes {found.host_seconds:.3f} s a step on this "
        "machine, while the devices make the step before: they wait for it only where "
        "it is longer than a step, which is in no figure"
    ]


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
