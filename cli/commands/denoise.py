"""``tpuport denoise``: the second stage, on a run directory."""

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
    Profile,
    ProfileCalls,
    Report,
    RunDir,
    Sharding,
    Vae,
    Weights,
)
from tpuport.cli.asked.settings import gather
from tpuport.cli.runs.stage_commands import denoise_stage
from tpuport.cli.shown.errors import reported


def denoise(
    context: typer.Context,
    run_dir: RunDir = None,
    model: Model = None,
    weights: Weights = None,
    mesh: Mesh = None,
    dtype: Dtype = None,
    attention: Attention = None,
    sharding: Sharding = None,
    blocks: Blocks = None,
    vae: Vae = None,
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
    """Denoise in a run directory that `encode` made.

    It runs no autoencoder: --vae is for --executables, which are of one.
    """
    with reported(debug=debug) as guard:
        settings = gather(context)
        guard.debug = settings.debug
        prepare(debug=settings.debug)
        denoise_stage(settings)
