"""The checks of a run: one list of rules, each run as soon as what it needs is known.

A command line knows settings and the model first, then the variant and the request,
then the checkpoint and the devices; a session begins with nearly all. Whoever learns
more calls :func:`check` again.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tpuport.core.enums import Backend, StageName, Task
from tpuport.core.files.folders import check_own_folder
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.reports import bytes_text
from tpuport.core.spec.choices import check_chosen, with_chosen
from tpuport.core.spec.component import TORCHAX
from tpuport.core.spec.model_port import ModelPort, with_blocks
from tpuport.core.spec.request import Request, check_shape, check_task, denoising_steps
from tpuport.core.spec.run_settings import DEMO, Asked, RunSettings, meant
from tpuport.core.spec.variant import Variant
from tpuport.errors import MeshError, UsageError, quoted

if TYPE_CHECKING:
    import torch

    from tpuport.core.weights.checkpoint import Checkpoint


class Executables(Protocol):
    """A folder that ``tpuport compile`` made, opened."""

    def check_settings(self, port: ModelPort, settings: RunSettings) -> None:
        """Refuse settings that the folder is not for."""

    def check_request(
        self, request: Request, port: ModelPort, stages: Collection[str]
    ) -> None:
        """Refuse a request that the folder is not for."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a run so far; ``None`` is what is not.

    Attributes:
        settings: how to run.
        asked: what to make, before the variant's defaults.
        port: the model; its form once ``variant`` is known.
        variant: whose rules hold.
        request: what to make.
        stages: names of those that will run.
        checkpoint: the weights.
        devices: the mesh over them.
        latents: the initial noise that was given.
        executables: those that the settings name, opened.
        room: bytes of memory that this machine has in all, where the run will be.
    """

    settings: RunSettings | None = None
    asked: Asked | None = None
    port: ModelPort | None = None
    variant: Variant | None = None
    request: Request | None = None
    stages: Sequence[str] | None = None
    checkpoint: Checkpoint | None = None
    devices: MeshSpec | None = None
    latents: torch.Tensor | None = None
    executables: Executables | None = None
    room: int | None = None


RULES: list[Callable[..., None]] = []
"""All rules, in the order in which they speak."""


def rule(check: Callable[..., None]) -> Callable[..., None]:
    """Add a check; its parameters are the fields of :class:`Known` that it needs."""
    RULES.append(check)
    return check


def check(known: Known) -> None:
    """Run every rule that needs nothing else.

    Raises:
        TpuportError: of the first rule that is broken.
    """
    for rule in RULES:
        needs = inspect.signature(rule).parameters
        values = [getattr(known, name) for name in needs]
        if all(value is not None for value in values):
            rule(*values)


# --- settings alone


@rule
def check_inspection(settings: RunSettings) -> None:
    """Refuse a folder for profiles in which there is something else."""
    if settings.profile is None and settings.profile_calls is not None:
        raise UsageError("--profile-calls goes with --profile only")
    if settings.profile is not None:
        what = "is no profile of a stage"
        check_own_folder("--profile", settings.profile, _is_profile, what)


def _is_profile(path: Path) -> bool:
    held = {inside.name for inside in path.glob("*")}
    return path.name in list(StageName) and path.is_dir() and held <= {"plugins"}


@rule
def _weights(settings: RunSettings) -> None:
    if settings.weights not in (None, "", DEMO):
        from tpuport.core.weights.checkpoint import local_folder

        local_folder(str(settings.weights))


@rule
def _what_upstream_lacks(settings: RunSettings) -> None:
    if settings.backend != Backend.DIFFUSERS:
        return
    if settings.executables is not None:
        raise UsageError(
            "--executables are not upstream's: leave them out, or use --backend tpuport"
        )
    if settings.vae != TORCHAX:
        raise UsageError(
            f"--vae {settings.vae} is not upstream's: leave it out, or use --backend "
            "tpuport"
        )


@rule
def _step_cache_of_upstream(settings: RunSettings, asked: Asked) -> None:
    if settings.backend == Backend.DIFFUSERS and asked.step_cache is not None:
        raise UsageError(
            "--cache is not upstream's: leave it out, or use --backend tpuport"
        )


@rule
def check_size(asked: Asked) -> None:
    """Refuse a size class beside a size.

    Raises:
        UsageError: both were asked for.
    """
    by_class = asked.resolution is not None or asked.aspect_ratio is not None
    if by_class and (asked.height or asked.width):
        raise UsageError(
            "resolution and aspect_ratio exclude height, width and size; give one or "
            "the other"
        )


@rule
def _strength(asked: Asked) -> None:
    if asked.strength is not None and asked.video is None:
        raise UsageError("--strength goes with --video only")


# --- the model


@rule
def _implementations(settings: RunSettings, port: ModelPort) -> None:
    check_chosen(port, settings.implementations)
    port.rules(next(iter(port.components)), settings.sharding)


@rule
def _options(asked: Asked, port: ModelPort) -> None:
    check_options(port, asked.options)


@rule
def _values(asked: Asked, port: ModelPort) -> None:
    """Each value by itself, with those of some variant for what was not asked."""
    plain_request(asked, port.variants[0])


# --- the variant


@rule
def _shape_asked(asked: Asked, variant: Variant) -> None:
    check_shape(plain_request(asked, variant), variant)


@rule
def _executables_of(
    settings: RunSettings, port: ModelPort, variant: Variant, executables: Executables
) -> None:
    form = with_chosen(with_blocks(port, settings.blocks), settings.implementations)
    executables.check_settings(form, settings)


# --- the request


@rule
def _request(port: ModelPort, variant: Variant, request: Request) -> None:
    check_shape(request, variant)
    check_task(request.task, variant, port.variants)
    cache = request.step_cache
    if cache is not None:
        if not any(c.split for c in port.components.values()):
            raise UsageError(
                f"model {port.name!r} declares no point at which its forward "
                "can be cut; leave the step cache out"
            )
        cache.resolve(denoising_steps(request))
    if port.check_variant is not None:
        port.check_variant(request, variant)


@rule
def _executables_for(
    settings: RunSettings,
    port: ModelPort,
    request: Request,
    stages: Sequence[str],
    executables: Executables,
) -> None:
    compiled = [name for name in stages if name not in settings.no_jit]
    executables.check_request(request, port, compiled)


@rule
def _step_cache(
    settings: RunSettings, port: ModelPort, request: Request, stages: Sequence[str]
) -> None:
    if settings.backend != Backend.DIFFUSERS or request.step_cache is None:
        return
    names = [name for stage in stages for name in port.stage(stage).components]
    if any(port.components[name].split for name in names):
        raise UsageError(
            f"step cache {request.step_cache} is not upstream's; leave it out, or "
            "use the backend tpuport"
        )


# --- the checkpoint and the devices


@rule
def _checkpoint(
    port: ModelPort, variant: Variant, request: Request, checkpoint: Checkpoint
) -> None:
    port.check(request, variant, checkpoint)


#: Copies of all latents, in float32, that the host holds at a time at least: the noise,
#: the result, and the result in the bytes of its file.
LATENT_COPIES = 3


@rule
def _host_memory(
    port: ModelPort,
    variant: Variant,
    request: Request,
    checkpoint: Checkpoint,
    room: int,
) -> None:
    shape = port.latent_shape(request, checkpoint)
    latents = 4 * LATENT_COPIES * math.prod(shape) * request.batches
    pixels = request.num_frames * request.height * request.width
    needed = latents + 3 * pixels * len(request.prompts)  # frames as bytes
    if needed > room:
        raise UsageError(
            f"{request.num_frames} frames of {request.width}x{request.height} asked "
            f"for; latents and frames take {bytes_text(needed)}, and this machine has "
            f"{bytes_text(room)} of memory; "
            + what_fits(request, variant, room / needed)
        )


@rule
def _latents(
    port: ModelPort, request: Request, checkpoint: Checkpoint, latents: torch.Tensor
) -> None:
    if request.task == Task.VIDEO:
        raise UsageError(
            "latents and a video exclude each other: a run from a video starts "
            "from the video's own"
        )
    shape = port.latent_shape(request, checkpoint)
    expected = (len(request.prompts), *shape[1:])
    if tuple(latents.shape) == expected:
        return
    dims = [s.shape for s in port.stages[0].writes if s.name == "initial_latents"]
    words = f" ({', '.join(map(str, dims[0]))})" if dims else ""
    raise UsageError(
        f"latents of shape {tuple(latents.shape)} were given; this request "
        f"needs {expected}{words}"
    )


@rule
def _batch(port: ModelPort, request: Request, devices: MeshSpec) -> None:
    dp = devices.dp
    for stage in port.stages:
        rows = stage.batch_rows(request) if stage.batch_rows else 0
        if rows and rows % dp:
            legal = [n for n in range(1, rows + 1) if rows % n == 0]
            why = "with" if port.guided(request) else "without"
            raise MeshError(
                f"mesh dp={dp} does not divide the batch of {stage.name}: "
                f"{rows} rows for {request.batch_size} video(s) {why} guidance; "
                f"legal dp values: {', '.join(map(str, legal))}"
            )


# --- what rules and others share


def what_fits(request: Request, variant: Variant, share: float) -> str:
    """The largest video that fits, where ``share`` of a request does; for people.

    Memory is taken to grow with frames and with pixels.
    """
    # A share is a quotient: 49 * (1 / 49) is a little less than 1.
    frames = int(request.num_frames * share + 1e-6)
    step = variant.frames.step
    if frames:
        return f"at this size about {(frames - 1) // step * step + 1} frames fit"
    scale, unit = math.sqrt(share * request.num_frames), variant.sizes.multiple
    width = int(request.width * scale) // unit * unit
    height = int(request.height * scale) // unit * unit
    if not width or not height:
        return "give fewer prompts or seeds at a time"
    return f"1 frame of about {width}x{height} fits"


def check_options(port: ModelPort, asked: Any, more: str = "") -> dict[str, Any]:
    """The values of a model's options.

    Args:
        more: of a message, after the names that there are.

    Raises:
        UsageError: the model has no such option, or the option no such value.
    """
    known = {option.name: option for option in port.options}
    values: dict[str, Any] = {}
    for name, value in asked.items():
        if name not in known:
            has = f"it has {', '.join(known) or 'none'}{more}"
            hint = meant(name, known, has)
            raise UsageError(
                f"model {port.name!r} has no option {quoted(name)}; {hint}"
            )
        if value is None:
            continue
        parsed = known[name].parse(value)
        choices = known[name].choices
        if choices and parsed not in choices:
            raise UsageError(
                f"option {name}={quoted(value)}: choose one of {', '.join(choices)}"
            )
        values[name] = parsed
    return values


def plain_request(asked: Asked, variant: Variant) -> Request:
    """The request without prompts, and without what it is made from."""
    return Request(
        prompts=("",) * len(asked.seed),
        negative_prompts=("",) * len(asked.seed),
        seeds=tuple((seed,) for seed in asked.seed),
        batch_size=1,
        **with_defaults(asked, variant, "height", "width", *SAMPLING),
    )


#: What a request takes from a variant as it is.
SAMPLING = ("num_frames", "fps", "num_inference_steps", "guidance_scale")


def with_defaults(asked: Asked, variant: Variant, *names: str) -> dict[str, Any]:
    """What was asked for, and the variant's defaults for the rest."""
    given = {name: getattr(asked, name) for name in names}
    return {n: getattr(variant, n) if v is None else v for n, v in given.items()}
