"""Finding model plugins. Built-in models come through the same door as any other."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from tpuport import hookspecs
from tpuport.core.spec import outside
from tpuport.errors import PluginError, UnknownModelError, did_you_mean

if TYPE_CHECKING:
    from tpuport.core.spec.model_plugin import ModelPlugin, Published


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
    model: ModelPlugin

    @property
    def file(self) -> Path:
        name = self.module.partition(":")[0]
        return Path(str(importlib.import_module(name).__file__))

    @property
    def sources(self) -> list[Path]:
        """The files of the package of a plugin that is not tpuport's own.

        Of a module by itself, its file.
        """
        name = self.module.partition(":")[0].partition(".")[0]
        if name == "tpuport":
            return []
        top = importlib.import_module(name)
        if not hasattr(top, "__path__"):
            return [self.file]
        return sorted(f for place in top.__path__ for f in Path(place).rglob("*.py"))


def _package(entry_point: importlib.metadata.EntryPoint) -> str:
    dist = entry_point.dist
    return f"{dist.name} {dist.version}" if dist is not None else "an unknown package"


def load_plugins(
    entry_points: Iterable[importlib.metadata.EntryPoint],
) -> dict[str, Plugin]:
    """Load plugins; returns them by model name.

    Raises:
        PluginError: a plugin fails to import, implements an unknown hook, hands over no
            ModelPlugin, fails while it does, names configs that are not there, or takes
            a model name that is taken. The message names the package.
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
    if len(found) != 1 or not isinstance(found[0], ModelPlugin):
        kinds = [type(one).__name__ for one in found]
        raise PluginError(
            f"{where} handed over {kinds or 'nothing'} from tpuport_model; one "
            "ModelPlugin is expected"
        )
    plugin = Plugin(
        name=entry_point.name,
        package=package,
        module=entry_point.value,
        model=found[0],
    )
    for name, one in plugin.model.variants.items():
        file = plugin.file.parent / one.configs
        if one.configs and not file.exists():
            raise PluginError(
                f"{where} ({entry_point.value}): variants[{name!r}]: there is no file "
                f"{file}; ship the file as package data, or uninstall the plugin"
            )
    return plugin


#: The plugin of a folder; takes the place of an installed one of the same name.
_of_a_folder: list[importlib.metadata.EntryPoint] = []


@cache
def installed_plugins() -> dict[str, Plugin]:
    """The plugins of the installed packages, by model name; found once per process."""
    names = {one.name for one in _of_a_folder}
    installed = importlib.metadata.entry_points(group=hookspecs.GROUP)
    return load_plugins(_of_a_folder + [e for e in installed if e.name not in names])


class _Source(importlib.metadata.Distribution):
    """A package that is not installed, as its ``pyproject.toml`` says."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "pyproject.toml"
        try:
            content = tomllib.loads(self.file.read_text("utf-8"))
            self.project = dict(content["project"])
            group = dict(self.project.get("entry-points", {}).get(hookspecs.GROUP, {}))
            self.folders = content.get("tool", {}).get("setuptools", {})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PluginError(
                f"{self.file} cannot be read: {type(error).__name__}: {error}; write "
                "one as `tpuport new-model` does"
            ) from None
        if len(group) > 1:
            raise PluginError(
                f"{self.file} has several plugins: {', '.join(group)}; install the "
                "package, and name one of them"
            )
        if not group:
            raise PluginError(
                f"{self.file} names no plugin; add [project.entry-points.tpuport] with "
                f'a line such as {folder.name} = "PACKAGE.plugin"'
            )
        ((self.plugin, self.value),) = group.items()
        self.top = self.value.partition(":")[0].partition(".")[0]

    def read_text(self, filename: str) -> str | None:
        """What an installed package has in files."""
        name, version = (self.project.get(n, "?") for n in ("name", "version"))
        return {
            "METADATA": f"Name: {name}\nVersion: {version}\n",
            "entry_points.txt": f"[{hookspecs.GROUP}]\n{self.plugin} = {self.value}\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Path:
        return self.folder / path

    def place(self) -> Path:
        """The folder of the package, or the file of a module by itself."""
        named = dict(self.folders.get("package-dir", {}))
        for name in (named.get("", "."), "src"):
            for found in (self.top, f"{self.top}.py"):
                if (self.folder / name / found).exists():
                    return self.folder / name / found
        if self.top not in named:
            raise PluginError(
                f"{self.file} names {self.value}, and there is no {self.top} in "
                f"{self.folder}, nor in its src; correct the name"
            )
        return self.folder / str(named[self.top])

    def make_importable(self) -> None:
        """Let Python find the package here."""
        place = self.place()
        if place.stem == self.top:
            sys.path.insert(0, str(place.parent))
            return
        module, code = ModuleType(self.top), place / "__init__.py"
        module.__path__ = [str(place)]
        if not code.is_file():
            sys.modules[self.top] = module
            return
        spec = importlib.util.spec_from_file_location(
            self.top, code, submodule_search_locations=[str(place)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[self.top] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def sources_of_folder(folder: Path) -> list[Path]:
    """The files of a package that need not be installed; none is imported.

    Raises:
        PluginError: ``pyproject.toml`` names no plugin, or several, or no package.
    """
    place = _Source(folder.resolve()).place()
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


@contextlib.contextmanager
def plugin_of_folder(folder: Path) -> Iterator[Plugin]:
    """The plugin of a package that need not be installed, for the block.

    Args:
        folder: with ``pyproject.toml``.

    Raises:
        PluginError: the file names no plugin, or several, or the plugin does not load.
    """
    source, path = _Source(folder.resolve()), [*sys.path]
    mine = [n for n in sys.modules if n.partition(".")[0] == source.top]
    before = {name: sys.modules.pop(name) for name in mine}
    _of_a_folder.extend(source.entry_points)
    installed_plugins.cache_clear()
    try:
        source.make_importable()
        known = installed_plugins().values()
        yield next(p for p in known if p.name == source.plugin)
    finally:
        _of_a_folder.clear()
        installed_plugins.cache_clear()
        sys.path[:] = path
        for name in [n for n in sys.modules if n.partition(".")[0] == source.top]:
            del sys.modules[name]
        sys.modules.update(before)


def model_plugins() -> list[ModelPlugin]:
    """What the installed plugins hand over."""
    return [plugin.model for plugin in installed_plugins().values()]


outside.claimed_by(lambda: [one for m in model_plugins() for one in m.outside])


def plugin_for(pipeline: str) -> ModelPlugin | None:
    """The installed plugin that claims an upstream pipeline class.

    Args:
        pipeline: a name in diffusers, or ``"package.module:Class"``.

    A plugin of another package takes the place of one of tpuport's own.

    Raises:
        PluginError: two plugins claim the class.
    """
    claim = pipeline if ":" in pipeline else f"{outside.DIFFUSERS}:{pipeline}"
    found = [model for model in model_plugins() if claim in model.claimed]
    if len(found) > 1:
        known = installed_plugins()
        found = [m for m in found if not known[m.name].module.startswith("tpuport.")]
    if len(found) > 1:
        names = " and ".join(model.name for model in found)
        raise PluginError(f"{pipeline} is claimed by {names}; uninstall one")
    return found[0] if found else None


def plugin_for_module(module: type) -> ModelPlugin | None:
    """The installed plugin that knows an upstream class, or one below."""
    for plugin in model_plugins():
        if plugin.component_of(module) is not None:
            return plugin
    return None


def find_plugin(model: str) -> Plugin | None:
    """The installed plugin of a model; ``None`` if there is none of the name."""
    return installed_plugins().get(model)


def folder_of(model: str) -> Path:
    """The folder of the module of an installed plugin."""
    return installed_plugins()[model].file.parent


def configs_of(plugin: ModelPlugin, variant: Published) -> Mapping[str, Any]:
    """The configs of a variant of an installed plugin, by component.

    Raises:
        PluginError: they cannot be read; the message names plugin and variant.
    """
    try:
        return variant.read(folder_of(plugin.name))
    except PluginError as error:
        name = next(n for n, one in plugin.variants.items() if one is variant)
        raise PluginError(
            f"plugin {plugin.name}: variants[{name!r}]: {error}"
        ) from error


def get_model(name: str) -> ModelPlugin:
    """The model of a name.

    Raises:
        UnknownModelError: no plugin has that name; the message lists those there are.
    """
    plugins = installed_plugins()
    if name not in plugins:
        names = ", ".join(sorted(plugins)) or "none: reinstall tpuport"
        more = "`tpuport plugins` shows where they come from"
        raise UnknownModelError(
            f"no model is called {name!r}; installed: {names}. "
            f"{did_you_mean(name, plugins, more)}"
        )
    return plugins[name].model
