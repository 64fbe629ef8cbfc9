"""``tpuport compile``: a run's programs as files, for devices here or elsewhere."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport import targets
from tpuport.cli.asked.environment import (
    cache_folder,
    prepare,
    prepare_topology,
    running,
)
from tpuport.cli.asked.first import check_read, check_written
from tpuport.cli.asked.many_hosts import joined
from tpuport.cli.asked.options import command, flag
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.variants import check_model, with_model
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import give_out, say
from tpuport.core.enums import WeightsOn
from tpuport.core.files.atomic import scratch_folder
from tpuport.core.files.fingerprint import fingerprint_files, versions
from tpuport.core.files.run_record import STAGES
from tpuport.core.files.stores import begun, ended
from tpuport.core.mesh.hosts import here
from tpuport.core.mesh.slices import parse_topology, topology_devices
from tpuport.core.programs.folder_place import BUILT, MANIFEST, check_place
from tpuport.core.reports import Reporter, bytes_text, plural
from tpuport.core.spec import kinds
from tpuport.core.spec.run_settings import read_value
from tpuport.errors import UsageError

if TYPE_CHECKING:
    from tpuport.cli.runs.checks import PipelineCall
    from tpuport.core.mesh.device_mesh import PlacedMesh
    from tpuport.core.mesh.slices import Topology
    from tpuport.core.plan.building import Built

LOCAL = "local"


@command(
    "compile",
    topology=flag(
        "--topology NAME",
        "A TPU slice, such as v6e-8, that this machine need not have; cpu-8 for eight "
        "virtual CPU devices; local for the devices of this machine.",
    ),
    stage=flag(
        "--stage encode|denoise|decode",
        "Compile only this stage; may be repeated. (default: all stages)",
    ),
    out=flag("--out FOLDER", "Where the executables go; required."),
)
def compile_(
    settings: Settings,
    topology: str = LOCAL,
    stage: list[str] | None = None,
    out: str | None = None,
) -> None:
    """Compile all programs of a run, for `generate --executables`.

    Takes the settings of `generate`. No weights are needed: upstream's pipeline runs
    once with made-up answers, and the programs that it calls are compiled. On several
    hosts process 0 writes the folder.

    Example: tpuport compile --topology v6e-8 --variant 5b --out programs
    """
    signals.keep_nothing()
    found = _prepare_devices(topology, settings)
    if not settings.out:
        raise UsageError(
            "--out is missing; name the folder for the executables, such as --out built"
        )
    with joined(settings) as own, contextlib.ExitStack() as stack:
        here().same({"--topology": topology, "--stage": str(stage)})
        if here().several and topology != LOCAL:
            raise UsageError(
                f"--topology {topology}: is compiled for by one process; leave "
                "--distributed and --coordinator out"
            )
        if not here().first:  # process 0 writes the folder, and all programs are equal
            folder = stack.enter_context(scratch_folder())
            own = replace(own, out=str(folder))
        document = _compile(own, topology, found, stage)
        give_out(document, as_json=own.json, report=own.report)


def _prepare_devices(name: str, settings: Settings) -> Topology | None:
    """Set the process up for the devices named; a TPU topology is returned."""
    virtual = re.fullmatch(r"cpu-([1-9][0-9]*)", name)
    if name == LOCAL or virtual:
        if virtual:
            if settings.mesh is not None:
                settings.mesh.resolve(int(virtual[1]))
            os.environ["JAX_PLATFORMS"] = "cpu"
            flag = f"--xla_force_host_platform_device_count={virtual[1]}"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
        prepare(debug=settings.debug)
        return None
    known = functools.partial(parse_topology, others="local, or cpu-8")
    found = read_value(known, name, "--topology")
    if settings.mesh is not None:
        settings.mesh.resolve(found.devices)
    prepare_topology(found)
    prepare(debug=settings.debug)
    return found


def _built(
    call: PipelineCall,
    placed: PlacedMesh,
    wanted: Sequence[str],
    folder: Path,
    *,
    attached: bool,
) -> list[Built]:
    """The programs of stages, in the folder; what a chip refuses streams, if it may."""
    from tpuport.core.plan.building import TooLargeError, build_pipeline

    while True:
        found = call.rehearsed(placed, quiet=bool(call.streamed))
        try:
            built = build_pipeline(
                found, wanted, folder, attached=attached, reporter=call.reporter
            )
        except TooLargeError as error:
            auto = call.settings.weights_on == WeightsOn.AUTO
            if not auto or error.component not in found.may_stream:
                raise
            call.streamed |= {error.component}
            continue
        for component, size in found.streamed.items():
            call.reporter.say(
                f"{component}: {bytes_text(size)} of its blocks' weights wait in the "
                "host's memory and stream (--weights-on host)"
            )
        return built


def _configs(folder: Path) -> dict[str, str]:
    """What the processes of a run need alike, of what is read for programs."""
    if not here().several:
        return {}
    files = [p for p in folder.rglob("*.json") if not p.name.endswith(".index.json")]
    return {"configs by their fingerprint": fingerprint_files(folder, files)}


def _compile(
    settings: Settings, name: str, topology: Topology | None, stages: list[str] | None
) -> dict[str, Any]:
    started = time.perf_counter()
    asked = read_value(kinds.any_path, settings.out, "--out")
    check_place(asked)
    for stage in stages or ():
        if stage not in STAGES:
            raise UsageError(f"--stage {stage!r}: choose one of {', '.join(STAGES)}")
    wanted = [n for n in STAGES if not stages or n in stages]
    check_read(settings)
    check_written(replace(settings, out=None), 1)
    check_model(settings, prompt=False)
    settings = with_model(settings, weights=False)
    with running(settings) as display:
        from tpuport.cli.runs.planning import prepared
        from tpuport.core.plan.pipeline_plan import topology_mesh
        from tpuport.core.programs.built_folder import write_manifest

        cache = cache_folder(settings.cache_dir)
        folder, before = begun(asked, BUILT, cache, display)
        call = prepared(settings, wanted, display)
        here().same(_configs(call.folder.folder))
        if topology is None:
            call.settle_mesh()
            placed = targets.place_for_port(call.settings.mesh)
        else:
            devices = topology_devices(topology)
            mesh = settings.mesh or call.default_mesh(devices)
            placed = topology_mesh(topology, mesh)
        call.settle_dtype(placed)
        built = _built(call, placed, wanted, folder, attached=topology is None)
        about = {
            "topology": name,
            "pipeline": call.folder.class_name,
            "mesh": str(placed.spec),
            "dtype": str(call.settings.dtype),
            **targets.made_with(call.target(placed, Reporter()), call.settings),
        }
        entries = [one.entry for one in built]
        write_manifest(folder, entries, about, display.say)
        ended(asked, folder, before, MANIFEST)
    total = sum(entry.size for entry in entries)
    say(
        f"wrote {plural(len(built), 'program')} of {', '.join(wanted)} "
        f"({bytes_text(total)}) to {asked}; use them with --executables {asked}"
    )
    return {
        "command": "compile",
        **about,
        "versions": versions(),
        "out": str(asked),
        "stages": wanted,
        "programs": [one.as_dict() for one in built],
        "program_bytes": total,
        "trace_seconds": sum(one.trace_seconds for one in built),
        "compile_seconds": sum(one.compile_seconds for one in built),
        "seconds": time.perf_counter() - started,
    }
