"""The public Python API: :func:`load` and :func:`port`; the command line uses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from tpuport.core.run.inspection import PROFILED_CALLS, Inspection
from tpuport.core.spec.choices import check_chosen, with_chosen
from tpuport.core.spec.component import TORCHAX
from tpuport.core.spec.model_port import ModelPort, with_blocks
from tpuport.core.spec.variant import Variant
from tpuport.errors import UsageError, WeightsError
from tpuport.plugins import get_port, reader_of

if TYPE_CHECKING:
    import jax
    import torch

    from tpuport.core.mesh.mesh_spec import MeshSpec
    from tpuport.core.reports import Reporter
    from tpuport.core.run.ported_program import PortedProgram
    from tpuport.core.run.session import Session
    from tpuport.core.weights.checkpoint import Checkpoint

    MeshLike = MeshSpec | str | Mapping[str, int] | Sequence[int] | None


DEFAULT_MODEL = "cogvideox"
"""What :func:`load` and :func:`port` take when no model is named."""


def default_cache_dir() -> Path:
    """The user's cache folder: compiled programs and the demo checkpoint."""
    return Path(platformdirs.user_cache_dir("tpuport"))


def compile_cache_dir(cache: Path) -> Path:
    """Where compiled programs are kept in a cache folder."""
    return cache / "compiled"


def load(
    model: str = DEFAULT_MODEL,
    *,
    weights: str | Path | None = None,
    variant: str | None = None,
    mesh: MeshLike = None,
    dtype: str | None = None,
    encode_on: str = "device",
    attention: str = "auto",
    sharding: str = "default",
    blocks: str = "native",
    vae: str = TORCHAX,
    keep_loaded: bool = True,
    cache_dir: str | Path | None = None,
    compile_cache: bool = True,
    executables: str | Path | None = None,
    memory_report: bool = False,
    profile: str | Path | None = None,
    profile_calls: int = PROFILED_CALLS,
    no_jit: str | Sequence[str] = (),
    vae_tiling: str = "auto",
    guidance_scale: float | None = None,
    reporter: Reporter | None = None,
) -> Session:
    """Open a model for generation.

    Weights are read when a stage first needs them.

    Args:
        model: the name of an installed model plugin.
        weights: a folder in the diffusers layout, or a hub id. Without it the demo
            checkpoint (random weights) is used, or the variant's published weights
            when ``variant`` names one.
        variant: whose defaults and rules hold. Without it the checkpoint tells.
        mesh: ``"dp=2,tp=4"``, a mapping, or (dp, sp, tp); one axis may be -1. Without
            it: one device on CPU, all of them on TPU.
        dtype: of the weights, ``"float32"`` or ``"bfloat16"``. Without it: float32 on
            CPU, the variant's dtype elsewhere.
        encode_on: ``"device"`` or ``"host"``.
        attention: ``"auto"``, or the name of an attention implementation.
        sharding: a layout of the weights that the plugin offers beside ``"default"``,
            such as ``"replicated-out"``.
        blocks: ``"native"`` for blocks written for the chip where the model has them,
            on upstream's weights; ``"upstream"`` for upstream's own everywhere.
        vae: the implementation of the autoencoder: ``"torchax"`` for upstream's class,
            or another that the model has, such as ``"flax"``; see docs/vae.md.
        keep_loaded: keep weights on the devices between calls of ``generate``.
        cache_dir: in place of the user's cache folder.
        compile_cache: keep compiled programs there.
        executables: a folder that ``tpuport compile`` made; see docs/compile.md.
        memory_report: note the bytes in use and their peak after each call, in the
            report of each stage (``memory``); see docs/debugging.md.
        profile: folder for a trace of calls in steady state, one for each stage.
        profile_calls: how many calls of a stage are in it.
        no_jit: the stage that runs op by op, for debugging, or several.
        vae_tiling: whether decode runs in overlapping tiles, as after upstream's
            ``vae.enable_tiling()``: ``"on"``, ``"off"``, or ``"auto"`` for where the
            device would not hold it otherwise; see docs/vae.md.
        guidance_scale: what videos will be asked with, where it is not the variant's: a
            mesh that is not named is chosen for it (without guidance there is one row
            to divide in place of two).
        reporter: told about progress.

    Returns:
        A :class:`~tpuport.core.run.session.Session`, usable in a ``with`` block.

    Raises:
        UnknownModelError: no such model or variant.
        WeightsError: the checkpoint is missing, incomplete or of another model.
        MeshError: the mesh does not fit the devices or the heads.
        UsageError: an unknown dtype or option.
    """
    import jax

    from tpuport.core.arrays import check_dtype, dtype_name
    from tpuport.core.reports import Reporter as SilentReporter
    from tpuport.core.run.session import Session

    reporter = reporter or SilentReporter()
    found = with_blocks(get_port(model), blocks)
    implementations = {"vae": vae}
    check_chosen(found, implementations)
    cache = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    if dtype is not None:
        dtype = check_dtype(dtype_name(dtype))
    asked = _parse_mesh(mesh)
    if asked is not None:
        # Before anything is fetched for a mesh that cannot be.
        asked.resolve(len(jax.devices()))
    port, chosen, checkpoint = find_checkpoint(
        found, weights=weights, variant=variant, cache=cache, reporter=reporter
    )
    port = with_chosen(port, implementations)
    rows = default_rows(port, chosen, guidance_scale)
    placed = make_mesh(port, checkpoint, asked, rows, reporter=reporter)
    platform = placed.devices.flat[0].platform
    if dtype is None:
        dtype = "float32" if platform == "cpu" else chosen.dtype
    return Session(
        port,
        chosen,
        checkpoint,
        placed,
        dtype=dtype,
        encode_on=encode_on,
        attention=attention,
        sharding=sharding,
        keep_loaded=keep_loaded,
        compile_cache=compile_cache_dir(cache) if compile_cache else None,
        executables=Path(executables).expanduser() if executables else None,
        inspection=Inspection(
            memory=memory_report,
            profile=Path(profile).expanduser() if profile else None,
            profile_calls=profile_calls,
            no_jit=(no_jit,) if isinstance(no_jit, str) else tuple(no_jit),
        ),
        vae_tiling=vae_tiling,
        reporter=reporter,
    )


def port(
    module: torch.nn.Module,
    model: str = DEFAULT_MODEL,
    mesh: MeshLike = None,
    *,
    attention: str = "auto",
    sharding: str = "default",
    blocks: str = "native",
) -> PortedProgram:
    """A torch module as a compiled JAX program with a plugin's patches and rules.

    Args:
        module: an instance of one of the model's component classes, any legal config.
        model: the name of an installed model plugin.
        mesh: as for :func:`load`; without it, one device.
        attention, sharding, blocks: as for :func:`load`.

    Returns:
        A callable with upstream's signature: torch tensors in, torch tensors out.
        Other methods of the module are called by name: ``.decode(z)``.

    Raises:
        UsageError: the module is of no class the plugin knows, or ``blocks`` is none.
        ShardingError: the plugin's rules do not fit the module's weights and the mesh.
        MeshError: the mesh does not fit the devices.
    """
    from tpuport.core.mesh.device_mesh import build_mesh
    from tpuport.core.run.ported_program import PortedProgram, component_of

    found, component = component_of(with_blocks(get_port(model), blocks), module)
    spec = _parse_mesh(mesh)
    if spec is None:
        spec = _parse_mesh((1, 1, 1))
    assert spec is not None
    placed = build_mesh(spec)
    if component.heads is not None and hasattr(module, "config"):
        config = module.config
        values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        _spec_of(placed).validate(heads={component.name: component.heads(values)})
    return PortedProgram(
        module, found, component, placed, attention=attention, sharding=sharding
    )


def _parse_mesh(mesh: MeshLike) -> MeshSpec | None:
    from tpuport.core.mesh.mesh_spec import MeshSpec

    return None if mesh is None else MeshSpec.parse(mesh)


def _spec_of(mesh: jax.sharding.Mesh) -> MeshSpec:
    from tpuport.core.mesh.mesh_spec import MeshSpec

    return MeshSpec.parse(dict(mesh.shape))


def find_checkpoint(
    port: ModelPort,
    *,
    weights: str | Path | None,
    variant: str | None,
    cache: Path,
    reporter: Reporter,
) -> tuple[ModelPort, Variant, Checkpoint]:
    """The form, the variant and the checkpoint that a user's choice stands for.

    Raises:
        UnknownModelError: no such variant.
        WeightsError: see :func:`tpuport.core.weights.checkpoint.resolve`; or the
        checkpoint is
            of another form than the variant.
    """
    from tpuport.core.spec.demo_checkpoint import demo_checkpoint
    from tpuport.core.weights.checkpoint import resolve

    named = port.variant(variant) if variant is not None else None
    source: str | Path | None = weights
    if source is None and named is not None and named.repo_id:
        source = named.repo_id
    if source is None or str(source) == "demo":
        demo = named if named and not named.repo_id else port.variants[0]
        chosen = named or demo
        if chosen.form != demo.form:
            demo = next(
                v for v in port.variants if not v.repo_id and v.form == chosen.form
            )
        reporter.say(
            "using the built-in demo checkpoint: its weights are random; name real "
            "ones with --weights HUB_ID_OR_FOLDER"
        )
        form = port.form_of(demo)
        return form, chosen, demo_checkpoint(form, demo.name, cache, reporter.say)
    if not str(source):
        raise UsageError("weights is empty; give a folder or a hub id")
    folders = [
        name
        for form in port.all_forms
        for name in (*form.components, *(f for s in form.stages for f in s.files))
    ]
    checkpoint = resolve(
        source,
        folders=list(dict.fromkeys(folders)),
        pipelines=[name for form in port.all_forms for name in form.pipelines],
        model=port.name,
        say=reporter.say,
        reader=reader_of,
    )
    form = port.form_of_pipeline(str(checkpoint.index["_class_name"]))
    if named is not None and named.form != form.form:
        raise WeightsError(
            f"{checkpoint.source} is of a {checkpoint.index['_class_name']}, "
            f"which variant {named.name} is not of; leave --variant out to go by the "
            "checkpoint"
        )
    return form, named or form.detect(checkpoint), checkpoint


def default_rows(
    port: ModelPort, variant: Variant, guidance_scale: float | None = None
) -> int:
    """Rows of the denoiser's batch for one video with a variant's defaults.

    Two where both prompts of guidance are run; a distilled checkpoint has one, and so
    has a ``guidance_scale`` that turns guidance off.
    """
    from tpuport.core.spec.request import Request

    request = Request(
        prompts=("",),
        negative_prompts=("",),
        seeds=((0,),),
        batch_size=1,
        height=variant.height,
        width=variant.width,
        num_frames=variant.num_frames,
        fps=variant.fps,
        num_inference_steps=variant.num_inference_steps,
        guidance_scale=(
            variant.guidance_scale if guidance_scale is None else guidance_scale
        ),
        options=variant.options,
    )
    return 2 if port.guided(request) else 1


def make_mesh(
    port: ModelPort,
    checkpoint: Checkpoint,
    asked: MeshSpec | None,
    rows: int,
    devices: Sequence[jax.Device] | None = None,
    reporter: Reporter | None = None,
) -> jax.sharding.Mesh:
    """The mesh asked for; by default one CPU device, or all TPU chips.

    Args:
        rows: of the denoiser's batch, which dp must divide.
        devices: to choose from, in place of this machine's.
        reporter: told of chips that a mesh asked for leaves unused.

    Raises:
        MeshError: it does not fit the devices.
    """
    import jax

    from tpuport.core.mesh.device_mesh import build_mesh
    from tpuport.core.spec.default_mesh import default_mesh

    devices = jax.devices() if devices is None else devices
    if asked is None:
        asked = default_mesh(port, checkpoint, devices, rows=rows)
    elif reporter is not None and devices[0].platform != "cpu":
        unused = asked.resolve(len(devices)).unused(len(devices))
        if unused is not None:
            reporter.say(unused)
    return build_mesh(asked, devices)
