"""From settings to a session and a request."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport import api
from tpuport.api import DEFAULT_MODEL
from tpuport.cli.asked.built import check_built_for, check_built_request
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown.output import plural
from tpuport.core.arrays import check_dtype
from tpuport.core.files.run_record import RUN_FILE, STAGES
from tpuport.core.files.sources import (
    Source,
    parse_aspect_ratio,
    read_image,
    read_video,
)
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import TOPOLOGY_NAMES, parse_topology
from tpuport.core.reports import Reporter
from tpuport.core.run.inspection import PROFILED_CALLS
from tpuport.core.run.request_builder import RequestBuilder
from tpuport.core.spec.choices import check_chosen
from tpuport.core.spec.component import TORCHAX
from tpuport.core.spec.model_port import BLOCKS, ModelPort
from tpuport.core.spec.request import Request, check_shape, check_task, denoising_steps
from tpuport.core.spec.step_cache import StepCache
from tpuport.core.spec.variant import Variant
from tpuport.core.weights.checkpoint import local_folder
from tpuport.errors import AttentionError, MeshError, UsageError
from tpuport.plugins import get_port

if TYPE_CHECKING:
    from tpuport.core.run.session import Session


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
        MissingWeightsError, MissingArtifactError: a folder named is not there.
        ArtifactError: --executables are for other settings.
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
        check_folder("--profile", settings.profile)
    if settings.weights not in (None, "", "demo"):
        local_folder(str(settings.weights))
    if settings.report is not None:
        check_report(settings.report)
    check_built_for(port, variant, settings)
    names = [option.name for option in port.options]
    for name in settings.options:
        if name not in names:
            raise UsageError(
                f"model {port.name!r} has no option {name!r}; it has {', '.join(names)}"
            )
    for option in port.options:
        value = settings.options.get(option.name)
        if value is None or not option.choices:
            continue
        if option.parse(value) not in option.choices:
            raise UsageError(
                f"option {option.name}={value!r}: choose one of "
                + ", ".join(option.choices)
            )
    if (settings.resolution or settings.aspect_ratio) and (
        settings.height or settings.width
    ):
        raise UsageError(
            "resolution and aspect_ratio exclude height, width and size; give one or "
            "the other"
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


def check_run_early(
    port: ModelPort, settings: Settings, stages: Sequence[str] = STAGES
) -> None:
    """Refuse what a known variant cannot do before its weights are looked for.

    For commands that start a run; one that goes on with a run has it behind it.

    Args:
        stages: that the command runs.

    Raises:
        UsageError: an image or a video that cannot be read, a task, size class, number
            of steps or guidance that is not the variant's.
        ArtifactError: --executables are of another request.
    """
    variant = known_variant(port, settings)
    if variant is None:
        return
    source = read_source(settings, variant)
    check_task(source.task if source else "t2v", variant, port.variants)
    if settings.resolution not in (None, *variant.resolutions):
        known = "no size classes; use --size"
        if variant.resolutions:
            known = f"the size classes {', '.join(variant.resolutions)}"
        raise UsageError(
            f"resolution {settings.resolution!r}: variant {variant.name} has {known}"
        )
    form = port.form_of(variant)
    asked = settings if settings.prompts else replace(settings, prompts=("",))
    request = _Early(form, variant).request(**_asked(asked, source), checked=False)
    cache = StepCache.parse(settings.cache)
    if cache is not None:
        cache.resolve(denoising_steps(request))
    if form.check_variant is not None:
        form.check_variant(request, variant)
    resumed = settings.run_dir is not None and (settings.run_dir / RUN_FILE).exists()
    if not resumed:  # else some of its stages may be finished
        check_built_request(form, settings, request, stages)


class _Early(RequestBuilder):
    """Makes requests before a checkpoint is looked for."""

    def __init__(self, port: ModelPort, variant: Variant) -> None:
        self.port = port
        self.variant = variant


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
    say_imports(reporter)
    if settings.mesh is not None:
        _check_mesh_here(settings.mesh)
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
        guidance_scale=settings.guidance,
        reporter=reporter,
    )


def say_imports(reporter: Reporter) -> None:
    """Say what is about to take some seconds, where it was not done before."""
    if "jax" not in sys.modules:
        reporter.say("importing torch and jax ...")


def _check_mesh_here(mesh: str) -> None:
    """Refuse a mesh that CPU devices do not suffice for, and say where it would do.

    Raises:
        MeshError: it needs more devices.
    """
    import jax

    spec, devices = MeshSpec.parse(mesh), jax.devices()
    try:
        spec.resolve(len(devices))
    except MeshError as error:
        sizes = [size for size in (spec.dp, spec.sp, spec.tp) if size > 0]
        needed = math.prod(sizes)
        if devices[0].platform != "cpu" or needed <= len(devices):
            raise
        slices = (parse_topology(n) for n in TOPOLOGY_NAMES if n.startswith("v6e-"))
        fits = next((s.name for s in slices if s.devices >= needed), None)
        planned = f"; tpuport plan --topology {fits} plans it" if fits else ""
        raise MeshError(
            f"{error}. XLA_FLAGS=--xla_force_host_platform_device_count={needed} "
            f"tries it on this machine{planned}"
        ) from None


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
    return session.request(**_asked(settings, source))


def _asked(settings: Settings, source: Source | None) -> dict[str, Any]:
    """Settings as :meth:`RequestBuilder.request` takes them."""
    prompts, seeds = settings.videos()
    return {
        "prompt": prompts,
        "negative_prompt": settings.negative_prompt,
        "height": settings.height,
        "width": settings.width,
        "num_frames": settings.frames,
        "fps": settings.fps,
        "num_inference_steps": settings.steps,
        "guidance_scale": settings.guidance,
        "seed": seeds,
        "options": settings.options,
        "source": source,
        "strength": settings.strength,
        "resolution": settings.resolution,
        "aspect_ratio": settings.aspect_ratio,
        "step_cache": settings.cache,
        "batched": False,
    }


def in_words(request: Request) -> str:
    """What will be made, so that a wrong setting is seen before an hour is spent."""
    count = len(request.prompts)
    frames = plural(request.num_frames, "frame")
    steps = plural(denoising_steps(request), "step")
    made_from = {"t2v": "text", "i2v": "an image", "v2v": "a video"}[request.task]
    seeds = ", ".join(str(s) for batch in request.seeds for s in batch)
    cache = "" if request.step_cache == "none" else f", cache {request.step_cache}"
    return (
        f"making {count} video{'s' * (count > 1)} from {made_from}: "
        f"{request.width}x{request.height}, {frames} at "
        f"{request.fps:g} fps, {steps}, guidance "
        f"{request.guidance_scale:g}, seed {seeds}{cache}"
    )


def check_prompts(settings: Settings) -> None:
    """Refuse settings without a prompt.

    Raises:
        UsageError: there is none.
    """
    if not settings.prompts:
        raise UsageError('no prompt was given; add --prompt "..." or --prompt-file')


def check_folder(flag: str, folder: Path) -> None:
    """Refuse a folder to write to that cannot be one; creates nothing.

    Raises:
        UsageError: it is a file, a file is in its way, or it may not be written.
    """
    for path in (folder, *folder.absolute().parents):
        if path.exists():
            if not path.is_dir():
                raise UsageError(f"{flag} {folder}: {path} is not a folder")
            if not os.access(path, os.W_OK | os.X_OK):
                raise UsageError(f"{flag} {folder}: {path} may not be written")
            return


def check_report(file: Path) -> None:
    """Refuse a file for --report that cannot be written; creates nothing.

    Raises:
        UsageError: it is a folder, or its folder cannot be one or may not be written.
    """
    if file.is_dir():
        raise UsageError(f"--report {file}: is a folder; name a file")
    check_folder("--report", file.parent)


def check_attention_here(settings: Settings) -> None:
    """Refuse a kernel that does not run on this machine's devices; starts jax.

    Raises:
        AttentionError: which one, and where it runs.
    """
    if settings.attention is None or settings.backend == "diffusers":
        return
    import jax

    from tpuport.kernels.attention.choice import AttentionChoice
    from tpuport.kernels.attention.selection import IMPLEMENTATIONS

    name = AttentionChoice.parse(settings.attention).name
    needed = next((one.platform for one in IMPLEMENTATIONS if one.name == name), None)
    found = jax.devices()[0].platform
    if needed is not None and needed != found:
        raise AttentionError(
            f"attention {name} is for TPU only; the platform here is {found!r}. Use "
            "auto, or blockwise or reference"
        )


def _check_attention(name: str | None) -> None:
    if name is None:
        return
    from tpuport.kernels.attention.choice import AttentionChoice

    AttentionChoice.parse(name)
