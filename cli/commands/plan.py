"""``tpuport plan``: memory, time and traffic on TPUs that are not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuport.api import import_libraries
from tpuport.cli.asked.absent_chips import prepare_topology
from tpuport.cli.asked.cache_folder import cache_folder
from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import command
from tpuport.cli.asked.sessions import (
    check_early,
    check_run_early,
    configs_of,
    request_of,
    source_of,
)
from tpuport.cli.asked.settings import PROMPT, Settings
from tpuport.cli.runs.any_pipeline import is_any, with_model
from tpuport.cli.runs.any_plan import plan_any
from tpuport.cli.shown import plan_text, signals
from tpuport.cli.shown.output import give_out
from tpuport.core.enums import Dtype, Task
from tpuport.core.files.run_record import STAGES
from tpuport.core.plan.dump_folder import check_dump
from tpuport.core.run.progress import Display
from tpuport.errors import UsageError

if TYPE_CHECKING:
    from tpuport.core.files.sources import Source
    from tpuport.core.mesh.slices import Topology
    from tpuport.core.plan.plan import Plan
    from tpuport.core.plan.planner import Planner
    from tpuport.core.reports import Reporter
    from tpuport.core.spec.request import Request
    from tpuport.core.spec.requests import Requests
    from tpuport.core.spec.variant import Variant

ALL = "all"


@command("plan")
def plan(
    settings: Settings,
    topology: Annotated[
        str,
        typer.Option(
            "--topology",
            metavar="NAME",
            help="The TPU slice, such as v5e-4, v5p-8, v6e-8 or v7x-8.",
        ),
    ],
    stage: Annotated[
        str,
        typer.Option(
            "--stage",
            metavar="encode|denoise|decode|all",
            help="The stages to plan; several as encode,denoise.",
        ),
    ] = "denoise",
    dump: Annotated[
        str | None,
        typer.Option(
            "--dump", metavar="FOLDER", help="Keep programs and schedules here."
        ),
    ] = None,
    budget: Annotated[
        float,
        typer.Option(
            "--budget",
            metavar="SECONDS",
            min=0.0,
            help="Start no new compile after this time, in the search of --mesh auto "
            "or for a size that fits.",
        ),
    ] = 540.0,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Also each program and sharding rule."),
    ] = False,
) -> None:
    """Tell whether a run fits a TPU slice, and how long it takes.

    Needs neither a TPU nor weights: the programs of `generate` are compiled for the
    slice. The exit code is 0 even if the run does not fit; see "fits" of --json.

    Example: tpuport plan --topology v6e-8 --variant 5b
    """
    from tpuport.core.mesh.slices import parse_topology

    found = parse_topology(topology)
    prepare_topology(found)
    prepare(debug=settings.debug)
    settings = with_model(settings, weights=False)
    run = _any if is_any(settings) else _known
    made = run(settings, found, stage=stage, dump=dump, budget=budget)
    document = {"command": "plan", **made.as_dict()}
    if not settings.json:
        print(plan_text.everything(made) if verbose else plan_text.text(made))
    give_out(document, as_json=settings.json, report=settings.report)


def _any(
    settings: Settings,
    topology: Topology,
    *,
    stage: str,
    dump: str | None,
    budget: float,
) -> Plan:
    """The plan of a pipeline that upstream's code drives."""
    folder = None if dump is None else Path(dump).expanduser()
    if folder is not None:
        check_dump(folder)
    with Display(signals.check) as display:
        planned = _stages(stage)
        return plan_any(
            settings, topology, planned, budget=budget, dump=folder, reporter=display
        )


def _known(
    settings: Settings,
    topology: Topology,
    *,
    stage: str,
    dump: str | None,
    budget: float,
) -> Plan:
    """The plan of a model with a plugin."""
    batch = settings.batch
    stages, prompts = _checked(settings, topology, stage, batch, dump)
    said = f"planning for {topology.name}"
    with Display(signals.check) as display, display.timed(said):
        return _plan(
            settings,
            topology,
            stages,
            prompts,
            batched=batch is not None,
            budget=budget,
            dump=dump,
            reporter=display,
        )


def _checked(
    settings: Settings,
    topology: Topology,
    stage: str,
    batch: int | None,
    dump: str | None,
) -> tuple[list[str], list[str]]:
    """Refuse what can be refused early; the stages and the prompts to plan."""
    known = check_early(settings)
    if settings.mesh is not None:
        # The table of slices knows how many there are; nothing need be loaded.
        settings.mesh.resolve(topology.devices)
    stages = _stages(stage)
    prompts = _prompts(settings, batch)
    # An image that is not given is stood in for later.
    if settings.image is None and known.variant and Task.TEXT in known.variant.tasks:
        check_run_early(known, settings)
    if dump is not None:
        check_dump(Path(dump).expanduser())
    return stages, prompts


def _stages(asked: str) -> list[str]:
    if asked == ALL:
        return list(STAGES)
    wanted = [name.strip() for name in asked.split(",")]
    for name in wanted:
        if name not in STAGES:
            raise UsageError(
                f"--stage {name!r}: choose of {', '.join(STAGES)}, or {ALL}"
            )
    return [name for name in STAGES if name in wanted]


def _prompts(settings: Settings, batch: int | None) -> list[str]:
    """Of the videos: one of each, or ``batch`` of the only one."""
    given = settings.prompt or (PROMPT,)
    if batch is None:
        return list(given)
    if len(given) > 1:
        raise UsageError(
            f"{len(given)} prompts beside --batch {batch}: give one --prompt, or leave "
            "--batch out to plan a video of each prompt"
        )
    return list(given) * batch


def _plan(
    settings: Settings,
    topology: Topology,
    stages: list[str],
    prompts: list[str],
    *,
    batched: bool,
    budget: float,
    dump: str | None,
    reporter: Reporter,
) -> Plan:
    with signals.starting(before="\n"):
        import_libraries(reporter)
    from tpuport.core.plan.planner import Planner
    from tpuport.core.plan.search import advise, rank

    cache = cache_folder(settings.cache_dir)
    with configs_of(settings, cache, reporter) as (form, variant, checkpoint):
        source = _source(settings, variant)

        def ask(requests: Requests) -> Request:
            asked = request_of(settings, source)
            one = {"prompt": prompts, "seed": None, "batched": batched}
            return requests.request(**{**asked, **one})

        planner = Planner(
            port=form,
            variant=variant,
            checkpoint=checkpoint,
            topology=topology,
            cache=cache / "schedules",
            ask=ask,
            settings=replace(settings, dtype=settings.dtype or Dtype(variant.dtype)),
            stages=stages,
            inputs={source.kind: source.for_videos(len(prompts))} if source else None,
            reporter=reporter,
            dump=Path(dump).expanduser() if dump else None,
        )
        ranked = rank(planner, budget=budget) if settings.search else []
        made = _final(planner, settings, ranked, stages)
        made.meshes = [candidate.as_dict() for candidate in ranked]
        # Of a search the dump has all meshes, and of a plan in tiles the whole too.
        made.files = planner.written
        if not made.fits:
            made.advice = advise(planner, made, ranked=ranked, budget=budget)
        return made


def _final(
    planner: Planner, settings: Settings, ranked: list[Any], stages: list[str]
) -> Plan:
    """The plan of all stages on the mesh asked for, or the best one."""
    if ranked and ranked[0].plan is not None:
        best = ranked[0]
        names = [stage.name for stage in best.plan.stages]
        others = [name for name in stages if name not in names]
        if not others:
            return best.plan
        rest = planner.plan(best.mesh, stages=others)
        return best.plan.joined(rest)
    default = planner.default_mesh()
    if settings.mesh is None:
        return planner.plan(default)
    made = planner.plan(settings.mesh)
    if made.mesh != default:
        made.notes.append(f"default mesh here: {default}; --mesh auto compares")
    if unused := planner.unused(made.mesh):
        made.notes.append(unused)
    return made


def _source(settings: Settings, variant: Variant) -> Source | None:
    """What the run starts from; a grey image where one is needed and none was given."""
    source = source_of(settings, variant)
    tasks = variant.tasks
    if source is not None or Task.TEXT in tasks or Task.IMAGE not in tasks:
        return source
    import numpy as np

    from tpuport.core.files.sources import read_image

    height = settings.height or variant.height
    width = settings.width or variant.width
    return read_image(np.full((height, width, 3), 128, np.uint8))
