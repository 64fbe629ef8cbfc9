"""``tpuport encode``: the first stage, which creates the run directory."""

from __future__ import annotations

import typer

from tpuport.cli.asked.environment import prepare
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
    VariantName,
    Weights,
    Width,
)
from tpuport.cli.asked.settings import gather
from tpuport.cli.runs.stage_commands import encode_stage
from tpuport.cli.shown.errors import reported
from tpuport.core.files.run_record import STAGES
from tpuport.errors import UsageError


def encode(
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
    encode_on: EncodeOn = None,
    backend: Backend = None,
    run_dir: RunDir = None,
    cache_dir: CacheDir = None,
    no_compile_cache: NoCompileCache = False,
    executables: Executables = None,
    memory_report: MemoryReport = False,
    profile: Profile = None,
    profile_calls: ProfileCalls = None,
    no_jit: NoJit = False,
    report: Report = None,
    config: Config = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Encode the prompts into a run directory; takes the settings of `generate`.

    The settings are kept in the run directory: `denoise` and `decode` read them there.
    """
    with reported(debug=debug) as guard:
        settings = gather(context)
        guard.debug = settings.debug
        prepare(debug=settings.debug)
        if settings.run_dir is None:
            raise UsageError(f"--run-dir is missing; name a folder for {STAGES[0]}")
        encode_stage(settings)
