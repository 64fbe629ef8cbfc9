"""Finding model plugins. Built-in models come through the same door as any other."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pluggy

from tpuport import hookspecs
from tpuport.errors import PluginError, UnknownModelError

if TYPE_CHECKING:
    from tpuport.core.spec.model_port import ModelPort


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """One loaded plugin.

    Attributes:
        name: of its entry point.
        package: the distribution it comes from, with its version.
        module: the module that implements the hooks.
        port: the model it hands over.
    """

    name: str
    package: str
    module: str
    port: ModelPort


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
        other = plugins.get(plugin.port.name)
        if other is not None:
            raise PluginError(
                f"two plugins are called {plugin.port.name!r}: {other.module} of "
                f"{other.package} and {plugin.module} of {plugin.package}; uninstall "
                "one"
            )
        plugins[plugin.port.name] = plugin
    return plugins


def _load(entry_point: importlib.metadata.EntryPoint) -> Plugin:
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
        ports = manager.hook.tpuport_model()
    except Exception as error:
        raise PluginError(
            f"{where} ({entry_point.value}) failed in tpuport_model: "
            f"{type(error).__name__}: {error}; fix or uninstall it"
        ) from error
    if len(ports) != 1 or not isinstance(ports[0], ModelPort):
        found = [type(port).__name__ for port in ports]
        raise PluginError(
            f"{where} handed over {found or 'nothing'} from tpuport_model; one "
            "ModelPort is expected"
        )
    return Plugin(
        name=entry_point.name,
        package=package,
        module=entry_point.value,
        port=ports[0],
    )


@cache
def installed_plugins() -> dict[str, Plugin]:
    """The plugins of the installed packages, by model name; found once per process."""
    return load_plugins(importlib.metadata.entry_points(group=hookspecs.GROUP))


def reader_of(pipeline: str) -> str | None:
    """The installed model that reads checkpoints of an upstream pipeline class."""
    for name, plugin in installed_plugins().items():
        if any(pipeline in form.pipelines for form in plugin.port.all_forms):
            return name
    return None


def reader_of_class(module: type) -> str | None:
    """The installed model that has an upstream class, or one below, as a component."""
    names = {cls.__name__ for cls in module.__mro__}
    for name, plugin in installed_plugins().items():
        for form in plugin.port.all_forms:
            for component in form.components.values():
                if component.class_path.partition(":")[2] in names:
                    return name
    return None


def get_port(model: str) -> ModelPort:
    """The port of a model.

    Raises:
        UnknownModelError: no plugin has that name; the message lists those there are.
    """
    plugins = installed_plugins()
    if model not in plugins:
        names = ", ".join(sorted(plugins)) or "none: reinstall tpuport"
        raise UnknownModelError(
            f"no model is called {model!r}; installed: {names}. `tpuport plugins` "
            "shows where they come from"
        )
    return plugins[model].port
