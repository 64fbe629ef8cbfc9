"""What is installed, read from package metadata: nothing is imported."""

from __future__ import annotations

import platform
from importlib import metadata

STACK = (
    "tpuport",
    "torch",
    "torchax",
    "jax",
    "jaxlib",
    "diffusers",
    "transformers",
)


def version(package: str) -> str | None:
    """The installed version of a package, or ``None``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions(*more: str) -> dict[str, str | None]:
    """Versions of Python, the stack and ``more`` packages."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    return found | {name: version(name) for name in (*STACK, *more)}
