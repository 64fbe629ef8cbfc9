"""Finding model plugins. Built-in models come through the same door as any other."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pluggy

from tpuport import hookspecs
from tpuport.errors import PluginError, UnknownModelError, UsageError

if TYPE_CHECKING:
    from tpuport.core.spec.model_plugin import ModelPlugin
    from tpuport.core.spec.model_port import ModelPort


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """One loaded plugin.

    Attributes:
        name: of its entry point.
        package: the distribution it comes from, with its version.
        module: the module that implements the hooks.
        model: what it hands over.
    """

    name: str
    package: str
    module: str
    model: ModelPlugin | ModelPort


def _package(entry_point: importlib.metadata.EntryPoint) -> str:
    dist = entry_point.dist
    return f"{dist.name} {dist.version}" if dist is not None else "an unknown package"


def load_plugins(
    entry_points: Iterable[importlib.metadata.EntryPoint],
) -> dict[str, Plugin]:
    """Load plugins; returns them by model name.

    Raises:
        PluginError: a plugin fails to import, implements an unknown hook, hands over no
            port, fails while it does, or takes a model name that is taken. The message
            names the package.
    """
    plugins: dict[str, Plugin] = {}
    for entry_point in sorted(entry_points, key=lambda e: (e.name, e.value)):
        plugin = _load(entry_point)
        other = plugins.get(plugin.model.name)
        if other is not None:
            raise PluginError(
                f"two plugins are called {plugin.model.name!r}: {other.module} of "
                f"{other.package} and {plugin.module} of {plugin.package}; uninstall "
                "one"
            )
        plugins[plugin.model.name] = plugin
    return plugins


def _load(entry_point: importlib.metadata.EntryPoint) -> Plugin:
    from tpuport.core.spec.model_plugin import ModelPlugin
    from tpuport.core.spec.model_port import ModelPort

    package = _package(entry_point)
    where = f"plugin {entry_point.name!r} of {package}"
    try:
        module: Any = entry_point.load()
    except (Exception, SystemExit) as error:
        # A plugin is foreign code: whatever its import raises is its own failure.
        raise PluginError(
            f"{where} ({entry_point.value}) failed to import: "
            f"{type(error).__name__}: {error}; fix or uninstall it"
        ) from error
    manager = pluggy.PluginManager(hookspecs.GROUP)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(module, name=entry_point.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        known = ", ".join(n for n in vars(hookspecs) if n.startswith("tpuport_"))
        raise PluginError(
            f"{where} does not fit the hooks of this tpuport: {error}; known hooks: "
            f"{known}"
        ) from error
    try:
        found = manager.hook.tpuport_model()
    except Exception as error:
        raise PluginError(
            f"{where} ({entry_point.value}) failed in tpuport_model: "
            f"{type(error).__name__}: {error}; fix or uninstall it"
        ) from error
    if len(found) != 1 or not isinstance(found[0], ModelPlugin | ModelPort):
        kinds = [type(one).__name__ for one in found]
        raise PluginError(
            f"{where} handed over {kinds or 'nothing'} from tpuport_model; one "
            "ModelPlugin is expected"
        )
    return Plugin(
        name=entry_point.name,
        package=package,
        module=entry_point.value,
        model=found[0],
    )


@cache
def installed_plugins() -> dict[str, Plugin]:
    """The plugins of the installed packages, by model name; found once per process."""
    return load_plugins(importlib.metadata.entry_points(group=hookspecs.GROUP))


def ports() -> list[ModelPort]:
    """The installed models with stages of their own."""
    from tpuport.core.spec.model_port import ModelPort

    models = [plugin.model for plugin in installed_plugins().values()]
    return [model for model in models if isinstance(model, ModelPort)]


def model_plugins() -> list[ModelPlugin]:
    """The installed plugins that upstream's pipelines run with."""
    from tpuport.core.spec.model_plugin import ModelPlugin

    models = [plugin.model for plugin in installed_plugins().values()]
    return [model for model in models if isinstance(model, ModelPlugin)]


def plugin_for(pipeline: str) -> ModelPlugin | None:
    """The installed plugin that claims an upstream pipeline class.

    Raises:
        PluginError: two plugins claim the class.
    """
    found = [model for model in model_plugins() if pipeline in model.pipelines]
    if len(found) > 1:
        names = " and ".join(model.name for model in found)
        raise PluginError(f"{pipeline} is claimed by {names}; uninstall one")
    return found[0] if found else None


def reader_of(pipeline: str) -> str | None:
    """The installed model with stages that reads checkpoints of a pipeline class."""
    for port in ports():
        if any(pipeline in form.pipelines for form in port.all_forms):
            return port.name
    return None


def reader_of_class(module: type) -> str | None:
    """The installed model that has an upstream class, or one below, as a component."""
    names = {cls.__name__ for cls in module.__mro__}
    for port in ports():
        for form in port.all_forms:
            for component in form.components.values():
                if component.class_path.partition(":")[2] in names:
                    return port.name
    for plugin in model_plugins():
        if plugin.component_of(module) is not None:
            return plugin.name
    return None


def get_model(name: str) -> ModelPlugin | ModelPort:
    """The model of a name.

    Raises:
        UnknownModelError: no plugin has that name; the message lists those there are.
    """
    plugins = installed_plugins()
    if name not in plugins:
        names = ", ".join(sorted(plugins)) or "none: reinstall tpuport"
        raise UnknownModelError(
            f"no model is called {name!r}; installed: {names}. `tpuport plugins` "
            "shows where they come from"
        )
    return plugins[name].model


def get_port(name: str) -> ModelPort:
    """The model of a name, which has stages of its own.

    Raises:
        UnknownModelError: no plugin has that name.
        UsageError: upstream's own pipeline runs the model.
    """
    from tpuport.core.spec.model_plugin import ModelPlugin

    found = get_model(name)
    if isinstance(found, ModelPlugin):
        raise UsageError(
            f"{name} is run by upstream's own pipeline: load it by diffusers, and hand "
            "it to tpuport.port()"
        )
    return found
