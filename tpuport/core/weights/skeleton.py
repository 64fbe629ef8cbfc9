"""Upstream's class built from a config without weights; weight names in files."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from tpuport.core.weights.configs import building
from tpuport.errors import damaged


class StoredModule(Protocol):
    """The facts of a component that find its class and its weights.

    Attributes:
        name: the component's folder in the checkpoint.
        class_path: ``"package:Class"``, the upstream class.
        stored_prefix: a prefix that stored names may have before the class's names.
        ignored: regexes of stored names that upstream's loader ignores too.
    """

    @property
    def name(self) -> str: ...
    @property
    def class_path(self) -> str: ...
    @property
    def stored_prefix(self) -> str: ...
    @property
    def ignored(self) -> tuple[str, ...]: ...


def build_skeleton(
    component: StoredModule, config: Mapping[str, Any]
) -> torch.nn.Module:
    """The upstream module with parameters on the meta device and buffers computed.

    A full-size model then takes no memory for its weights. Upstream's own constructor
    computes the non-persistent buffers (position tables).

    Raises:
        WeightsError: the config does not build the class.
    """
    from accelerate import init_empty_weights

    cls = pkgutil.resolve_name(component.class_path)
    with (
        init_empty_weights(include_buffers=False),
        building(cls.__name__, f"{component.name}/config.json"),
    ):
        if hasattr(cls, "from_config"):
            module = cls.from_config(dict(config))
        else:
            module = cls(cls.config_class.from_dict(dict(config)))
    assert isinstance(module, torch.nn.Module)
    if hasattr(module, "tie_weights"):
        # Moving each parameter to meta separately unties tied parameters.
        module.tie_weights()
    return module.eval()


def match_names(
    source: str,
    component: StoredModule,
    stored: Mapping[str, Any],
    tied: Mapping[str, str],
    expected: Sequence[str],
) -> dict[str, str]:
    """Expected weight name -> name in the files. A tied weight may have either name;
    any name may have the prefix of the component.

    Raises:
        WeightsError: a tensor is missing or extra; the message names it.
    """
    aliases: dict[str, list[str]] = {name: [name] for name in expected}
    for alias, name in tied.items():
        if name in aliases:
            aliases[name].append(alias)
    if component.stored_prefix:
        for names in aliases.values():
            names += [component.stored_prefix + name for name in names]
    found = {
        name: next(candidate for candidate in candidates if candidate in stored)
        for name, candidates in aliases.items()
        if not stored.keys().isdisjoint(candidates)
    }
    missing = [name for name in expected if name not in found]
    known = {c for candidates in aliases.values() for c in candidates}
    extra = [
        name
        for name in stored
        if name not in known
        and not any(re.fullmatch(pattern, name) for pattern in component.ignored)
    ]
    if missing or extra:
        raise damaged(
            f"{source}: {component.name}/ does not fit its config.json: "
            + "; ".join(
                f"{label} tensor {names[0]}"
                + (f" and {len(names) - 1} more" if len(names) > 1 else "")
                for label, names in (("missing", missing), ("extra", extra))
                if names
            ),
            "the folder",
        )
    return found


def is_used(used: Sequence[str], name: str) -> bool:
    """Whether one of the regexes ``used`` matches the weight's name."""
    return any(re.fullmatch(pattern, name) for pattern in used)
