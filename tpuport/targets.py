"""What :func:`tpuport.port` and the command line make programs for.

A general target has the standard patches and overrides. A plugin that knows the class
of a pipeline or a module adds its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.core.enums import Blocks
from tpuport.core.files.stores import StorePath, fetched
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.programs.folder_place import BUILT
from tpuport.core.reports import Reporter, plural
from tpuport.core.spec import outside
from tpuport.core.spec.component import TORCHAX, NativeForm
from tpuport.core.spec.model_plugin import ModelPlugin
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.weights.sharding import DEFAULT_LAYOUT, GATHERED
from tpuport.errors import (
    MeshError,
    PluginError,
    TpuportError,
    UsageError,
    did_you_mean,
)
from tpuport.plugins import (
    configs_of,
    get_model,
    model_plugins,
    plugin_for,
    plugin_for_module,
)

if TYPE_CHECKING:
    import jax
    import torch

    from tpuport.core.mesh.device_mesh import PlacedMesh
    from tpuport.core.pipelines.loras import Lora
    from tpuport.core.programs.built_folder import BuiltFolder
    from tpuport.core.seam.target import Target
    from tpuport.core.tracing.patching import Patch


def place_for_port(
    mesh: MeshSpec | None, reporter: Reporter | None = None
) -> PlacedMesh:
    """The mesh asked for; by default one CPU device, or all chips along sp.

    Over several processes the mesh has all devices.

    Args:
        reporter: told of chips that a mesh leaves unused.
    """
    import jax

    devices = jax.devices()
    several = jax.process_count() > 1
    if mesh is None and (several or devices[0].platform != "cpu"):
        mesh = MeshSpec(sp=len(devices))
    spec = (mesh or MeshSpec()).resolve(len(devices))
    if several and spec.size < len(devices):
        raise MeshError(
            f"mesh {spec} has {spec.size} devices, and the {jax.process_count()} "
            f"processes have {len(devices)}; a mesh over processes takes all devices"
        )
    return place(spec, devices, reporter)


def place(
    mesh: MeshSpec, devices: Sequence[jax.Device], reporter: Reporter | None
) -> PlacedMesh:
    """A mesh on some devices.

    Args:
        reporter: told of chips that the mesh leaves unused.

    Raises:
        MeshError: the mesh does not fit the devices.
    """
    from tpuport.core.mesh.device_mesh import place_mesh

    if reporter is not None and devices[0].platform != "cpu":
        unused = mesh.resolve(len(devices)).unused(len(devices))
        if unused is not None:
            reporter.say(unused)
    return place_mesh(mesh, devices)


def general_target(placed: PlacedMesh, settings: RunSettings) -> Target:
    """What the general port makes programs for: the standard patches and overrides."""
    from tpuport.core.programs.jax_cache import XLA_FOLDER
    from tpuport.core.seam.target import Target
    from tpuport.patches.standard import OVERRIDES, PATCHES

    folder = settings.compiled_dir
    return Target(
        mesh=placed.mesh,
        patches=PATCHES,
        overrides=OVERRIDES,
        implementation=settings.attention,
        cache=folder and folder / XLA_FOLDER,
        in_parts=settings.sharding == GATHERED,
        weights_on=settings.weights_on,
    )


def matched_loras(
    kind: Any,
    modules: Mapping[str, torch.nn.Module],
    loras: Sequence[Lora],
    reporter: Reporter,
) -> tuple[Lora, ...]:
    """LoRAs matched with the modules of a pipeline's class; no weight is read.

    Args:
        reporter: told of keys that upstream leaves out.

    Raises:
        UsageError: a key fits no weight.
        WeightsError: a file is damaged.
    """
    plugin = plugin_for(outside.claim_on(kind))
    names = {} if plugin is None else plugin.lora_names
    return tuple(lora.matched(kind, modules, names, reporter) for lora in loras)


def executables_for(
    pipeline: str, target: Target, settings: RunSettings, reporter: Reporter
) -> BuiltFolder | None:
    """The executables that the settings name, found to be for this pipeline and target.

    Raises:
        ArtifactError: the folder is damaged, or for something else.
        StoreError: the folder is in a store that cannot be read.
        UsageError: it is in a store, and there is no cache folder to fetch it to.
    """
    from tpuport.core.programs.built_folder import BuiltFolder

    folder = settings.executables
    if folder is None:
        return None
    if isinstance(folder, StorePath):
        if settings.cache_dir is None:
            raise UsageError(
                f"executables {folder}: name a folder of this machine to "
                "fetch them to with cache_dir"
            )
        folder = fetched(folder, BUILT, settings.cache_dir, reporter)
    found = BuiltFolder.open(Path(folder), reporter)
    about = made_with(target, settings)
    if settings.dtype is not None:
        about["dtype"] = str(settings.dtype)
    found.check(target.mesh, settings.weights_on, pipeline=pipeline, **about)
    return found


def made_with(target: Target, settings: RunSettings) -> dict[str, Any]:
    """What executables are made with, and no key of a program says by name."""
    return {
        "attention": str(settings.attention),
        "blocks": str(target.blocks),
        "vae": settings.vae,
    }


def claimed_target(
    pipeline: str, placed: PlacedMesh, settings: RunSettings, reporter: Reporter
) -> Target:
    """:func:`general_target` with what the plugin of a pipeline class knows, if any.

    Args:
        pipeline: as of :func:`plugin_for`.
    """
    general = general_target(placed, settings)
    pipeline = pipeline.replace("ModularPipeline", "Pipeline")  # of equal modules
    name = pipeline.rpartition(":")[2]
    for one in model_plugins():
        one.check_claims()
    plugin = plugin_for(pipeline)
    if plugin is None:
        return _without_plugin(general, settings, name)
    plugin.check()
    chosen = {"vae": settings.vae}
    return _of_plugin(general, plugin, settings, reporter, name, chosen)


def module_target(
    module: torch.nn.Module,
    model: str | None,
    placed: PlacedMesh,
    settings: RunSettings,
    reporter: Reporter,
) -> Target:
    """:func:`general_target` with what the plugin of a module's class knows, if any.

    Args:
        model: the plugin to use; by default the one that knows the class.

    Raises:
        UsageError: the plugin named knows no such class.
    """
    general = replace(general_target(placed, settings), alone=True)
    kind = type(module).__name__
    found = get_model(model) if model else plugin_for_module(type(module))
    if found is None:
        return _without_plugin(general, settings, kind)
    found.check()
    component = found.component_of(type(module))
    if component is None:
        raise UsageError(f"model {found.name!r} has no module of class {kind}")
    own = replace(found, modules={kind: found.modules[component]})
    chosen = {kind: settings.vae} if component == "vae" else {}
    return _of_plugin(general, own, settings, reporter, kind, chosen)


def _without_plugin(general: Target, settings: RunSettings, kind: str) -> Target:
    known = {"sharding": (DEFAULT_LAYOUT, GATHERED), "vae": (TORCHAX,)}
    for name, values in known.items():
        if getattr(settings, name) not in values:
            raise UsageError(f"{name}: is for a plugin, and {kind} has none")
    return general


def _of_plugin(
    general: Target,
    plugin: ModelPlugin,
    settings: RunSettings,
    reporter: Reporter,
    kind: str,
    chosen: Mapping[str, str],
) -> Target:
    found = general.of_plugin(plugin, settings.blocks, settings.sharding, chosen)
    patches = plugin.patches_with(settings.blocks, chosen)
    forms = plugin.forms_with(settings.blocks, chosen).items()
    _check_patches(plugin, patches, forms)
    words = "native blocks" if found.blocks == Blocks.NATIVE else "upstream's blocks"
    reporter.say(f"{kind}: with the plugin of {plugin.name} and {words}")
    return found


def mistakes_of(plugin: ModelPlugin) -> list[str]:
    """What an installed plugin declares and is not so, each apart from the others.

    The classes of the pipelines that the plugin claims are imported.
    """
    found: list[str] = []

    def noted(check: Callable[[], object]) -> None:
        try:
            check()
        except TpuportError as error:
            notes = (note.strip() for note in getattr(error, "__notes__", ()))
            found.extend((str(error), *notes))

    noted(plugin.check)
    if not found:
        found += _unknown_defaults(plugin)
    for one in plugin.variants.values():
        if one.configs:
            noted(partial(configs_of, plugin, one))
    forms = [
        (name, module.form(Blocks.NATIVE, form))
        for name, module in plugin.modules.items()
        for form in (TORCHAX, *module.forms)
    ]
    every = [(name, form) for name, form in forms if form is not None]
    patches = [*plugin.patches, *(p for _, form in every for p in form.patches)]
    noted(partial(_check_patches, plugin, dict.fromkeys(patches), every))
    return found


def _unknown_defaults(plugin: ModelPlugin) -> Iterator[str]:
    """Keywords of variants that no claimed pipeline's call has."""
    from tpuport.core.pipelines.call_arguments import PARAMETERS, SCHEDULER

    calls = [plugin_class.__call__ for plugin_class in plugin.classes]
    takes = [
        one for call in calls for one in inspect.signature(call).parameters.items()
    ]
    if any(one.kind is one.VAR_KEYWORD for _, one in takes):
        return
    known = {name for name, _ in takes} - {"self"}
    known |= {name for name, names in PARAMETERS.items() if known & {*names}}
    known |= {"fps", SCHEDULER}
    for variant, published in plugin.variants.items():
        for name in published.defaults.keys() - known:
            hint = did_you_mean(name, known, "name a parameter of upstream's call")
            yield (
                f"plugin {plugin.name}: variants[{variant!r}]: defaults[{name!r}] is "
                f"no parameter of {' or '.join(plugin.pipelines)}; {hint}"
            )


def _check_patches(
    plugin: ModelPlugin,
    patches: Iterable[Patch],
    forms: Iterable[tuple[str, NativeForm]],
) -> None:
    """Refuse a plugin whose patches do not fit the installed upstream.

    Args:
        forms: that have some of the patches, each with the name of its module.
    """
    from tpuport.core.tracing.patching import inspect_patches

    owners = {p.name: name for name, form in forms for p in form.patches}
    found = inspect_patches(tuple(patches))
    wrong = [status for status in found if status.state in ("gone", "broken")]
    if not wrong:
        return
    first = wrong[0]
    error = PluginError(
        f"plugin {plugin.name}: {plural(len(wrong), 'patch')} cannot be applied: "
        f"{first.name!r} of {first.target} is {first.state}; adapt what is named, or "
        "remove it"
    )
    for status in wrong:
        owner = owners.get(status.name)
        form = f"module {owner}'s native form: " if owner else ""
        error.add_note(f"  {form}{status.detail}")
    raise error
