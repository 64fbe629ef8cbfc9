"""``tpuport decode``: the last stage, from a run directory to videos."""

from __future__ import annotations

import typer

from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import (
    Attention,
    Backend,
    Blocks,
    CacheDir,
    Debug,
    Dtype,
    Executables,
    Json,
    MemoryReport,
    Mesh,
    Model,
    NoCompileCache,
    NoJit,
    Out,
    Profile,
    ProfileCalls,
    Report,
    RunDir,
    Sharding,
    Vae,
    VaeTiling,
    Weights,
)
from tpuport.cli.asked.settings import gather
from tpuport.cli.runs.stage_commands import decode_stage
from tpuport.cli.shown.errors import reported


def decode(
    context: typer.Context,
    run_dir: RunDir = None,
    out: Out = None,
    model: Model = None,
    weights: Weights = None,
    mesh: Mesh = None,
    dtype: Dtype = None,
    attention: Attention = None,
    sharding: Sharding = None,
    blocks: Blocks = None,
    vae: Vae = None,
    vae_tiling: VaeTiling = None,
    backend: Backend = None,
    cache_dir: CacheDir = None,
    no_compile_cache: NoCompileCache = False,
    executables: Executables = None,
    memory_report: MemoryReport = False,
    profile: Profile = None,
    profile_calls: ProfileCalls = None,
    no_jit: NoJit = False,
    report: Report = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Decode the latents of a run directory into videos.

    Without --out the video is written into the run directory, as video.mp4.
    """
    with reported(debug=debug) as guard:
        settings = gather(context)
        guard.debug = settings.debug
        prepare(debug=settings.debug)
        decode_stage(settings)
