"""Pipeline classes that are not of diffusers: what plugins claim, or the user named.

A claim is ``"package.module:Class"``. Nothing else of another package is imported
because a folder names it, and no code that lies in the folder ever is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from tpuport.core.spec.component import import_named

DIFFUSERS = "diffusers"
_claims: Callable[[], Iterable[str]] = tuple
_named: set[str] = set()


def claimed_by(claims: Callable[[], Iterable[str]]) -> None:
    """Tell what installed plugins claim: each a ``"package.module:Class"``."""
    global _claims
    _claims = claims


def named(claim: str) -> None:
    """Tell what the user named."""
    _named.add(claim)


def _known() -> list[str]:
    return [one for one in (*_named, *_claims()) if package_of(one) != DIFFUSERS]


def claimed(claim: str) -> bool:
    """Whether a plugin claims the class, or the user named it."""
    return claim in _known()


def canonical(claim: str) -> str:
    """A claim, of diffusers' own classes always as ``"diffusers:Class"``."""
    place, _, name = claim.partition(":")
    return f"{DIFFUSERS}:{name}" if package_of(place) == DIFFUSERS else claim


def claim_of(entry: Any) -> str:
    """The claim that is on the class that an index names, if any is.

    A name alone is that of diffusers' class, if there is one; else that of a class that
    is claimed.

    Args:
        entry: ``"MyPipeline"``, or ``["my_module", "MyPipeline"]``.
    """
    if isinstance(entry, list):
        return ":".join(map(str, entry))
    found = [one for one in _known() if one.partition(":")[2] == entry]
    if found and entry not in dir(importlib.import_module(DIFFUSERS)):
        return found[0]
    return f"{DIFFUSERS}:{entry}"


def claim_on(kind: type) -> str:
    """The claim that is on a class, if any is; its module may name the class again."""
    own = canonical(f"{kind.__module__}:{kind.__qualname__}")
    for one in _known():
        alike = package_of(one) == package_of(own) and one.endswith(f":{kind.__name__}")
        if alike and import_named(one) is kind:
            return one
    return own


def entry_of(claim: str) -> str | list[str]:
    """What an index names a class by: see :func:`claim_of`."""
    place, _, name = canonical(claim).partition(":")
    return name if place == DIFFUSERS else [place, name]


def name_of(entry: Any) -> str:
    """The name of a class by itself, of what an index names."""
    return str(entry[-1] if isinstance(entry, list) and entry else entry)


def package_of(module: str) -> str:
    """The package of a module, or of a claim."""
    return module.partition(":")[0].partition(".")[0]


def module_named(name: str) -> ModuleType | None:
    """The module of a component: one that claimed classes of its package come with.

    Claimed classes of the package are imported, and nothing else.

    Raises:
        PluginError: one cannot be imported.
    """
    claims = [one for one in _known() if package_of(one) == package_of(name)]
    for one in claims:
        import_named(one)
    return sys.modules.get(name) if claims else None
