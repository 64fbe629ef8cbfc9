"""From settings to a session and a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpuport import api
from tpuport.api import DEFAULT_MODEL
from tpuport.core.arrays import check_dtype
from tpuport.core.implementations import check_chosen
from tpuport.core.inspection import PROFILED_CALLS
from tpuport.core.media import Source, parse_aspect_ratio, read_image, read_video
from tpuport.core.mesh import MeshSpec
from tpuport.core.report import Reporter
from tpuport.core.request import (
    Request,
    check_shape,
    check_task,
    denoising_steps,
)
from tpuport.core.spec import BLOCKS, TORCHAX, ModelPort, Variant
from tpuport.core.step_cache import StepCache
from tpuport.errors import UsageError
from tpuport.plugins import get_port

from ._settings import Settings

if TYPE_CHECKING:
    from tpuport.core.session import Session


def known_variant(port: ModelPort, settings: Settings) -> Variant | None:
    """The variant, where it is known before the checkpoint is looked at."""
    if settings.variant is not None:
        return port.variant(settings.variant)
    if settings.weights in (None, "demo"):
        return port.variants[0]
    return None


def check_early(settings: Settings) -> ModelPort:
    """Refuse what can be refused before weights are looked for; returns the port.

    Raises:
        UsageError: an unknown model, variant, dtype or option, a malformed mesh, or a
            value off its rule.
    """
    port = get_port(settings.model or DEFAULT_MODEL)
    variant = known_variant(port, settings)
    if settings.dtype is not None:
        check_dtype(settings.dtype)
    if settings.mesh is not None:
        MeshSpec.parse(settings.mesh)
    if settings.sharding is not None:
        form = port.form_of(variant) if variant else port
        form.rules(next(iter(form.components)), settings.sharding)
    check_chosen(port, settings.implementations)
    _check_attention(settings.attention)
    if settings.cache is not None:
        StepCache.parse(settings.cache)
    if settings.aspect_ratio is not None:
        parse_aspect_ratio(settings.aspect_ratio)
    if settings.strength is not None and settings.video is None:
        raise UsageError("--strength goes with --video only")
    if settings.profile is None and settings.profile_calls is not None:
        raise UsageError("--profile-calls goes with --profile only")
    if settings.profile is not None:
        _check_folder(settings.profile)
    names = [option.name for option in port.options]
    for name in settings.options:
        if name == "vae_tiling":
            raise UsageError(
                "--option vae_tiling is --vae-tiling now, and the same for every model"
            )
        if name not in names:
            raise UsageError(
                f"model {port.name!r} has no option {name!r}; it has {', '.join(names)}"
            )
    if settings.cache not in (None, "none") and settings.backend == "diffusers":
        raise UsageError(
            "--cache is not upstream's: leave it out, or use --backend tpuport"
        )
    if settings.vae not in (None, TORCHAX) and settings.backend == "diffusers":
        raise UsageError(
            f"--vae {settings.vae} is not upstream's: leave it out, or use --backend "
            "tpuport"
        )
    base = variant or port.variants[0]
    for seed in settings.seeds:
        request = _plain_request(settings, base, seed)
        if variant is not None:
            check_shape(request, variant)
    return port


def _plain_request(settings: Settings, variant: Variant, seed: int) -> Request:
    """The request without prompts, and without what it is made from."""
    return Request(
        prompts=("",),
        negative_prompts=("",),
        seeds=((seed,),),
        batch_size=1,
        height=settings.height or variant.height,
        width=settings.width or variant.width,
        num_frames=settings.frames or variant.num_frames,
        fps=variant.fps if settings.fps is None else settings.fps,
        num_inference_steps=settings.steps or variant.num_inference_steps,
        guidance_scale=(
            variant.guidance_scale if settings.guidance is None else settings.guidance
        ),
    )


def check_run_early(port: ModelPort, settings: Settings) -> None:
    """Refuse what a known variant cannot do before its weights are looked for.

    For commands that start a run; one that goes on with a run has it behind it.

    Raises:
        UsageError: an image or a video that cannot be read, a task, size class, number
            of steps or guidance that is not the variant's.
    """
    variant = known_variant(port, settings)
    if variant is None:
        return
    source = read_source(settings, variant)
    check_task(source.task if source else "t2v", variant, port.variants)
    if settings.resolution not in (None, *variant.resolutions):
        known = ", ".join(variant.resolutions) or "no size classes"
        raise UsageError(
            f"resolution {settings.resolution!r}: {variant.name} has {known}"
        )
    request = _plain_request(settings, variant, 0)
    if source is not None:
        strength = settings.strength
        if source.kind == "video" and strength is None:
            strength = variant.strength
        request = replace(
            request, task=source.task, sources=source.digests_for(1), strength=strength
        )
    cache = StepCache.parse(settings.cache)
    if cache is not None:
        cache.resolve(denoising_steps(request))
    form = port.form_of(variant)
    if form.check_variant is not None:
        form.check_variant(request, variant)


def open_session(
    settings: Settings,
    *,
    cache: Path,
    reporter: Reporter,
    keep_loaded: bool = False,
) -> Session:
    """:func:`tpuport.load` with these settings.

    Raises:
        TpuportError: as :func:`tpuport.load`.
    """
    return api.load(
        settings.model or DEFAULT_MODEL,
        weights=settings.weights,
        variant=settings.variant,
        mesh=settings.mesh,
        dtype=settings.dtype,
        encode_on=settings.encode_on or "device",
        attention=settings.attention or "auto",
        sharding=settings.sharding or "default",
        blocks=settings.blocks or BLOCKS[0],
        vae=settings.vae or TORCHAX,
        keep_loaded=keep_loaded,
        cache_dir=cache,
        compile_cache=not settings.no_compile_cache,
        executables=settings.executables,
        memory_report=settings.memory_report,
        profile=settings.profile,
        profile_calls=settings.profile_calls or PROFILED_CALLS,
        no_jit=settings.op_by_op,
        vae_tiling=settings.vae_tiling or "auto",
        reporter=reporter,
    )


def read_source(settings: Settings, variant: Variant | None) -> Source | None:
    """The image or video to start from; as many frames of it as will be used.

    Raises:
        UsageError: it cannot be read, is too small, or too short.
    """
    if settings.image is not None:
        return read_image(settings.image)
    if settings.video is None:
        return None
    frames = settings.frames or (variant.num_frames if variant else None)
    source = read_video(settings.video, frames)
    return source.first(frames) if frames else source


def make_request(
    session: Session, settings: Settings, source: Source | None = None
) -> Request:
    """The checked request: every prompt with every seed, each as if it were alone.

    Raises:
        UsageError: there is no prompt, or a value is off its rule.
    """
    check_prompts(settings)
    prompts, seeds = settings.videos()
    return session.request(
        prompt=prompts,
        negative_prompt=settings.negative_prompt,
        height=settings.height,
        width=settings.width,
        num_frames=settings.frames,
        fps=settings.fps,
        num_inference_steps=settings.steps,
        guidance_scale=settings.guidance,
        seed=seeds,
        options=settings.options,
        source=source,
        strength=settings.strength,
        resolution=settings.resolution,
        aspect_ratio=settings.aspect_ratio,
        step_cache=settings.cache,
        batched=False,
    )


def in_words(request: Request) -> str:
    """What will be made, so that a wrong setting is seen before an hour is spent."""
    count = len(request.prompts)
    made_from = {"t2v": "text", "i2v": "an image", "v2v": "a video"}[request.task]
    seeds = ", ".join(str(s) for batch in request.seeds for s in batch)
    cache = "" if request.step_cache == "none" else f", cache {request.step_cache}"
    return (
        f"making {count} video{'s' * (count > 1)} from {made_from}: "
        f"{request.width}x{request.height}, {request.num_frames} frames at "
        f"{request.fps:g} fps, {denoising_steps(request)} steps, guidance "
        f"{request.guidance_scale:g}, seed {seeds}{cache}"
    )


def check_prompts(settings: Settings) -> None:
    """Refuse settings without a prompt.

    Raises:
        UsageError: there is none.
    """
    if not settings.prompts:
        raise UsageError('no prompt was given; add --prompt "..." or --prompt-file')


def _check_folder(folder: Path) -> None:
    """Refuse a folder for a profile that is a file, or that a file is in the way of."""
    for path in (folder, *folder.absolute().parents):
        if path.exists():
            if not path.is_dir():
                raise UsageError(f"--profile {folder}: {path} is not a folder")
            return


def _check_attention(name: str | None) -> None:
    if name is None:
        return
    from tpuport.kernels.choice import AttentionChoice

    AttentionChoice.parse(name)
