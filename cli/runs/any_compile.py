"""The programs of a pipeline without a plugin, compiled into a folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport import targets
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.any_checks import rehearsal_of, with_dtype
from tpuport.cli.runs.any_plan import prepared
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import say
from tpuport.core.files.fingerprint import versions
from tpuport.core.reports import bytes_text, plural
from tpuport.core.run.progress import Display

if TYPE_CHECKING:
    from tpuport.core.mesh.slices import Topology


def compile_any(
    settings: Settings,
    name: str,
    topology: Topology | None,
    stages: Sequence[str],
    out: Path,
) -> dict[str, Any]:
    """Compile what the run of the settings calls; the document of ``tpuport compile``.

    Args:
        name: of the topology.
        topology: ``None`` for the devices of this machine.
        stages: names of those to compile.
        out: the folder for the executables.

    Raises:
        UsageError, WeightsError, MeshError: what is wrong.
        CompileError: a program does not compile.
    """
    started = time.perf_counter()
    with Display(signals.check) as display:
        folder, arguments = prepared(settings, stages, display)
        from tpuport.core.plan.any_pipeline import build_pipeline, topology_mesh
        from tpuport.core.programs.built_folder import write_manifest

        if topology is None:
            placed = targets.place_for_port(settings.mesh)
        else:
            placed = topology_mesh(topology, settings.mesh)
        settings = with_dtype(settings, placed)
        found = rehearsal_of(folder, placed, settings, arguments, display)
        built = build_pipeline(
            found, stages, out, attached=topology is None, reporter=display
        )
        about = {
            "topology": name,
            "pipeline": folder.class_name,
            "mesh": str(placed.spec),
            "dtype": str(settings.dtype),
            "attention": str(settings.attention),
            "versions": versions(),
        }
        components = sorted({one.entry.key.stage for one in built})
        entries = [one.entry for one in built]
        write_manifest(out, entries, components, about, display.say)
    total = sum(entry.size for entry in entries)
    say(
        f"wrote {plural(len(built), 'program')} of {', '.join(stages)} "
        f"({bytes_text(total)}) to {out}; use them with --executables {out}"
    )
    return {
        "command": "compile",
        **about,
        "out": str(out),
        "stages": list(stages),
        "programs": [one.as_dict() for one in built],
        "program_bytes": total,
        "trace_seconds": sum(one.trace_seconds for one in built),
        "compile_seconds": sum(one.compile_seconds for one in built),
        "seconds": time.perf_counter() - started,
    }
