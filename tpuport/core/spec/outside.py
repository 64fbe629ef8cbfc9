"""Pipeline classes that are not of diffusers: what plugins claim, or the user named.

Nothing else of another package is imported because a folder names it, and no code that
lies in the folder ever is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

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
    return [one for one in (*_named, *_claims()) if not one.startswith("diffusers:")]


def claim_of(entry: Any) -> str | None:
    """The class that an index names; ``None`` if nobody claims or named it.

    Args:
        entry: ``"MyPipeline"``, or ``["my_module", "MyPipeline"]``.
    """
    module = entry[0] if isinstance(entry, list) and len(entry) == 2 else ""
    for one in _known():
        place, _, name = one.partition(":")
        if name == name_of(entry) and package_of(module or place) == package_of(place):
            return one
    return None


def name_of(entry: Any) -> str:
    """The name of a class by itself, of what an index names."""
    return str(entry[-1] if isinstance(entry, list) and entry else entry)


def package_of(module: str) -> str:
    return module.partition(".")[0]


def may_import(module: str) -> bool:
    """Whether a component's module is of a package whose pipeline is claimed."""
    return package_of(module) in {package_of(one.partition(":")[0]) for one in _known()}
