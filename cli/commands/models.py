"""``tpuport models``: what can be run."""

from __future__ import annotations

from typing import Any

from tpuport.api import DEFAULT_MODEL
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown.output import print_json
from tpuport.cli.shown.tables import columns
from tpuport.core.spec.choices import names_of
from tpuport.core.spec.model_plugin import ModelPlugin
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.spec.step_cache import METHODS
from tpuport.core.spec.variant import Variant
from tpuport.plugins import model_plugins
from tpuport.plugins import ports as known_ports

_HEAD = (
    *("MODEL", "VARIANT", "FROM", "SIZE", "FRAMES", "FPS", "STEPS", "GUIDANCE"),
    "OPTIONS",
)

#: What the document has of a variant as it is.
_TOLD = (
    *("title", "height", "width", "num_frames", "fps", "num_inference_steps"),
    *("guidance_scale", "dtype", "options", "notes", "tasks", "form"),
)

#: Task -> what a video is made from.
_FROM = {"t2v": "text", "i2v": "image", "v2v": "video"}


@command("models")
def models(settings: Settings) -> None:
    """List the installed models, their variants and defaults.

    Example: tpuport models
    """
    ports, plugins = known_ports(), model_plugins()
    if settings.json:
        documents = [*map(_document, ports), *map(_plugin_document, plugins)]
        print_json({"models": documents})
        return
    rows: list[tuple[str, ...]] = [_HEAD]
    rows += [_row(port, variant) for port in ports for variant in port.variants]
    print("\n".join(columns(rows)))
    print(f"\nwithout --model: {DEFAULT_MODEL}")
    for port in ports:
        print(f"\n{port.name}: {port.title}")
        print("\n".join(columns([_about(v) for v in port.variants], indent="  ")))
        for option in port.options:
            choices = f" ({', '.join(option.choices)})" if option.choices else ""
            print(f"  --option {option.name}=...: {option.help}{choices}")
        if sizes := dict.fromkeys(n for v in port.variants for n in v.resolutions):
            print(f"  --resolution: {', '.join(sizes)}, with --aspect-ratio W:H")
        if any(len(form.layouts) > 1 for form in port.all_forms):
            print(f"  --sharding: {', '.join(port.layouts)}")
        for component, names in _implementations(port).items():
            print(f"  --{component}: {', '.join(names)}")
        if any(c.split for f in port.all_forms for c in f.components.values()):
            print(f"  --cache: {', '.join(METHODS)}; see docs/step-caching.md")
    for plugin in plugins:
        print(f"\n{plugin.name}: {plugin.title or ', '.join(plugin.pipelines)}")
        print("\n".join(columns(_published(plugin), indent="  ")))
        if len(plugin.layouts) > 1:
            print(f"  --sharding: {', '.join(plugin.layouts)}")


def _published(plugin: ModelPlugin) -> list[tuple[str, str, str]]:
    """Name, hub id and title of each variant."""
    return [
        (name, one.repo or "built in", one.title)
        for name, one in plugin.variants.items()
    ]


def _plugin_document(plugin: ModelPlugin) -> dict[str, Any]:
    return {
        "model": plugin.name,
        "title": plugin.title,
        "pipelines": list(plugin.pipelines),
        "sharding": list(plugin.layouts),
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


def _row(port: ModelPort, variant: Variant) -> tuple[str, ...]:
    options = " ".join(f"{k}={_plain(v)}" for k, v in variant.options.items())
    return (
        port.name,
        variant.name,
        "+".join(_FROM[task] for task in variant.tasks),
        f"{variant.width}x{variant.height}",
        str(variant.num_frames),
        f"{variant.fps:g}",
        str(variant.num_inference_steps),
        f"{variant.guidance_scale:g}",
        options,
    )


def _implementations(port: ModelPort) -> dict[str, tuple[str, ...]]:
    """Of every component that has a choice."""
    return {
        name: names_of(component)
        for form in port.all_forms
        for name, component in form.components.items()
        if component.implementations
    }


def _about(variant: Variant) -> tuple[str, str, str]:
    text = variant.title + (f"; {variant.notes}" if variant.notes else "")
    return variant.name, variant.repo_id or "built in", text


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _document(port: ModelPort) -> dict[str, Any]:
    return {
        "model": port.name,
        "title": port.title,
        "sharding": list(port.layouts),
        "implementations": {n: list(v) for n, v in _implementations(port).items()},
        "options": [
            {"name": o.name, "help": o.help, "choices": list(o.choices)}
            for o in port.options
        ],
        "variants": [
            {
                "variant": v.name,
                "repo_id": v.repo_id or None,
                **{name: getattr(v, name) for name in _TOLD},
                "resolutions": list(v.resolutions),
            }
            for v in port.variants
        ],
    }
