"""``--model`` and ``--variant`` of a plugin: a folder or hub id, and defaults."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.cli.asked.environment import DEFAULT_MODEL, cache_folder, import_libraries
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown.output import say
from tpuport.core.enums import Backend
from tpuport.core.files.folders import made_once
from tpuport.core.reports import Reporter
from tpuport.core.spec import outside
from tpuport.core.spec.model_plugin import ModelPlugin, Published
from tpuport.core.spec.run_settings import DEMO, read_value
from tpuport.core.weights.hub import local_folder, read_index
from tpuport.errors import UsageError
from tpuport.plugins import configs_of, folder_of, get_model, model_plugins, plugin_for

if TYPE_CHECKING:
    from tpuport.core.pipelines.folder import PipelineFolder

#: The shape, width by height, that size classes are named by: 720p is 1280x720.
NAMED = 16 / 9


NO_PROMPT = (
    "--prompt is missing; say what to show, such as "
    '--prompt "a red fox in the snow", or give --prompt-file'
)


def check_model(settings: Settings, *, prompt: bool = True) -> None:
    """Refuse names that the model does not have, before torch and jax are imported.

    Of weights at the hub, or without a plugin, less is known before. A pipeline with a
    tokenizer takes a prompt: so do all of diffusers that make videos.

    Args:
        prompt: whether the run needs one.

    Raises:
        UsageError: there is no such model, variant, layout or autoencoder, or no
            prompt.
    """
    plugin, index = _known(settings)
    if plugin is not None:
        if settings.backend != Backend.DIFFUSERS:
            plugin.check_forms({"vae": settings.vae})
        plugin.check_layout(settings.sharding)
    names = [name for name, kind in index.items() if kind != [None, None]]
    takes = any(name.startswith("tokenizer") for name in names)
    if prompt and takes and not settings.prompt:
        raise UsageError(NO_PROMPT)


def _known(settings: Settings) -> tuple[ModelPlugin | None, Mapping[str, Any]]:
    """The plugin of the model, and the pipeline's index, as far as files here say."""
    plugin = None
    if settings.model is not None:
        plugin = read_value(get_model, settings.model, "--model")
    if settings.weights in (None, DEMO):
        plugin = plugin or get_model(DEFAULT_MODEL)
        _, one = read_value(plugin.variant, settings.variant, "--variant")
        return plugin, _index_of(plugin, one)
    assert settings.weights is not None
    if (folder := local_folder(settings.weights)) is not None:
        _, index = read_index(folder)
        return plugin or plugin_for(outside.claim_of(index.get("_class_name"))), index
    source = str(settings.weights)
    for known in model_plugins():
        for one in known.variants.values():
            if one.repo == source:
                return plugin or known, _index_of(known, one)
    return plugin, {}


def _index_of(plugin: ModelPlugin, one: Published) -> Mapping[str, Any]:
    return configs_of(plugin, one)["model_index"] if one.configs else {}


def with_model(settings: Settings, *, weights: bool = True) -> Settings:
    """The settings with a folder or a hub id in place of a model and its variant.

    Without a model and weights the default model is taken. A hub id that a plugin
    publishes has the defaults of the variant.

    Args:
        weights: of a variant are wanted; without, its configs are enough.
    """
    if settings.weights == DEMO:
        settings = replace(settings, weights=None)
    if settings.model is not None:
        plugin = read_value(get_model, settings.model, "--model")
        folder = _folder_of(settings) if settings.weights else None
        if folder is not None and folder.claim not in plugin.claimed:
            raise UsageError(
                f"--model {plugin.name} does not know the {folder.class_name} of "
                f"{settings.weights}; leave the flag out"
            )
        return resolved(settings, plugin, weights=weights)
    if settings.weights is None:
        return resolved(settings, get_model(DEFAULT_MODEL), weights=weights)
    source = str(settings.weights)
    if settings.variant is None:
        for plugin in model_plugins():
            for name, one in plugin.variants.items():
                if one.repo == source:
                    named = replace(settings, variant=name)
                    return resolved(named, plugin, weights=weights)
        return settings
    folder = _folder_of(settings)
    known = plugin_for(folder.claim)
    if known is None:
        raise UsageError(
            f"--variant {settings.variant}: no plugin knows {folder.class_name} of "
            f"{source}; leave the flag out"
        )
    return resolved(settings, known, weights=weights)


def _folder_of(settings: Settings) -> PipelineFolder:
    """The folder that the weights name; its index alone is fetched."""
    assert settings.weights is not None
    import_libraries(Reporter())
    from tpuport.core.pipelines.folder import PipelineFolder

    kept = cache_folder(settings.cache_dir), settings.cache_store
    return PipelineFolder.find(settings.weights, Reporter(), *kept)


def resolved(
    settings: Settings, plugin: ModelPlugin, *, weights: bool = True
) -> Settings:
    """:func:`with_model` of a plugin's model."""
    if settings.weights is not None and settings.variant is None:
        return replace(settings, model=None)
    name, published = _variant(settings, plugin)
    settings = _with_defaults(settings, plugin, published)
    source = settings.weights
    if source is None:
        source = _source(settings, plugin.name, name, published, weights=weights)
    say(f"{plugin.name} {name}: {source}")
    return replace(settings, model=None, variant=None, weights=source)


def _source(
    settings: Settings, model: str, variant: str, published: Published, *, weights: bool
) -> str | Path:
    """Where a variant lies: in the package, in the cache, or at the hub."""
    if published.configs:
        if shipped := published.folder(folder_of(model)):
            return shipped
        if not weights:
            return _made(settings, model, variant, published, "configs")
    return published.repo or _made(settings, model, variant, published, DEMO)


def _made(
    settings: Settings, model: str, variant: str, published: Published, kind: str
) -> Path:
    """A folder of the cache, made of configs; ``kind`` demo has random weights."""
    configs = configs_of(get_model(model), published)
    content = json.dumps(configs, sort_keys=True).encode()
    mark = hashlib.sha256(content).hexdigest()[:8]
    folder = cache_folder(settings.cache_dir) / kind / f"{model}-{variant}-{mark}"
    import_libraries(Reporter())
    from tpuport.core.pipelines.stand_in import write_configs, write_random

    write: Callable[..., None] = write_random if kind == DEMO else write_configs
    what = f"making a folder of {kind} of {model} {variant} in {folder}"
    made_once(folder, lambda place: write(place, configs), what, say)
    return folder


def _variant(settings: Settings, plugin: ModelPlugin) -> tuple[str, Published]:
    """The variant asked for; by default the first one for the image or video given."""
    name, published = read_value(plugin.variant, settings.variant, "--variant")
    given = [f for f in ("image", "video") if getattr(settings, f) is not None]
    fitting = [(name, published)]
    if settings.variant is None:
        fitting = list(plugin.variants.items())
    for one in fitting:
        if not given or not one[1].configs or _class_of(settings, plugin, one[1]):
            return one
    flags = " and ".join(f"--{field}" for field in given)
    raise UsageError(f"{flags}: {plugin.name} {name} takes none")


def _class_of(settings: Settings, plugin: ModelPlugin, one: Published) -> Any:
    """The pipeline class that configs of a variant are run as; ``None`` without one."""
    import_libraries(Reporter())
    from tpuport.core.pipelines.call_arguments import media_of
    from tpuport.core.pipelines.folder import class_taking

    configs = configs_of(plugin, one)
    index, transformer = configs["model_index"], configs.get("transformer", {})
    return class_taking(plugin, index, transformer, media_of(settings))


def _with_defaults(
    settings: Settings, plugin: ModelPlugin, published: Published
) -> Settings:
    """The settings with what a variant is published with, where nothing was given."""
    known = {field.name for field in fields(settings)}
    given: dict[str, Any] = {}
    options = dict(settings.options)
    if settings.aspect_ratio is not None and settings.resolution is None:
        settings = replace(settings, resolution=class_of_size(published.defaults))
    by_class = settings.resolution is not None or settings.aspect_ratio is not None
    for name, value in published.defaults.items():
        if by_class and name in ("height", "width"):
            continue
        if name not in known:
            options.setdefault(name, value)
        elif getattr(settings, name) is None:
            given[name] = value
    if settings.video is not None and published.configs and "num_frames" in given:
        from tpuport.core.pipelines.call_arguments import PARAMETERS
        from tpuport.core.pipelines.folder import takes

        cls = _class_of(settings, plugin, published)
        frames = {"num_frames": PARAMETERS["num_frames"]}
        if cls is not None and not takes(cls, frames):
            del given["num_frames"]  # the video has as many as are made
    return replace(settings, options=options, **given)


def class_of_size(sides: Mapping[str, Any]) -> str | None:
    """The class of a height and a width; ``None`` if these are not given."""
    if not {"height", "width"} <= sides.keys():
        return None
    return f"{round(math.sqrt(sides['height'] * sides['width'] / NAMED))}p"
