"""``tpuport models`` and ``tpuport plugins``: what is known, and its packages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tpuport.cli.asked.environment import DEFAULT_MODEL
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown.output import give_out
from tpuport.cli.shown.tables import columns
from tpuport.core.spec.component import TORCHAX
from tpuport.core.spec.model_plugin import ModelPlugin
from tpuport.plugins import installed_plugins, model_plugins


@command("models")
def models(settings: Settings) -> None:
    """List the installed models, their variants and defaults.

    --weights takes any other pipeline of diffusers too.

    Example: tpuport models
    """
    document = {"models": [_document(plugin) for plugin in model_plugins()]}
    give_out(document, as_json=settings.json, text=_text())


def _text() -> Iterator[str]:
    for plugin in model_plugins():
        title = plugin.title or ", ".join(plugin.pipelines)
        default = ", the default" if plugin.name == DEFAULT_MODEL else ""
        yield f"{plugin.name}: {title}{default}"
        rows = [("VARIANT", "WEIGHTS", "TITLE", "DEFAULTS"), *_published(plugin)]
        yield from columns(rows, indent="  ")
        for flag, names in _named(plugin).items():
            yield f"  {flag}: {', '.join(names)}"
        yield ""
    yield "any other pipeline of diffusers: --weights ID|FOLDER"


@command("plugins")
def plugins(settings: Settings) -> None:
    """List the installed plugins.

    Example: tpuport plugins
    """
    keys = ("name", "package", "module", "model")
    found = [
        (plugin.name, plugin.package, plugin.module, plugin.model.name)
        for plugin in installed_plugins().values()
    ]
    document = {"plugins": [dict(zip(keys, row, strict=True)) for row in found]}
    text = columns([[key.upper() for key in keys], *found])
    give_out(document, as_json=settings.json, text=text)


def _published(plugin: ModelPlugin) -> list[tuple[str, ...]]:
    return [
        (
            name,
            one.repo or "small, random",
            one.title,
            " ".join(f"{key}={value}" for key, value in one.defaults.items()),
        )
        for name, one in plugin.variants.items()
    ]


def _named(plugin: ModelPlugin) -> dict[str, tuple[str, ...]]:
    """What flags take that plugins have names for, where there is a choice."""
    module = plugin.modules.get("vae")
    forms = (TORCHAX, *module.forms) if module else ()
    found = {"--sharding": plugin.layouts, "--vae": forms}
    return {flag: names for flag, names in found.items() if len(names) > 1}


def _document(plugin: ModelPlugin) -> dict[str, Any]:
    return {
        "model": plugin.name,
        "title": plugin.title,
        "pipelines": list(plugin.pipelines),
        "sharding": list(plugin.layouts),
        "vae": list(_named(plugin).get("--vae", ())),
        "variants": [
            {
                "variant": name,
                "repo_id": one.repo or None,
                "title": one.title,
                "defaults": dict(one.defaults),
            }
            for name, one in plugin.variants.items()
        ],
    }
