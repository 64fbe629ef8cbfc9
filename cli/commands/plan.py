"""``tpuport plan``: memory, time and traffic on TPUs that are not there."""

from __future__ import annotations

from pathlib import Path

from tpuport.cli.asked.environment import prepare, prepare_topology, running
from tpuport.cli.asked.first import check_run
from tpuport.cli.asked.options import command, flag
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.slices import Comparison, Offer, deadline_of, prices, topologies
from tpuport.cli.runs.variants import check_model, with_model
from tpuport.cli.shown import plan_text, signals
from tpuport.cli.shown.output import give_out
from tpuport.core.enums import StageName
from tpuport.core.files.run_record import STAGES
from tpuport.core.mesh.slices import known_topologies
from tpuport.core.plan.dump_folder import check_dump
from tpuport.errors import UsageError

ALL = "all"


@command(
    "plan",
    topology=flag(
        "--topology NAME",
        "The TPU slice, such as v5e-4, v5p-8, v6e-8 or v7x-8; several as v5e-8,v6e-8.",
    ),
    slices=flag(
        "--slices N",
        "So many of the slice, joined by the data-centre network; dp goes across.",
        min=1,
    ),
    price=flag(
        "--price CHIP=NUMBER", "What a chip costs for an hour. May be repeated."
    ),
    deadline=flag("--deadline TIME", "A video may take so long: 60s or 2m."),
    stage=flag(
        "--stage encode|denoise|decode|all",
        "The stages to plan; several as encode,denoise. (default: denoise; all to "
        "compare slices)",
    ),
    dump=flag("--dump FOLDER", "Keep programs and schedules here."),
    budget=flag(
        "--budget SECONDS",
        "Start no new compile after this time, in the search of --mesh auto.",
        min=0.0,
    ),
    verbose=flag("--verbose", "Also each program and sharding rule."),
)
def plan(
    settings: Settings,
    topology: str | None = None,
    slices: int = 1,
    price: list[str] | None = None,
    deadline: str | None = None,
    stage: str | None = None,
    dump: str | None = None,
    budget: float = 540.0,
    verbose: bool = False,
) -> None:
    """Tell whether a run fits a TPU slice, and how long it takes.

    Needs neither a TPU nor weights: upstream's pipeline runs once with made-up
    answers, and its programs are compiled for the slice. The exit code is 0 even if the
    run does not fit; see "fits" of --json.

    Example: tpuport plan --topology v6e-8 --variant 5b
    """
    if topology is None:
        raise UsageError(
            "--topology is missing; name a slice, such as --topology v6e-8; there are "
            f"{known_topologies()}"
        )
    signals.keep_nothing()
    asked = topologies(topology, slices)
    costs, limit = prices(price or (), asked), deadline_of(deadline)
    comparing = len(asked) > 1 or bool(costs) or deadline is not None
    for one in asked:
        prepare_topology(one)
    prepare(debug=settings.debug)
    stages = _stages(stage, ALL if comparing else StageName.DENOISE)
    for one in asked:
        if settings.mesh is not None:
            # The table of slices knows how many there are; nothing need be loaded.
            mesh = settings.mesh.resolve(one.devices)
            mesh.within(slices, one.devices)
    folder = None if dump is None else Path(dump).expanduser()
    if folder is not None:
        if comparing:
            raise UsageError(
                "--dump is of one slice: name one, without --price and --deadline"
            )
        check_dump(folder)
    check_run(settings)
    check_model(settings, prompt=False)
    settings = with_model(settings, weights=False)
    with running(settings) as display:
        from tpuport.cli.runs.planning import plan_run

        made = {
            one.name: plan_run(
                settings, one, stages, budget=budget, dump=folder, reporter=display
            )
            for one in asked
        }
    if comparing:
        videos = settings.batch_size or 1
        offers = [
            Offer(topology=o, plan=made[o.name], videos=videos, price=costs.get(o.chip))
            for o in asked
        ]
        found = Comparison(offers, limit, stages)
        document, text = found.as_dict(), found.text(verbose=verbose)
    else:
        (alone,) = made.values()
        document = alone.as_dict()
        text = plan_text.everything(alone) if verbose else plan_text.text(alone)
    document = {"command": "plan", **document}
    give_out(document, as_json=settings.json, text=[text], report=settings.report)


def _stages(asked: str | None, default: str) -> list[str]:
    asked = default if asked is None else asked
    if asked == ALL:
        return list(STAGES)
    wanted = [name.strip() for name in asked.split(",")]
    for name in wanted:
        if name not in STAGES:
            raise UsageError(
                f"--stage {name!r}: choose of {', '.join(STAGES)}, or {ALL}"
            )
    return [name for name in STAGES if name in wanted]
