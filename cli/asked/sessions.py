"""From settings to a session and a request."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport import api
from tpuport.cli.asked.cache_folder import cache_folder
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import is_report, say
from tpuport.core.enums import Backend, Task
from tpuport.core.files.outputs import Outputs, check_no_input, plan_outputs
from tpuport.core.files.run_lock import check_free
from tpuport.core.files.run_record import RUN_FILE, STAGES
from tpuport.core.files.sources import Source
from tpuport.core.files.video_file import check_length
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import TOPOLOGY_NAMES, parse_topology
from tpuport.core.reports import Reporter, plural
from tpuport.core.run.progress import Display
from tpuport.core.spec import rules
from tpuport.core.spec.model_port import ModelPort, with_blocks
from tpuport.core.spec.request import Request, denoising_steps
from tpuport.core.spec.requests import Requests, read_source
from tpuport.core.spec.rules import Known
from tpuport.core.spec.run_settings import DEMO, Asked, defaults_of
from tpuport.core.spec.variant import Variant
from tpuport.errors import MeshError, UsageError
from tpuport.kernels.attention.choice import AUTO

if TYPE_CHECKING:
    from tpuport.core.programs.built_folder import BuiltFolder
    from tpuport.core.run.session import Session
    from tpuport.core.weights.checkpoint import Checkpoint


def known_variant(port: ModelPort, settings: Settings) -> Variant | None:
    """The variant, where it is known before the checkpoint is looked at."""
    if settings.variant is not None:
        return port.variant(settings.variant)
    if settings.weights in (None, DEMO):
        return port.variants[0]
    return None


def check_early(settings: Settings) -> Known:
    """Refuse what can be refused before weights are looked for; returns what is known.

    Raises:
        UsageError: an unknown model, variant, dtype or option, a malformed mesh, or a
            value off its rule.
        MissingWeightsError, MissingArtifactError: a folder named is not there.
        ArtifactError: --executables are for other settings, or another process works
            in --run-dir.
    """
    port = api.model_of(settings)
    variant = known_variant(port, settings)
    known = Known(
        settings=settings,
        asked=settings,
        port=port.form_of(variant) if variant else port,
        variant=variant,
        executables=_executables(settings),
    )
    rules.check(known)
    if settings.run_dir is not None:
        rules.check_folder("--run-dir", settings.run_dir)
        check_free(settings.run_dir)
    if settings.report is not None:
        check_report(settings.report, settings.inputs())
    return known


def check_report(file: Path, inputs: Sequence[Path]) -> None:
    """Refuse a file for --report that cannot be written; creates nothing.

    Args:
        inputs: the files that the command reads.

    Raises:
        UsageError: it is a folder, an input or a file that is no report, or its folder
            cannot be one or may not be written.
    """
    if file.is_dir():
        raise UsageError(f"--report {file}: is a folder; name a file")
    rules.check_folder("--report", file.parent)
    check_no_input(file, inputs, "--report")
    if file.is_file() and not is_report(file):
        raise UsageError(f"--report {file}: is there, and no report; name another file")


def outputs_of(
    settings: Settings,
    default: str,
    count: int,
    *,
    request: Request | None = None,
    inputs: Sequence[Path] = (),
) -> Outputs:
    """Where the videos of a command go; creates nothing.

    Args:
        default: the place without --out.
        request: once it is known, the videos must not be too long for their kind, and
            names that are taken are told.
        inputs: beside those of the settings.

    Raises:
        OutputError: a place is no place for a video, or is an input.
    """
    outputs = plan_outputs(
        default if settings.out is None else settings.out,
        count,
        inputs=[*settings.inputs(), *inputs],
        overwrite=settings.overwrite,
        report=settings.report,
    )
    if request is not None:
        for path in outputs.paths:
            check_length(path, outputs.kind, request.num_frames, request.fps)
        for remark in outputs.remarks():
            say(remark)
    return outputs


def _executables(settings: Settings) -> BuiltFolder | None:
    """The folder of executables that settings name, where it will be used."""
    if settings.executables is None or settings.backend == Backend.DIFFUSERS:
        return None
    from tpuport.core.programs.built_folder import BuiltFolder

    return BuiltFolder.open(settings.executables, whole=False)


def check_run_early(
    known: Known, settings: Settings, stages: Sequence[str] = STAGES
) -> None:
    """Refuse what a known variant cannot do before its weights are looked for.

    For commands that start a run; one that goes on with a run has it behind it.

    Args:
        known: from :func:`check_early`.
        stages: that the command runs.

    Raises:
        UsageError: an image or a video that cannot be read, a task, size class, number
            of steps or guidance that is not the variant's.
        ArtifactError: --executables are of another request.
    """
    port, variant = known.port, known.variant
    if port is None or variant is None:
        return
    source = source_of(settings, variant)
    asked = settings if settings.prompt else replace(settings, prompt=("",))
    request = Requests(port, variant).request(**request_of(asked, source))
    resumed = settings.run_dir is not None and (settings.run_dir / RUN_FILE).exists()
    if not resumed:  # else some of its stages may be finished
        rules.check(replace(known, request=request, stages=stages))


def open_session(
    settings: Settings,
    *,
    cache: Path,
    reporter: Reporter,
    keep_loaded: bool = False,
) -> Session:
    """A session with these settings.

    Raises:
        TpuportError: as :func:`tpuport.load`.
    """
    with signals.starting(before="\n"):
        if settings.mesh is not None:  # jax alone takes a sixth of all imports' time
            with reporter.timed("looking for devices"):
                _check_mesh_here(settings.mesh)
        api.import_libraries(reporter)
    return api.open_session(
        replace(settings, cache_dir=cache, keep_loaded=keep_loaded),
        guidance_scale=settings.guidance_scale,
        reporter=reporter,
    )


@contextlib.contextmanager
def shown_session(settings: Settings) -> Iterator[Session]:
    """A session that shows what it does, and keeps files where the user asked.

    Raises:
        OutputError: the cache folder cannot be written.
        TpuportError: as :func:`tpuport.load`.
    """
    cache = cache_folder(settings.cache_dir)
    with (
        Display(signals.check) as display,
        open_session(settings, cache=cache, reporter=display) as session,
    ):
        yield session


@contextlib.contextmanager
def configs_of(
    settings: Settings, cache: Path, reporter: Reporter
) -> Iterator[tuple[ModelPort, Variant, Checkpoint]]:
    """The checkpoint to plan or to compile for; its weights are not needed.

    Without --weights the configs of a published variant are enough. Of --weights
    nothing but the configs and tokenizers is read.
    """
    from tpuport.core.plan.config_checkpoint import config_checkpoint, hub_configs
    from tpuport.core.weights.checkpoint import local_folder

    port = with_blocks(api.model_of(settings), settings.blocks)
    variant = known_variant(port, settings)
    if settings.weights is None and variant is not None and variant.repo_id:
        form = port.form_of(variant)
        with config_checkpoint(form, variant, cache, reporter.say) as checkpoint:
            yield form, variant, checkpoint
        return
    weights = settings.weights
    if weights not in (None, "", DEMO) and local_folder(str(weights)) is None:
        weights = hub_configs(port, str(weights), reporter)
    settings = replace(settings, weights=weights, cache_dir=cache)
    yield api.find_checkpoint(port, settings, reporter)


def _check_mesh_here(spec: MeshSpec) -> None:
    """Refuse a mesh that CPU devices do not suffice for, and say where it would do.

    Raises:
        MeshError: it needs more devices.
    """
    import jax

    devices = jax.devices()
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


def source_of(settings: Settings, variant: Variant) -> Source | None:
    """The image or video to start from; as many frames of it as will be used.

    Raises:
        UsageError: it cannot be read, is too small, or too short.
    """
    frames = settings.num_frames or variant.num_frames
    return read_source(settings.image, settings.video, frames)


def make_request(
    session: Session, settings: Settings, source: Source | None = None
) -> Request:
    """The checked request: every prompt with every seed, each as if it were alone.

    Raises:
        UsageError: there is no prompt, or a value is off its rule.
    """
    check_prompts(settings)
    return session.request(**request_of(settings, source))


def request_of(settings: Settings, source: Source | None) -> dict[str, Any]:
    """Settings as :meth:`Requests.request` takes them."""
    prompts, seeds = settings.videos()
    names = defaults_of(Asked).keys() - {"image", "video"}
    return {
        **{name: getattr(settings, name) for name in names},
        "prompt": prompts,
        "seed": seeds,
        "source": source,
        "batched": False,
    }


def in_words(request: Request) -> str:
    """What will be made, so that a wrong setting is seen before an hour is spent."""
    count = len(request.prompts)
    frames = plural(request.num_frames, "frame")
    steps = plural(denoising_steps(request), "step")
    made_from = {Task.TEXT: "text", Task.IMAGE: "an image", Task.VIDEO: "a video"}
    seeds = ", ".join(str(s) for batch in request.seeds for s in batch)
    cache = "" if request.step_cache is None else f", cache {request.step_cache}"
    return (
        f"making {count} video{'s' * (count > 1)} from {made_from[request.task]}: "
        f"{request.width}x{request.height}, {frames} at "
        f"{request.fps:g} fps, {steps}, guidance "
        f"{request.guidance_scale:g}, seed {seeds}{cache}"
    )


def check_prompts(settings: Settings) -> None:
    """Refuse settings without a prompt.

    Raises:
        UsageError: there is none.
    """
    if not settings.prompt:
        raise UsageError('no prompt was given; add --prompt "..." or --prompt-file')


def check_attention_here(settings: Settings) -> None:
    """Refuse a kernel that does not run on this machine's devices; starts jax.

    Raises:
        UsageError: which one, and where it runs.
    """
    if settings.attention.name == AUTO or settings.backend == Backend.DIFFUSERS:
        return
    import jax

    from tpuport.kernels.attention.selection import IMPLEMENTATIONS

    name = settings.attention.name
    needed = next((one.platform for one in IMPLEMENTATIONS if one.name == name), None)
    found = jax.devices()[0].platform
    if needed is not None and needed != found:
        raise UsageError(
            f"--attention {name} is for TPU only; the platform here is {found!r}. Use "
            "auto, or blockwise or reference"
        )
