"""A checkpoint of configs alone: what a plan needs of one, made without a network."""

from __future__ import annotations

import contextlib
import inspect
import json
import pkgutil
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tpuport.core.reports import Reporter
from tpuport.core.spec.demo_checkpoint import demo_checkpoint
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.spec.variant import Variant
from tpuport.core.weights.checkpoint import SMALL_FILES, Checkpoint, patterns
from tpuport.core.weights.hub import fetch

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt")


@contextlib.contextmanager
def config_checkpoint(
    port: ModelPort,
    variant: Variant,
    cache: Path,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Checkpoint]:
    """The checkpoint of a variant without its weights, for as long as this holds.

    Tokenizers and the scheduler are the demo checkpoint's. The configs of the
    components and the port's ``write_processors`` are the variant's own, so every
    module has its real size. Texts have other token counts than with the real
    tokenizers.

    Args:
        port: the form of the model that the variant is of.
        cache: where the demo checkpoint is kept.

    Raises:
        WeightsError: the cache folder cannot be written.
    """
    # The demo most like the variant: of its form, and of its task if any is.
    demos = [v for v in port.variants if not v.repo_id and v.form == variant.form]
    alike = [v for v in demos if set(variant.tasks) <= set(v.tasks)]
    demo = demo_checkpoint(
        port,
        (alike or demos)[0].name,
        cache,
        say,
        why=f"for its tokenizers and scheduler: they stand in for those of "
        f"{variant.name}, as no --weights are given",
    )
    with tempfile.TemporaryDirectory(prefix="tpuport-plan-") as name:
        folder = Path(name)
        shutil.copytree(
            demo.folder,
            folder,
            dirs_exist_ok=True,
            ignore=lambda _, names: [n for n in names if n.endswith(_WEIGHTS)],
        )
        for component, config in variant.configs.items():
            target = folder / component / "config.json"
            target.parent.mkdir(exist_ok=True)
            target.write_text(json.dumps(_config(port, component, dict(config))))
        if port.write_processors is not None:
            port.write_processors(folder, variant)
        yield Checkpoint(folder, f"configs of {variant.name}")


def hub_configs(port: ModelPort, repo_id: str, reporter: Reporter) -> Path:
    """A hub checkpoint's configs and tokenizers; its weights stay where they are.

    Raises:
        HubError: the hub cannot be reached or has no such checkpoint.
    """
    reporter.say(f"looking for the configs of {repo_id} on the hub")
    return fetch(repo_id, patterns(port.all_folders, *SMALL_FILES), reporter)


def _config(port: ModelPort, component: str, config: dict[str, Any]) -> dict[str, Any]:
    """The variant's values over the class's defaults, as a saved config has them."""
    cls = pkgutil.resolve_name(port.components[component].class_path)
    if not hasattr(cls, "from_config"):
        return dict(cls.config_class.from_dict(config).to_dict())

    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    return {"_class_name": cls.__name__, **defaults, **config}
