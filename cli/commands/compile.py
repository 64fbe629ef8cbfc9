"""``tpuport compile``: a run's programs as files, for devices here or elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuport import api
from tpuport.cli.asked.absent_chips import prepare_topology
from tpuport.cli.asked.cache_folder import cache_folder
from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import command
from tpuport.cli.asked.sessions import (
    check_early,
    check_run_early,
    configs_of,
    in_words,
    make_request,
    open_session,
    source_of,
)
from tpuport.cli.asked.settings import PROMPT, Settings
from tpuport.cli.runs.any_compile import compile_any
from tpuport.cli.runs.any_pipeline import is_any, with_model
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import give_out, say
from tpuport.core.enums import Dtype, Place
from tpuport.core.files.fingerprint import versions
from tpuport.core.files.run_record import STAGES
from tpuport.core.programs.folder_place import check_place
from tpuport.core.reports import Reporter, bytes_text, plural
from tpuport.core.run.progress import Display
from tpuport.core.spec.choices import choices, with_chosen
from tpuport.core.spec.request import Request
from tpuport.errors import UsageError

if TYPE_CHECKING:
    from tpuport.core.mesh.slices import Topology
    from tpuport.core.plan.abstract_programs import AbstractProgram
    from tpuport.core.run.session import Session

LOCAL = "local"


@command("compile")
def compile_(
    settings: Settings,
    topology: Annotated[
        str,
        typer.Option(
            "--topology",
            metavar="NAME",
            help="A TPU slice, such as v6e-8, that this machine need not have; cpu-8 "
            "for eight virtual CPU devices; local for the devices of this machine.",
        ),
    ] = LOCAL,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            "--stage",
            metavar="encode|denoise|decode",
            help="Compile only this stage; may be repeated. (default: all stages)",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Where the executables go; required."
        ),
    ] = None,
) -> None:
    """Compile all programs of a run, for `generate --executables`.

    Takes the settings of `generate`. With --variant and a TPU slice no weights are
    needed.

    Example: tpuport compile --topology v6e-8 --variant 5b --out programs
    """
    found = _prepare_devices(topology, debug=settings.debug)
    settings = with_model(settings, weights=False)
    document = _compile(settings, topology, found, stage)
    give_out(document, as_json=settings.json, report=settings.report)


def _prepare_devices(name: str, *, debug: bool) -> Topology | None:
    """Set the process up for the devices named; a TPU topology is returned.

    Raises:
        UsageError: there is no such topology.
    """
    from tpuport.core.mesh.slices import parse_topology

    virtual = re.fullmatch(r"cpu-([1-9][0-9]*)", name)
    if name == LOCAL or virtual:
        if virtual:
            os.environ["JAX_PLATFORMS"] = "cpu"
            flag = f"--xla_force_host_platform_device_count={virtual[1]}"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
        prepare(debug=debug)
        return None
    found = parse_topology(name, others="local, or cpu-8")
    prepare_topology(found)
    prepare(debug=debug)
    return found


def _compile(
    settings: Settings, name: str, topology: Topology | None, stages: list[str] | None
) -> dict[str, Any]:
    started = time.perf_counter()
    if not settings.out:
        raise UsageError("--out is missing; name the folder for the executables")
    folder = Path(settings.out).expanduser()
    check_place(folder)
    if topology is not None and settings.mesh is not None:
        settings.mesh.resolve(topology.devices)
    for asked in stages or ():
        if asked not in STAGES:
            raise UsageError(f"--stage {asked!r}: choose one of {', '.join(STAGES)}")
    if is_any(settings):
        wanted = [n for n in STAGES if not stages or n in stages]
        return compile_any(settings, name, topology, wanted, folder)
    if settings.batch is not None:
        raise UsageError(
            "--batch: is for pipelines without a plugin; name each --prompt"
        )
    known = check_early(settings)
    check_run_early(known, settings)
    if not settings.prompt:
        settings = replace(settings, prompt=(PROMPT,))
    cache = cache_folder(settings.cache_dir)
    with (
        Display(signals.check) as display,
        _session(settings, topology, cache, display) as session,
    ):
        from tpuport.core.plan.abstract_programs import abstract_programs
        from tpuport.core.plan.build_ahead import build
        from tpuport.core.programs.built_folder import write_manifest

        source = source_of(settings, session.variant)
        request = make_request(session, settings, source)
        display.say(in_words(request))
        wanted = [n for n in STAGES if not stages or n in stages]
        if session.encode_on == Place.HOST and STAGES[0] in wanted:
            wanted.remove(STAGES[0])
        count = len(request.prompts)

        def programs(decided: Callable[[Any], None]) -> Iterator[AbstractProgram]:
            return abstract_programs(
                session.components,
                request,
                session.settings,
                stages=wanted,
                inputs={source.kind: source.for_videos(count)} if source else None,
                decided=decided,
                reporter=display,
            )

        built, decided = build(
            programs,
            session.components,
            request,
            folder,
            attached=topology is None,
            reporter=display,
        )
        about = {"topology": name, **_about(session, request)}
        about["tiling"] = {tiling.stage: tiling.as_dict() for tiling in decided}
        for tiling in decided:
            display.say(tiling.line())
        entries = [b.entry for b in built]
        write_manifest(folder, entries, wanted, about, display.say)
    total = sum(b.entry.size for b in built)
    say(
        f"wrote {plural(len(built), 'program')} of {', '.join(wanted)} "
        f"({bytes_text(total)}) to {folder}; use them with --executables {folder}"
    )
    return {
        "command": "compile",
        **about,
        "out": str(folder),
        "stages": wanted,
        "programs": [b.as_dict() for b in built],
        "program_bytes": total,
        "trace_seconds": sum(b.trace_seconds for b in built),
        "compile_seconds": sum(b.compile_seconds for b in built),
        "seconds": time.perf_counter() - started,
    }


def _about(session: Session, request: Request) -> dict[str, Any]:
    """What the programs are for, as the manifest keeps it."""
    return {
        "model": session.port.name,
        "variant": session.variant.name,
        "mesh": str(session.mesh_spec),
        "device_kind": str(session.mesh.devices.flat[0].device_kind),
        "dtype": session.dtype,
        "attention": str(session.settings.attention),
        "sharding": session.settings.sharding,
        "blocks": session.port.blocks,
        "implementations": choices(session.port),
        "encode_on": session.encode_on,
        "vae_tiling": session.settings.vae_tiling,
        "settings": {
            name: value
            for name, value in request.as_dict().items()
            if name not in ("prompts", "negative_prompts", "seeds", "sources")
        },
        "versions": versions(),
    }


@contextlib.contextmanager
def _session(
    settings: Settings, topology: Topology | None, cache: Path, reporter: Reporter
) -> Iterator[Session]:
    """A session on the devices here, or on those of a topology, which runs nothing."""
    if topology is None:
        with open_session(settings, cache=cache, reporter=reporter) as session:
            yield session
        return
    from tpuport.core.mesh.slices import topology_devices
    from tpuport.core.run.session import Session

    devices = topology_devices(topology)
    with configs_of(settings, cache, reporter) as (form, variant, checkpoint):
        form = with_chosen(form, settings.implementations)
        mesh = api.make_mesh(
            form,
            checkpoint,
            settings.mesh,
            api.default_rows(form, variant, settings.guidance_scale),
            devices,
            reporter,
        )
        asked = replace(
            settings,
            cache_dir=None,
            dtype=settings.dtype or Dtype(variant.dtype),
        )
        with Session(form, variant, checkpoint, mesh, asked, reporter) as session:
            yield session
