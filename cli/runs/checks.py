"""What is checked of a run before weights are read."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport import targets
from tpuport.cli.asked.settings import Settings
from tpuport.core.enums import Backend, Dtype, Place, StageName, denoises
from tpuport.core.files.atomic import one_line
from tpuport.core.files.folders import check_own_folder
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import TOPOLOGY_NAMES, parse_topology
from tpuport.core.reports import Reporter, bytes_text
from tpuport.core.spec.component import TORCHAX
from tpuport.errors import (
    MeshError,
    ShardingError,
    TpuportError,
    UsageError,
    did_you_mean,
)
from tpuport.plugins import plugin_for

if TYPE_CHECKING:
    import jax

    from tpuport.core.drive.rehearsal import Rehearsal
    from tpuport.core.mesh.device_mesh import PlacedMesh
    from tpuport.core.pipelines.folder import PipelineFolder
    from tpuport.core.seam.target import Target


def check_inspection(settings: Settings) -> None:
    """Refuse a folder for profiles in which there is something else.

    Raises:
        UsageError: what is there, or flags that do not go together.
    """
    if settings.profile is None and settings.profile_calls is not None:
        raise UsageError("--profile-calls goes with --profile only")
    if settings.profile is not None:
        what = "is no profile of a stage"
        check_own_folder("--profile", settings.profile, _is_profile, what)


def _is_profile(path: Path) -> bool:
    held = {inside.name for inside in path.glob("*")}
    return path.name in list(StageName) and path.is_dir() and held <= {"plugins"}


def check_attention_here(settings: Settings) -> None:
    """Refuse a kernel that does not run on this machine's devices; starts jax.

    Raises:
        UsageError: which one, and where it runs.
    """
    if settings.attention.name != "splash" or settings.backend == Backend.DIFFUSERS:
        return
    import jax

    found = jax.devices()[0].platform
    if found != "tpu":
        raise UsageError(
            f"--attention splash is for TPU only; the platform here is {found!r}. Use "
            "auto, or blockwise or reference"
        )


def check_vae(settings: Settings, folder: PipelineFolder) -> None:
    """Refuse an autoencoder that the pipeline's plugin does not have.

    Raises:
        UsageError: why.
    """
    if settings.vae == TORCHAX:
        return
    if settings.backend == Backend.DIFFUSERS:
        raise UsageError(
            f"--vae {settings.vae} is not upstream's: leave it out, or use --backend "
            "tpuport"
        )
    plugin = plugin_for(folder.class_name)
    if plugin is None:
        raise UsageError(
            f"--vae {settings.vae}: is for a plugin, and {folder.class_name} has none"
        )
    plugin.check_forms({"vae": settings.vae})


def check_on_host(settings: Settings, folder: PipelineFolder) -> None:
    """Refuse a name for --on-host that is no component, or no torch module.

    Raises:
        UsageError: which one.
    """
    if not settings.on_host:
        return
    if settings.backend == Backend.DIFFUSERS:
        raise UsageError("--on-host: all components run so with --backend diffusers")
    modules = folder.modules()
    for name in settings.on_host:
        if name in modules:
            continue
        if name in folder.components():
            raise UsageError(
                f"--on-host {name}: {name} is no module and runs on the host anyway; "
                f"leave the flag out, or name one of {', '.join(modules)}"
            )
        known = f"{folder.class_name} has {', '.join(modules)}"
        hint = did_you_mean(name, modules, known)
        raise UsageError(f"--on-host {name}: is no component; {hint}")


def with_host(settings: Settings, folder: PipelineFolder) -> Settings:
    """The settings with the text encoders among ``on_host``, for --encode-on host."""
    if settings.encode_on != Place.HOST:
        return settings
    encoders = [name for name in folder.components() if "text_encoder" in name]
    named = tuple(dict.fromkeys((*settings.on_host, *encoders)))
    return replace(settings, on_host=named, encode_on=Place.DEVICE)


def with_batch(
    settings: Settings, folder: PipelineFolder, placed: PlacedMesh
) -> Settings:
    """The settings with the number of videos of a call.

    Raises:
        UsageError: the pipeline makes one video in a call.
    """
    count = max(len(settings.prompt), 1) * len(settings.seed)
    takes = {"prompt", "generator"} <= folder.all_parameters.keys()
    sounds = any("audio" in name for name in folder.components())
    alone = settings.image or settings.video or folder.blocks is not None or sounds
    if settings.batch is not None:
        if settings.batch > 1 and (alone or not takes):
            raise UsageError(
                f"--batch {settings.batch}: {folder.class_name} makes one video in a "
                "call here; leave the flag out"
            )
        return replace(settings, batch=min(settings.batch, count))
    wide = placed.mesh.shape["dp"] > 2 and takes and not alone
    return replace(settings, batch=count if wide else 1)


def with_dtype(settings: Settings, placed: PlacedMesh) -> Settings:
    """The settings with a dtype: float32 on CPUs, else bfloat16."""
    if settings.dtype is not None:
        return settings
    on_cpu = placed.mesh.devices.flat[0].platform == "cpu"
    return replace(settings, dtype=Dtype.FLOAT32 if on_cpu else Dtype.BFLOAT16)


def check_host_memory(settings: Settings, folder: PipelineFolder) -> None:
    """Refuse videos whose frames exceed the memory of the machine or its container.

    Upstream gives frames back as float32, those of a call at a time.

    Raises:
        UsageError: how many frames would fit.
    """
    from tpuport.core.mesh.device_memory import host_memory
    from tpuport.core.pipelines.call_arguments import default_of

    sides = [
        getattr(settings, name) or default_of(folder, name)
        for name in ("height", "width", "num_frames")
    ]
    room = host_memory()
    if not all(sides) or room is None:
        return
    height, width, frames = sides
    frame = 4 * 3 * height * width * (settings.batch or 1)
    if frame * frames > room:
        raise UsageError(
            f"{frames} frames of {width}x{height} take {bytes_text(frame * frames)}, "
            f"and this machine has {bytes_text(room)} of memory; about "
            f"{room // frame} frames fit"
        )


def check_call(
    settings: Settings,
    folder: PipelineFolder,
    arguments: Mapping[str, Any],
    reporter: Reporter,
) -> None:
    """Let upstream refuse what was asked for, before weights are read.

    Upstream's ``check_inputs`` is called on the pipeline without weights. What it needs
    and a user does not give, such as a size that upstream chooses, leaves that to the
    run itself.

    Args:
        reporter: told of a prompt whose end upstream will not read.

    Raises:
        UsageError: upstream refuses this.
    """
    if folder.blocks is not None:
        return
    given = {name: one.default for name, one in folder.all_parameters.items()}
    given |= arguments
    pipeline = _bare(settings, folder)
    _warn_of_long_prompts(settings, pipeline, given, reporter)
    if settings.prompt:
        given["prompt"] = prompts_of(settings, settings.prompt)
    check = getattr(pipeline, "check_inputs", None)
    takes = inspect.signature(check).parameters.values() if check else ()
    if any(p.name not in given and p.default is p.empty for p in takes):
        return
    sides = [given[name] for name in ("height", "width") if name in given]
    if check is None or not all(sides):
        return
    try:
        check(**{p.name: given[p.name] for p in takes if p.name in given})
    except ValueError as error:
        raise UsageError(
            f"{folder.class_name} refuses this: {one_line(error)}"
        ) from error
    except Exception:
        return  # the state of a pipeline under way is looked at, which is not there


def _warn_of_long_prompts(
    settings: Settings, pipeline: Any, given: Mapping[str, Any], reporter: Reporter
) -> None:
    """Say which prompts upstream cuts; a template around a prompt is not counted."""
    limit = given.get("max_sequence_length")
    tokenizer = pipeline.components.get("tokenizer")
    if not isinstance(limit, int) or tokenizer is None:
        return
    for prompt in settings.prompt:
        count = len(tokenizer(prompt)["input_ids"])
        if count > limit:
            reporter.say(
                f"warning: a prompt has at least {count} tokens, and "
                f"{type(pipeline).__name__} reads the first {limit}"
            )


def placed_here(settings: Settings, reporter: Reporter) -> PlacedMesh:
    """The mesh asked for on this machine's devices.

    Raises:
        MeshError: it needs more devices; of CPUs, with a place where it would do.
    """
    import jax

    try:
        return targets.place_for_port(settings.mesh, reporter)
    except MeshError as error:
        devices, spec = jax.devices(), settings.mesh
        assert spec is not None
        needed = math.prod(n for n in (spec.dp, spec.sp, spec.tp) if n > 0)
        if devices[0].platform != "cpu" or needed <= len(devices):
            raise
        slices = (parse_topology(n) for n in TOPOLOGY_NAMES if n.startswith("v6e-"))
        fits = next((s.name for s in slices if s.devices >= needed), None)
        planned = f"; tpuport plan --topology {fits} plans it" if fits else ""
        raise MeshError(
            f"{error}. XLA_FLAGS=--xla_force_host_platform_device_count={needed} "
            f"tries it on this machine{planned}"
        ) from None


def default_mesh(
    folder: PipelineFolder,
    devices: Sequence[jax.Device],
    settings: Settings,
    arguments: Mapping[str, Any],
    reporter: Reporter,
) -> MeshSpec:
    """The mesh where none is asked for: the pair of a guided step over dp, else sp.

    The first step of a rehearsal tells whether each of the denoiser's programs has two
    rows, or is called twice.

    Args:
        arguments: keywords of the call, the prompt included.

    Raises:
        TpuportError: as of :func:`rehearsal_of`.
    """
    along = MeshSpec(sp=len(devices))
    if len(devices) % 2:
        return along
    placed = targets.place(along, devices, None)
    settings = with_dtype(settings, placed)
    given = (folder, placed, settings, arguments, reporter)
    found = rehearsal_of(*given, quiet=True, first_step=True)
    rows = [
        program.by_stage[StageName.DENOISE] * max(r.query[0] for r in program.attention)
        for program in found.programs
        if denoises(program.component) and program.attention
    ]
    paired = bool(rows) and all(count % 2 == 0 for count in rows)
    return MeshSpec(dp=2, sp=len(devices) // 2) if paired else along


def with_mesh(
    settings: Settings,
    folder: PipelineFolder,
    arguments: Mapping[str, Any],
    reporter: Reporter,
) -> Settings:
    """The settings with :func:`default_mesh` on this machine's chips, if it has any."""
    import jax

    devices = jax.devices()
    by_upstream = settings.backend == Backend.DIFFUSERS
    if settings.mesh is not None or by_upstream or devices[0].platform == "cpu":
        return settings
    given = _given(settings, folder, arguments)
    mesh = default_mesh(folder, devices, settings, given, reporter)
    return replace(settings, mesh=mesh)


def check_target(
    settings: Settings, folder: PipelineFolder, placed: PlacedMesh
) -> None:
    """Refuse a layout that the plugin of the pipeline has not, and a plugin at fault.

    Raises:
        UsageError, PluginError: which one.
    """
    if settings.backend == Backend.TPUPORT:
        _target(settings, folder, placed, Reporter())


def _target(
    settings: Settings, folder: PipelineFolder, placed: PlacedMesh, reporter: Reporter
) -> Target:
    """What programs are made for; none is kept."""
    own = replace(settings, cache_dir=None)
    return targets.claimed_target(folder.class_name, placed, own, reporter)


def _bare(settings: Settings, folder: PipelineFolder) -> Any:
    """The pipeline without weights."""
    from tpuport.core.arrays import torch_dtype
    from tpuport.core.drive.rehearsal import without_weights

    return without_weights(folder, torch_dtype(str(settings.dtype)))


def check_mesh(
    settings: Settings,
    folder: PipelineFolder,
    placed: PlacedMesh,
    arguments: Mapping[str, Any],
    reporter: Reporter,
) -> None:
    """Refuse a mesh with an axis that the run cannot use, before weights are read.

    Tokens are split among any number of devices. Rows and heads are known once the
    denoiser is traced, which a rehearsal does.

    Raises:
        MeshError: which axis.
        ShardingError: a plugin's layout does not fit the weights.
    """
    if settings.backend == Backend.DIFFUSERS:
        return
    if placed.mesh.shape["dp"] <= 2 and placed.mesh.shape["tp"] == 1:
        return
    given = _given(settings, folder, arguments)
    try:
        rehearsal_of(folder, placed, settings, given, reporter, quiet=True)
    except (MeshError, ShardingError):
        raise
    except Exception:
        # Made-up values are not everywhere good enough; the run checks the mesh too.
        reporter.say(f"the mesh is checked once {folder.class_name} runs")


def check_step_cache(
    settings: Settings,
    folder: PipelineFolder,
    placed: PlacedMesh,
    arguments: Mapping[str, Any],
    reporter: Reporter,
) -> None:
    """Refuse a step cache that the pipeline cannot have, before weights are read.

    Raises:
        StepCacheError: why.
    """
    from tpuport.core.drive import rehearsal
    from tpuport.core.drive.step_caches import StepCacheError

    if settings.step_cache is None:
        return
    target = _target(settings, folder, placed, Reporter())
    given = _given(settings, folder, arguments)
    try:
        with upstreams_errors(folder.class_name):
            pipeline = _bare(settings, folder)
            pipeline.set_progress_bar_config(disable=True)
            rehearsal.check_step_cache(pipeline, target, given, settings.step_cache)
    except StepCacheError:
        raise
    except Exception:
        # Made-up values are not everywhere good enough; the run checks the cache too.
        reporter.say(f"the step cache is checked once {folder.class_name} runs")


def _given(
    settings: Settings, folder: PipelineFolder, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The keywords of a call that is rehearsed up to its latents."""
    given = dict(arguments)
    if "prompt" in folder.parameters:
        given["prompt"] = prompts_of(settings, settings.prompt)
    if folder.blocks is None and "output_type" in folder.all_parameters:
        given["output_type"] = "latent"
    return given


def prompts_of(settings: Settings, prompts: Sequence[str]) -> Any:
    """What a call is given for as many videos as are made together."""
    pairs = [prompt for prompt in prompts for _ in settings.seed]
    given = (pairs * (settings.batch or 1))[: settings.batch or 1]
    return given if len(given) > 1 else given[0]


def rehearsal_of(
    folder: PipelineFolder,
    placed: PlacedMesh,
    settings: Settings,
    arguments: Mapping[str, Any],
    reporter: Reporter,
    *,
    quiet: bool = False,
    first_step: bool = False,
) -> Rehearsal:
    """The run as ``tpuport generate`` does it on a mesh; only configs are read.

    Args:
        settings: with a dtype.
        quiet: leave out the line about a plugin whose patches are used.
        first_step: end after the first ``scheduler.step``.

    Raises:
        UsageError: upstream refuses what was asked for.
        MeshError: an axis of the mesh has nothing to split.
        WeightsError: a config does not build its class.
        TpuportError: a module cannot become a program, or upstream fails otherwise.
    """
    from tpuport.core.plan.pipeline_plan import rehearsed

    name = folder.class_name
    target = _target(settings, folder, placed, Reporter() if quiet else reporter)
    with upstreams_errors(name):
        return rehearsed(
            folder,
            target,
            str(settings.dtype),
            arguments,
            reporter,
            on_host=settings.on_host,
            cache=settings.step_cache,
            first_step=first_step,
        )


def check_executables(
    settings: Settings, folder: PipelineFolder, placed: PlacedMesh, reporter: Reporter
) -> None:
    """Refuse executables for something else before weights are read.

    Raises:
        UsageError, ArtifactError: what differs.
    """
    if settings.backend == Backend.DIFFUSERS:
        raise UsageError(
            "--executables are not upstream's: leave them out, or use --backend tpuport"
        )
    built = targets.executables_for(folder.class_name, placed, settings, reporter)
    assert built is not None
    with reporter.timed(f"building {folder.class_name} without weights"):
        built.check_modules(_bare(settings, folder).components)


@contextlib.contextmanager
def upstreams_errors(pipeline: str) -> Iterator[None]:
    """What upstream's code raises, as errors of one line.

    Raises:
        UsageError: upstream refuses what was asked for.
        TpuportError: upstream fails otherwise.
    """
    # Blocks log a traceback of what they raise.
    blocks = logging.getLogger("diffusers.modular_pipelines.modular_pipeline")
    level = blocks.level
    blocks.setLevel(logging.CRITICAL)
    try:
        yield
    except TpuportError:
        raise
    except (NameError, ImportError) as error:
        from tpuport.core.weights.absent_packages import absent_of

        package = absent_of(error)
        needed = f"; it needs a package: pip install {package}" if package else ""
        raise TpuportError(f"{pipeline} failed: {one_line(error)}{needed}") from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{pipeline} refuses this: {one_line(error)}") from error
    except Exception as error:
        raise TpuportError(
            f"{pipeline} failed: {type(error).__name__}: {one_line(error)}; --debug "
            "shows where"
        ) from error
    finally:
        blocks.setLevel(level)
