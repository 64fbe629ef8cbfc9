"""The public Python API: :func:`port` and :func:`unport`, and :func:`preview`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.reports import Reporter
from tpuport.core.run.progress import Display
from tpuport.core.spec import kinds, outside
from tpuport.core.spec.lora_choice import LoraChoice
from tpuport.core.spec.run_settings import RunSettings, read_value
from tpuport.errors import UsageError, did_you_mean
from tpuport.targets import (
    claimed_target,
    executables_for,
    matched_loras,
    module_target,
    place_for_port,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tpuport.core.preview.previews import Preview

    MeshLike = MeshSpec | str | Mapping[str, int] | Sequence[int] | None


#: The settings that :func:`port` takes.
_HOW = frozenset(
    (
        *("attention", "sharding", "weights_on", "blocks", "vae", "lora"),
        *("cache_dir", "executables"),
    )
)


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
        mesh: such as ``"dp=2,sp=4"``, ``{"dp": 2, "sp": 4}`` or (dp, sp, tp); one may
            be -1. Without it one CPU device, or all chips along sp.
        on_host: components of a pipeline that stay plain upstream code.
        progress: show on stderr what happens: a line that moves on a terminal, a few
            plain lines elsewhere.
        reporter: told what happens, in place of that.
        how: ``attention``, ``sharding``, ``weights_on``, ``blocks``, ``vae``, fields of
            :class:`~tpuport.core.spec.run_settings.RunSettings`; ``cache_dir``, where
            compiled programs are kept (without it none are); and for a pipeline
            ``executables``, a folder that ``tpuport compile`` wrote, and ``lora``, a
            file or hub id such as ``"fox.safetensors:0.8"``, or several, which are
            fused into the pipeline's own weights and stay there.

    Returns:
        For a pipeline, that very pipeline; :func:`unport` gives upstream's back. For a
        module, a twin of the module's class with the module's own tensors, whose
        calls run on the mesh. The module that was handed in stays upstream's.

    Raises:
        UsageError: the target is neither, is ported already, ``blocks`` is none, or a
            keyword is for the other kind of target or for a plugin that there is not.
        ShardingError: the plugin's rules do not fit the module's weights and the mesh.
        MeshError: the mesh does not fit the devices or the heads.
        WeightsError: a LoRA's file is damaged, or could not be fetched.
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
    settings = RunSettings.read({"mesh": mesh, **how})
    if is_module and settings.executables is not None:
        raise UsageError("executables: is for a pipeline; compile writes no module's")
    if is_module and settings.lora:
        raise UsageError("lora: is for a pipeline; load it into the module by upstream")
    if reporter is None:
        reporter = Display() if progress else Reporter()
    placed = place_for_port(settings.mesh, reporter)
    if is_module:
        wanted = module_target(target, model, placed, settings, reporter)
        return port_module(target, wanted, reporter)
    claim = outside.claim_on(type(target))
    wanted = claimed_target(claim, placed, settings, reporter)
    built = executables_for(type(target).__name__, wanted, settings, reporter)
    if built is not None:
        built.check_modules(target.components)
    if settings.lora:
        _fuse(target, settings.lora, reporter)
    return port_pipeline(target, wanted.with_executables(built), on_host, reporter)


def _fuse(pipeline: Any, choices: Sequence[LoraChoice], reporter: Reporter) -> None:
    """Add LoRAs to the weights of a pipeline."""
    from tpuport.core.pipelines.loras import Lora, fuse
    from tpuport.core.seam.ported import is_ported, modules_of

    if is_ported(pipeline):
        raise UsageError("lora: the pipeline is ported; call tpuport.unport() first")
    found = [Lora.find(choice, reporter) for choice in choices]
    modules = modules_of(pipeline)
    fuse(matched_loras(type(pipeline), modules, found, reporter), modules)


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


def preview(
    pipeline: Any, call: Mapping[str, Any], cache_dir: str | Path | None = None
) -> Preview:
    """What makes frames of latents, in upstream's ``callback_on_step_end``.

    Args:
        pipeline: ported, and about to be called.
        call: the keywords of that call. A callback among them is left out.
        cache_dir: where the colours of an autoencoder's latents are kept; without it
            none are.

    Returns:
        called with the latents of a step of that call, packed or not, it gives uint8
        frames [frames, height, width, 3], a pixel for each pixel of the latents. It
        raises a :class:`TpuportError` where a pipeline's latents cannot be shown.

    Raises:
        UsageError: the pipeline is not ported.
    """
    from tpuport.core.preview.previews import Preview
    from tpuport.core.seam.ported import is_ported, seam_of

    if not is_ported(pipeline):
        raise UsageError(
            f"preview() takes a ported pipeline; call tpuport.port() with the "
            f"{type(pipeline).__name__} first"
        )
    folder = None
    if cache_dir is not None:
        folder = read_value(kinds.path, cache_dir, "cache_dir") / "previews"
    return Preview(pipeline, call, seam_of(pipeline).journal, folder)
