"""``tpuport plan``: memory, time and traffic on TPUs that are not there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuport import api
from tpuport.api import DEFAULT_MODEL
from tpuport.cli.asked.absent_chips import prepare_topology
from tpuport.cli.asked.cache_folder import cache_folder
from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import (
    AspectRatio,
    Attention,
    Blocks,
    CacheDir,
    Config,
    Debug,
    Dtype,
    Frames,
    Guidance,
    Height,
    Image,
    Json,
    Model,
    ModelOption,
    NegativePrompt,
    Prompt,
    Report,
    Resolution,
    Sharding,
    Size,
    SourceVideo,
    StepCaching,
    Steps,
    Strength,
    Vae,
    VaeTiling,
    VariantName,
    Weights,
    Width,
)
from tpuport.cli.asked.sessions import (
    check_early,
    check_folder,
    check_run_early,
    known_variant,
    read_source,
    say_imports,
)
from tpuport.cli.asked.settings import Settings, gather
from tpuport.cli.shown.errors import reported
from tpuport.cli.shown.output import give_out
from tpuport.cli.shown.progress import make_display
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.spec.model_port import BLOCKS
from tpuport.errors import UsageError

if TYPE_CHECKING:
    from tpuport.core.files.sources import Source
    from tpuport.core.mesh.slices import Topology
    from tpuport.core.plan.plan import Plan
    from tpuport.core.plan.planner import Planner, Requests
    from tpuport.core.reports import Reporter
    from tpuport.core.spec.model_port import ModelPort
    from tpuport.core.spec.request import Request
    from tpuport.core.spec.variant import Variant
    from tpuport.core.weights.checkpoint import Checkpoint

AUTO = "auto"
ALL = "all"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

#: Where the length of the text counts, this is what is planned for.
PROMPT = "a panda plays a guitar in a bamboo forest, cinematic, slow motion"


def plan(
    context: typer.Context,
    topology: Annotated[
        str,
        typer.Option(
            "--topology",
            metavar="NAME",
            help="A TPU slice, such as v5e-4, v5p-8, v6e-8 or v7x-8; none is needed.",
        ),
    ],
    model: Model = None,
    variant: VariantName = None,
    weights: Weights = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="MESH|auto",
            help="Such as dp=2,tp=4; auto compiles the legal meshes and ranks them. "
            "(default: what generate takes on all chips)",
        ),
    ] = None,
    stage: Annotated[
        str,
        typer.Option(
            "--stage",
            metavar="encode|denoise|decode|all",
            help="Which stages to plan; also several, as in encode,denoise.",
        ),
    ] = "denoise",
    prompt: Prompt = None,
    negative_prompt: NegativePrompt = None,
    size: Size = None,
    height: Height = None,
    width: Width = None,
    frames: Frames = None,
    steps: Steps = None,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            min=1,
            help="Videos of one prompt, denoised together. (default: a video of each "
            "--prompt, one after the other, as generate makes them)",
        ),
    ] = None,
    guidance: Guidance = None,
    image: Image = None,
    video: SourceVideo = None,
    strength: Strength = None,
    resolution: Resolution = None,
    aspect_ratio: AspectRatio = None,
    cache: StepCaching = None,
    option: ModelOption = None,
    dtype: Dtype = None,
    attention: Attention = None,
    sharding: Sharding = None,
    blocks: Blocks = None,
    vae: Vae = None,
    vae_tiling: VaeTiling = None,
    dump: Annotated[
        str | None,
        typer.Option(
            "--dump",
            metavar="FOLDER",
            help="Keep the compiled programs, the account of each operation and the "
            "kernels' schedules here.",
        ),
    ] = None,
    budget: Annotated[
        float,
        typer.Option(
            "--budget",
            metavar="SECONDS",
            min=0.0,
            help="What --mesh auto, or looking for what fits, may take; a compile that "
            "has begun is finished.",
        ),
    ] = 540.0,
    cache_dir: CacheDir = None,
    report: Report = None,
    config: Config = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Whether a run fits a TPU slice and what it takes, without a TPU or weights.

    The programs that generate would run are compiled for the slice. Exit code 0 also
    where the run does not fit; --json says so as "fits".
    """
    with reported(debug=debug) as guard:
        settings = gather(context)
        guard.debug = settings.debug
        from tpuport.core.mesh.slices import parse_topology

        found = parse_topology(topology)
        prepare_topology(found)
        prepare(debug=settings.debug)
        search = settings.mesh == AUTO
        settings = replace(settings, mesh=None if search else settings.mesh)
        port = check_early(settings)
        if settings.mesh is not None:
            # The table of slices knows how many there are; nothing need be loaded.
            MeshSpec.parse(settings.mesh).resolve(found.devices)
        stages = _stages(port, stage)
        prompts = _prompts(settings, batch)
        if settings.image is None:
            _check_run(port, settings)
        if dump is not None:
            check_folder("--dump", Path(dump).expanduser())
        with make_display() as display:
            made = _plan(
                settings,
                found,
                stages,
                prompts,
                search=search,
                batched=batch is not None,
                budget=budget,
                dump=dump,
                reporter=display,
            )
        document = {"command": "plan", **made.as_dict()}
        give_out(document, as_json=settings.json, report=settings.report)
        if not settings.json:
            from tpuport.core.plan.plan_text import text

            print(text(made))


def _stages(port: ModelPort, asked: str) -> list[str]:
    names = [stage.name for stage in port.stages]
    if asked == ALL:
        return names
    wanted = [name.strip() for name in asked.split(",")]
    for name in wanted:
        if name not in names:
            raise UsageError(
                f"--stage {name!r}: choose of {', '.join(names)}, or {ALL}"
            )
    return [name for name in names if name in wanted]


def _prompts(settings: Settings, batch: int | None) -> list[str]:
    """Of the videos: one of each, or ``batch`` of the only one."""
    given = settings.prompts or (PROMPT,)
    if batch is None:
        return list(given)
    if len(given) > 1:
        raise UsageError(
            f"{len(given)} prompts beside --batch {batch}: give one --prompt, or leave "
            "--batch out to plan a video of each prompt"
        )
    return list(given) * batch


def _check_run(port: ModelPort, settings: Settings) -> None:
    """What can be refused early; an image that is not given is stood in for later."""
    variant = known_variant(port, settings)
    if variant is not None and "t2v" in variant.tasks:
        check_run_early(port, settings)


def _plan(
    settings: Settings,
    topology: Topology,
    stages: list[str],
    prompts: list[str],
    *,
    search: bool,
    batched: bool,
    budget: float,
    dump: str | None,
    reporter: Reporter,
) -> Plan:
    say_imports(reporter)
    from tpuport.core.plan.planner import Planner
    from tpuport.core.plan.search import advise, rank

    cache = cache_folder(settings.cache_dir)
    with _checkpoint(settings, cache, reporter) as (form, variant, checkpoint):
        source = _source(settings, variant)

        def ask(requests: Requests) -> Request:
            return _request(requests, settings, source, prompts, batched=batched)

        planner = Planner(
            port=form,
            variant=variant,
            checkpoint=checkpoint,
            topology=topology,
            cache=cache / "schedules",
            ask=ask,
            dtype=settings.dtype or variant.dtype,
            attention=settings.attention or "auto",
            sharding=settings.sharding or "default",
            blocks=settings.blocks or BLOCKS[0],
            implementations=settings.implementations,
            vae_tiling=settings.vae_tiling or "auto",
            stages=stages,
            inputs={source.kind: source.for_videos(len(prompts))} if source else None,
            reporter=reporter,
            dump=Path(dump).expanduser() if dump else None,
        )
        ranked = rank(planner, budget=budget) if search else []
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
    if not settings.mesh:
        return planner.plan(default)
    made = planner.plan(MeshSpec.parse(settings.mesh))
    if made.mesh != default:
        made.notes.append(f"default mesh here: {default}; --mesh auto compares")
    if unused := planner.unused(made.mesh):
        made.notes.append(unused)
    return made


def _request(
    requests: Requests,
    settings: Settings,
    source: Source | None,
    prompts: list[str],
    *,
    batched: bool,
) -> Request:
    return requests.request(
        prompt=prompts,
        negative_prompt=settings.negative_prompt,
        height=settings.height,
        width=settings.width,
        num_frames=settings.frames,
        num_inference_steps=settings.steps,
        guidance_scale=settings.guidance,
        options=settings.options,
        source=source,
        strength=settings.strength,
        resolution=settings.resolution,
        aspect_ratio=settings.aspect_ratio,
        step_cache=settings.cache,
        batched=batched,
    )


def _source(settings: Settings, variant: Variant) -> Source | None:
    """What the run starts from; a grey image where one is needed and none was given."""
    source = read_source(settings, variant)
    if source is not None or "t2v" in variant.tasks or "i2v" not in variant.tasks:
        return source
    import numpy as np

    from tpuport.core.files.sources import read_image

    height = settings.height or variant.height
    width = settings.width or variant.width
    return read_image(np.full((height, width, 3), 128, np.uint8))


@contextlib.contextmanager
def _checkpoint(
    settings: Settings, cache: Path, reporter: Reporter
) -> Iterator[tuple[ModelPort, Variant, Checkpoint]]:
    """The checkpoint to plan for; of a published variant only its configs are needed.

    Of --weights nothing but the configs and tokenizers is read.
    """
    from tpuport.core.plan.config_checkpoint import config_checkpoint, hub_configs
    from tpuport.plugins import get_port

    port = get_port(settings.model or DEFAULT_MODEL)
    variant = known_variant(port, settings)
    if settings.weights is None and variant is not None and variant.repo_id:
        form = port.form_of(variant)
        with config_checkpoint(form, variant, cache, reporter.say) as checkpoint:
            yield form, variant, checkpoint
        return
    weights: str | Path | None = settings.weights
    named = weights not in (None, "", "demo")
    if named and _HUB_ID.fullmatch(str(weights)) and not Path(str(weights)).exists():
        weights = hub_configs(port, str(weights), reporter.say)
    yield api.find_checkpoint(
        port,
        weights=weights,
        variant=settings.variant,
        cache=cache,
        reporter=reporter,
    )
