"""The public Python API: :func:`load` and :func:`port`; the command line uses it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from tpuport.core.enums import Dtype
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.reports import Reporter
from tpuport.core.run.progress import Display
from tpuport.core.spec.choices import check_chosen, with_chosen
from tpuport.core.spec.model_port import ModelPort, with_blocks
from tpuport.core.spec.run_settings import (
    DEMO,
    Asked,
    RunSettings,
    defaults_of,
    in_python,
    python_words,
)
from tpuport.core.spec.variant import Variant
from tpuport.errors import UsageError, WeightsError, did_you_mean
from tpuport.plugins import get_port, reader_of
from tpuport.targets import (
    claimed_target,
    executables_for,
    module_target,
    place,
    place_for_port,
)

if TYPE_CHECKING:
    import jax

    from tpuport.core.mesh.device_mesh import PlacedMesh
    from tpuport.core.run.session import Session
    from tpuport.core.weights.checkpoint import Checkpoint

    MeshLike = MeshSpec | str | Mapping[str, int] | Sequence[int] | None


DEFAULT_MODEL = "cogvideox"
"""What :func:`load` and :func:`port` take when no model is named."""


def default_cache_dir() -> Path:
    """The user's cache folder: compiled programs and the demo checkpoint."""
    return Path(platformdirs.user_cache_dir("tpuport"))


def model_of(settings: RunSettings) -> ModelPort:
    """The model asked for, or the default one.

    Raises:
        UnknownModelError: there is no such model.
    """
    return get_port(settings.model or DEFAULT_MODEL)


def load(
    model: str = DEFAULT_MODEL,
    *,
    guidance_scale: float | None = None,
    progress: bool = True,
    reporter: Reporter | None = None,
    **settings: Any,
) -> Session:
    """Open a model for generation.

    Weights are read when a stage first needs them.

    Args:
        model: the name of an installed model plugin.
        guidance_scale: what videos will be asked with, where it is not the variant's: a
            mesh that is not named is chosen for it (without guidance there is one row
            to divide in place of two).
        progress: show on stderr what the session does: a line that moves on a terminal,
            a few plain lines elsewhere.
        reporter: told what the session does, in place of that.
        settings: the fields of
            :class:`~tpuport.core.spec.run_settings.RunSettings`, which says what each
            one does: ``weights``, ``variant``, ``mesh``, ``dtype``, ...

    Returns:
        A :class:`~tpuport.core.run.session.Session`, usable in a ``with`` block.

    Raises:
        UnknownModelError: no such model or variant.
        WeightsError: the checkpoint is missing, incomplete or of another model.
        MeshError: the mesh does not fit the devices or the heads.
        UsageError: a value of another kind, or an option that the model has not.
        TypeError: a keyword that is no setting.
    """
    if reporter is None:
        reporter = Display(words=in_python) if progress else Reporter()
    given = {"model": model, **settings}
    with python_words():
        return open_session(
            RunSettings.read(given, named=str),
            guidance_scale=guidance_scale,
            reporter=reporter,
        )


def _with_keywords() -> inspect.Signature:
    """The signature of :func:`load` with every setting, for ``help``."""
    found = inspect.signature(load)
    own = dict(found.parameters)
    rest = own.pop("settings")
    for name, default in defaults_of(RunSettings).items():
        own.setdefault(
            name, rest.replace(name=name, kind=rest.KEYWORD_ONLY, default=default)
        )
    return found.replace(parameters=list(own.values()))


load.__signature__ = _with_keywords()  # type: ignore[attr-defined]


#: What every session imports sooner or later, and what takes long of that.
_LIBRARIES = (
    "jax",
    "transformers.modeling_utils",
    "diffusers.models.modeling_utils",
    "tpuport.core.run.session",
)


def import_libraries(reporter: Reporter) -> None:
    """Import what takes seconds: torch, jax, diffusers, transformers; say so.

    Nothing is garbage while modules are imported, and looking for it takes a seventh of
    the time.
    """
    if set(_LIBRARIES) <= sys.modules.keys():
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        with reporter.timed("importing torch, jax and diffusers"):
            for name in _LIBRARIES:
                importlib.import_module(name)
    finally:
        if collects:
            gc.enable()


def open_session(
    settings: RunSettings,
    *,
    guidance_scale: float | None = None,
    reporter: Reporter,
) -> Session:
    """:func:`load` with settings that were read."""
    import_libraries(reporter)
    import jax

    from tpuport.core.run.session import Session
    from tpuport.core.spec.rules import Known, check

    check(Known(settings=settings))
    found = with_blocks(model_of(settings), settings.blocks)
    check_chosen(found, settings.implementations)
    settings = replace(settings, cache_dir=settings.cache_dir or default_cache_dir())
    if settings.mesh is not None:
        # Before anything is fetched for a mesh that cannot be.
        settings.mesh.resolve(len(jax.devices()))
    port, chosen, checkpoint = find_checkpoint(found, settings, reporter)
    port = with_chosen(port, settings.implementations)
    rows = default_rows(port, chosen, guidance_scale)
    placed = make_mesh(port, checkpoint, settings.mesh, rows, reporter=reporter)
    if settings.dtype is None:
        on_cpu = placed.mesh.devices.flat[0].platform == "cpu"
        dtype = Dtype.FLOAT32 if on_cpu else Dtype(chosen.dtype)
        settings = replace(settings, dtype=dtype)
    return Session(port, chosen, checkpoint, placed, settings, reporter)


#: The settings that :func:`port` takes.
_HOW = frozenset({"attention", "sharding", "blocks", "vae", "cache_dir", "executables"})


def port(
    target: Any,
    model: str | None = None,
    mesh: MeshLike = None,
    *,
    on_host: Sequence[str] | str = (),
    progress: bool = True,
    reporter: Reporter | None = None,
    **how: Any,
) -> Any:
    """Upstream's pipeline or module on a mesh, with upstream's own code in charge.

    Args:
        target: a pipeline of diffusers (any class, its weights on the CPU), or one
            torch module.
        model: the model plugin whose patches, rules and native blocks are used for a
            module; by default the plugin that knows the module's class, if one does.
        mesh: as for :func:`load`; without it one CPU device, or all chips along sp.
        on_host: components of a pipeline that stay plain upstream code.
        progress, reporter: as for :func:`load`.
        how: ``attention``, ``sharding``, ``blocks``, ``vae``: as for :func:`load`;
            ``cache_dir``, where compiled programs are kept; without it none are.
            ``executables``, for a pipeline: a folder that ``tpuport compile`` wrote.

    Returns:
        For a pipeline, that very pipeline; :func:`unport` gives upstream's back. For a
        module, a twin of the module's class with the module's own tensors, whose
        calls run on the mesh. The module that was handed in stays upstream's.

    Raises:
        UsageError: the target is neither, is ported already, ``blocks`` is none, or a
            keyword is for the other kind of target or for a plugin that there is not.
        ShardingError: the plugin's rules do not fit the module's weights and the mesh.
        MeshError: the mesh does not fit the devices or the heads.
    """
    import torch

    from tpuport.core.seam.ported import port_module, port_pipeline

    for unknown in how.keys() - _HOW:
        known = sorted(_HOW | inspect.signature(port).parameters.keys() - {"how"})
        raise TypeError(
            f"port() has no keyword {unknown!r}; "
            + did_you_mean(unknown, known, f"there are {', '.join(known)}")
        )
    on_host = (on_host,) if isinstance(on_host, str) else on_host
    is_module = isinstance(target, torch.nn.Module)
    _check_kind(target, is_module, model, on_host)
    settings = RunSettings.read({"mesh": mesh, **how}, named=str)
    if is_module and settings.executables is not None:
        raise UsageError("executables: is for a pipeline; compile writes no module's")
    if reporter is None:
        reporter = Display() if progress else Reporter()
    placed = place_for_port(settings.mesh, reporter)
    if is_module:
        wanted = module_target(target, model, placed, settings, reporter)
        return port_module(target, wanted, reporter)
    pipeline = type(target).__name__
    wanted = claimed_target(pipeline, placed, settings, reporter)
    built = executables_for(pipeline, placed, settings, reporter)
    if built is not None:
        built.check_modules(target.components)
    return port_pipeline(target, replace(wanted, built=built), on_host, reporter)


def _check_kind(
    target: Any, is_module: bool, model: str | None, on_host: Sequence[str]
) -> None:
    """Refuse what is no target of :func:`port`, and a keyword for the other kind."""
    if not is_module and not isinstance(getattr(target, "components", None), dict):
        raise UsageError(
            f"port() takes a pipeline of diffusers or a torch module, not a "
            f"{type(target).__name__}"
        )
    if is_module and on_host:
        raise UsageError("on_host: is for a pipeline; a module has no components")
    if not is_module and model is not None:
        raise UsageError("model: is for a module; a pipeline's class names its own")


def unport(ported: Any) -> Any:
    """Give a ported pipeline or module upstream's own code back; returns it.

    The devices' memory is free afterwards.

    Raises:
        UsageError: it is not ported.
    """
    from tpuport.core.seam.ported import unport

    return unport(ported)


@contextlib.contextmanager
def ported(target: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """:func:`port` for the length of a block; :func:`unport` at its end."""
    found = port(target, *args, **kwargs)
    try:
        yield found
    finally:
        unport(found)


def find_checkpoint(
    port: ModelPort, settings: RunSettings, reporter: Reporter
) -> tuple[ModelPort, Variant, Checkpoint]:
    """The form, the variant and the checkpoint that a user's choice stands for.

    Args:
        settings: with a ``cache_dir``, where a demo checkpoint is kept.

    Raises:
        UnknownModelError: no such variant.
        WeightsError: see :func:`tpuport.core.weights.checkpoint.resolve`; or the
        checkpoint is
            of another form than the variant.
    """
    from tpuport.core.spec.demo_checkpoint import demo_checkpoint
    from tpuport.core.weights.checkpoint import resolve

    named = port.variant(settings.variant) if settings.variant is not None else None
    source = settings.weights
    if source is None and named is not None and named.repo_id:
        source = named.repo_id
    if source is None or str(source) == DEMO:
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
        cache = settings.cache_dir or default_cache_dir()
        with reporter.timed("looking for the demo checkpoint"):
            return form, chosen, demo_checkpoint(form, demo.name, cache)
    if not str(source):
        raise UsageError("weights is empty; give a folder or a hub id")
    checkpoint = resolve(
        source,
        folders=port.all_folders,
        pipelines=[name for form in port.all_forms for name in form.pipelines],
        model=port.name,
        reporter=reporter,
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
    from tpuport.core.spec.rules import plain_request

    asked = plain_request(Asked(guidance_scale=guidance_scale), variant)
    request = replace(asked, options=variant.options)
    return 2 if port.guided(request) else 1


def make_mesh(
    port: ModelPort,
    checkpoint: Checkpoint,
    asked: MeshSpec | None,
    rows: int,
    devices: Sequence[jax.Device] | None = None,
    reporter: Reporter | None = None,
) -> PlacedMesh:
    """The mesh asked for; by default one CPU device, or all TPU chips.

    Args:
        rows: of the denoiser's batch, which dp must divide.
        devices: to choose from, in place of this machine's.
        reporter: told of chips that a mesh asked for leaves unused.

    Raises:
        MeshError: it does not fit the devices.
    """
    import jax

    from tpuport.core.plan.default_mesh import default_mesh

    devices = jax.devices() if devices is None else devices
    if asked is None:
        asked, reporter = default_mesh(port, checkpoint, devices, rows=rows), None
    return place(asked, devices, reporter)
