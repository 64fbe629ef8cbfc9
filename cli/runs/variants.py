"""``--model`` and ``--variant`` of a plugin: a folder or hub id, and defaults."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tpuport import api
from tpuport.cli.asked.cache_folder import cache_folder
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import say
from tpuport.core.reports import Reporter
from tpuport.core.spec.demo_checkpoint import made_once
from tpuport.core.spec.model_plugin import ModelPlugin
from tpuport.core.spec.run_settings import DEMO
from tpuport.plugins import get_model


def of_plugin(settings: Settings) -> ModelPlugin | None:
    """The plugin that ``--model`` names, if upstream's pipeline runs the model.

    Raises:
        UnknownModelError: no plugin has that name.
    """
    found = None if settings.model is None else get_model(settings.model)
    return found if isinstance(found, ModelPlugin) else None


def resolved(
    settings: Settings, plugin: ModelPlugin, *, weights: bool = True
) -> Settings:
    """The settings with a folder or a hub id in place of a model and its variant.

    Args:
        weights: of the variant are wanted; without, its configs are enough.

    Raises:
        UnknownModelError: the plugin has no such variant.
        PluginError: the configs of the variant cannot be read.
        WeightsError: the cache folder cannot be written.
    """
    if settings.weights not in (None, "", DEMO) and settings.variant is None:
        return replace(settings, model=None)
    name, published = plugin.variant(settings.variant)
    settings = _with_defaults(settings, published.defaults)
    source: str | Path | None = settings.weights
    if source in (None, "", DEMO):
        source = published.repo
        if not weights and published.configs:
            source = _made(settings, plugin.name, name, published.read(), "configs")
        elif not published.repo:
            source = _made(settings, plugin.name, name, published.read(), DEMO)
    say(f"{plugin.name} {name}: {source}")
    return replace(settings, model=None, variant=None, weights=source)


def _made(
    settings: Settings, model: str, variant: str, configs: Mapping[str, Any], kind: str
) -> Path:
    """A folder of the cache, made of configs; ``kind`` demo has random weights."""
    content = json.dumps(configs, sort_keys=True).encode()
    mark = hashlib.sha256(content).hexdigest()[:8]
    folder = cache_folder(settings.cache_dir) / kind / f"{model}-{variant}-{mark}"
    with signals.starting(before="\n"):
        api.import_libraries(Reporter())
    from tpuport.core.pipelines.stand_in import write_configs, write_random

    write: Callable[..., None] = write_random if kind == DEMO else write_configs
    what = f"making a folder of {kind} of {model} {variant} in {folder}"
    made_once(folder, lambda place: write(place, configs), what, say)
    return folder


def _with_defaults(settings: Settings, defaults: Mapping[str, Any]) -> Settings:
    """The settings with what a variant is published with, where nothing was given."""
    known = {field.name for field in fields(settings)}
    given: dict[str, Any] = {}
    options = dict(settings.options)
    for name, value in defaults.items():
        if name not in known:
            options.setdefault(name, value)
        elif getattr(settings, name) is None:
            given[name] = value
    return replace(settings, options=options, **given)
