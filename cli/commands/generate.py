"""``tpuport generate``: from prompts to videos."""

from __future__ import annotations

import time
from typing import Any

import typer

from tpuport.cli.asked.cache_folder import cache_folder, new_run_folder
from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.noise import read_noise
from tpuport.cli.asked.options import (
    AspectRatio,
    Attention,
    Backend,
    Blocks,
    CacheDir,
    Config,
    Debug,
    Dtype,
    EncodeOn,
    Executables,
    Fps,
    Frames,
    Guidance,
    Height,
    Image,
    Json,
    Latents,
    MemoryReport,
    Mesh,
    Model,
    ModelOption,
    NegativePrompt,
    NoCompileCache,
    NoJit,
    NoJitStage,
    Out,
    Profile,
    ProfileCalls,
    Prompt,
    PromptFile,
    Report,
    Resolution,
    RunDir,
    Seed,
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
    check_attention_here,
    check_early,
    check_prompts,
    check_run_early,
    in_words,
    known_variant,
    make_request,
    open_session,
    read_source,
)
from tpuport.cli.asked.settings import Settings, gather
from tpuport.cli.runs.run_stages import (
    Video,
    check_noise,
    going_on,
    publish_videos,
    reusable,
    run_stage,
    stage_note,
    video_files,
)
from tpuport.cli.shown.errors import reported
from tpuport.cli.shown.output import give_out, say
from tpuport.cli.shown.outputs import default_out, plan_outputs
from tpuport.cli.shown.progress import make_display, print_summary
from tpuport.core.files.run_record import RUN_FILE, STAGES
from tpuport.core.reports import RunReport, StageReport


def generate(
    context: typer.Context,
    model: Model = None,
    variant: VariantName = None,
    weights: Weights = None,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    negative_prompt: NegativePrompt = None,
    size: Size = None,
    height: Height = None,
    width: Width = None,
    frames: Frames = None,
    fps: Fps = None,
    steps: Steps = None,
    guidance: Guidance = None,
    seed: Seed = None,
    image: Image = None,
    video: SourceVideo = None,
    strength: Strength = None,
    resolution: Resolution = None,
    aspect_ratio: AspectRatio = None,
    cache: StepCaching = None,
    option: ModelOption = None,
    latents: Latents = None,
    mesh: Mesh = None,
    dtype: Dtype = None,
    attention: Attention = None,
    sharding: Sharding = None,
    blocks: Blocks = None,
    vae: Vae = None,
    vae_tiling: VaeTiling = None,
    encode_on: EncodeOn = None,
    backend: Backend = None,
    out: Out = None,
    run_dir: RunDir = None,
    cache_dir: CacheDir = None,
    no_compile_cache: NoCompileCache = False,
    executables: Executables = None,
    memory_report: MemoryReport = False,
    profile: Profile = None,
    profile_calls: ProfileCalls = None,
    no_jit: NoJit = False,
    no_jit_stage: NoJitStage = None,
    report: Report = None,
    config: Config = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Make videos from prompts: encode, denoise and decode in a row.

    Several prompts and seeds make a video of every prompt with every seed.
    """
    with reported(debug=debug) as guard:
        settings = gather(context)
        guard.debug = settings.debug
        prepare(debug=settings.debug)
        document, videos, ran = _generate(settings)
        say("")
        print_summary(ran)
        for made in videos:
            say(f"wrote {made.path}")
        give_out(document, as_json=settings.json, report=settings.report)


def _generate(settings: Settings) -> tuple[dict[str, Any], list[Video], RunReport]:
    started = time.perf_counter()
    port = check_early(settings)
    check_prompts(settings)
    check_run_early(port, settings)
    prompts, seeds = settings.videos()
    guess = known_variant(port, settings)
    name = default_out(port.name, guess.name if guess else "video", seeds)
    plan_outputs(settings.out or name, len(prompts), settings.report)
    if settings.run_dir is None:  # else denoise may be finished in it
        check_attention_here(settings)
    cache = cache_folder(settings.cache_dir)
    noise = read_noise(settings.latents)
    if noise is not None:
        noise.for_videos(len(prompts))
    reused: list[str] = []
    stages: list[StageReport] = []
    with (
        make_display() as display,
        open_session(settings, cache=cache, reporter=display) as session,
    ):
        source = read_source(settings, session.variant)
        request = make_request(session, settings, source)
        display.say(in_words(request))
        if not settings.run_dir or not (settings.run_dir / RUN_FILE).exists():
            session.check_weights(request=request)
        if noise is not None:
            session.check_latents(request, noise.for_videos(len(prompts)))
        outputs = plan_outputs(
            settings.out or default_out(port.name, session.variant.name, seeds),
            len(prompts),
            settings.report,
        )
        if settings.out is None:
            for path in outputs.paths:
                if path.exists():
                    display.say(f"overwrites {path}; --out names another file")
        run = session.open_run(settings.run_dir or new_run_folder(cache), request)
        check_noise(session, run, noise)
        temporary = settings.run_dir is None
        with going_on(run, settings, outputs.asked, temporary=temporary):
            if settings.backend != "diffusers":
                left = [s for s in session.port.stages if not run.finished(s.name)]
                session.executor.check_built(request, left)
            for stage in STAGES[:2]:
                if reusable(session, run, stage, settings, display.say):
                    reused.append(stage)
                    display.say(f"{stage}: finished in {run.path}, reused")
                    continue
                _, stage_report = run_stage(
                    session,
                    run,
                    stage,
                    attention=settings.attention,
                    backend=settings.backend,
                    noise=noise if stage == STAGES[0] else None,
                    source=source if stage == STAGES[0] else None,
                )
                stages.append(stage_report)
            with video_files(run, outputs) as files:
                _, stage_report = run_stage(
                    session,
                    run,
                    STAGES[2],
                    attention=settings.attention,
                    backend=settings.backend,
                    files=files,
                )
                report = session.run_report(
                    [*stages, stage_report], time.perf_counter() - started
                )
                videos = publish_videos(
                    session,
                    run,
                    files,
                    report=report,
                    note=stage_note(session, settings.attention, settings.backend),
                )
        document = {
            "command": "generate",
            "model": port.name,
            "variant": session.variant.name,
            "weights": session.checkpoint.reference,
            "videos": [video.as_dict() for video in videos],
            "settings": request.as_dict(),
            "dtype": session.dtype,
            "mesh": report.mesh,
            "attention": settings.attention or "auto",
            "blocks": session.port.blocks,
            "implementations": dict(report.implementations),
            "encode_on": session.encode_on,
            "backend": settings.backend or "tpuport",
            "run_dir": str(settings.run_dir) if settings.run_dir else None,
            "reused": reused,
            "report": report.as_dict(),
        }
    return document, videos, report
