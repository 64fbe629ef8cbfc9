"""Which source a program was traced from: a hash per package, by content."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpuport.core.spec.choices import implementation_of
from tpuport.core.spec.model_port import ModelPort

_OWN = __name__.partition(".")[0]

#: Parts of tpuport that no program is traced from. In a checkout the command line lies
#: elsewhere than in an installed package, so it could not be hashed alike.
_LEFT_OUT = ("cli",)

#: Told by their versions; a patch may put one of their functions in place of another.
_BY_VERSION = frozenset(
    ("diffusers", "jax", "jaxlib", "numpy", "torch", "torchax", "transformers")
)


def port_packages(port: ModelPort) -> tuple[str, ...]:
    """The packages that the code of a port comes from, tpuport's own first.

    A package that was installed under a version (diffusers, transformers) is told by
    that and not listed: see :func:`package_version`.
    """
    functions: list[Any] = []
    for form in port.all_forms:
        for stage in form.stages:
            functions += [stage.plan, *(p.fn for p in stage.programs.values())]
        functions += [patch.replacement for patch in form.patches]
        functions += [override.make for override in form.overrides]
        # Of the blocks in place: patches of native ones are among the form's.
        transforms = [t for c in form.components.values() for t in c.transforms]
        functions += [transform.apply for transform in transforms]
        chosen = [implementation_of(form, name) for name in form.components]
        functions += [found.weights for found in chosen if found is not None]
    names = {_package(function) for function in functions}
    for component in port.components.values():
        package = component.class_path.partition(":")[0].partition(".")[0]
        if package_version(package) is None:
            names.add(package)
    names -= {_OWN, "", *_BY_VERSION}
    others = sorted(name for name in names if name in sys.modules)
    return (_OWN, *others)


def upstream_versions(port: ModelPort) -> dict[str, str]:
    """The versions of the packages that the components' classes come from."""
    names = {c.class_path.partition(":")[0] for c in port.components.values()}
    found = {
        name: package_version(name) for name in {n.partition(".")[0] for n in names}
    }
    return {name: text for name, text in sorted(found.items()) if text is not None}


@functools.cache
def source_hash(package: str) -> str:
    """Sha256 over the names and contents of a package's files, or of a module's file.

    Every file counts, data as well; compiled Python does not. Found once per process:
    what runs is what was imported.
    """
    module = sys.modules[package]
    digest = hashlib.sha256()
    for name, path in sorted(_files(module)):
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _files(module: Any) -> Iterator[tuple[str, Path]]:
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    if not folders and getattr(module, "__file__", None):
        yield Path(module.__file__).name, Path(module.__file__)
    for folder in folders:
        for path in folder.rglob("*"):
            parts = path.relative_to(folder).parts
            skipped = parts[0] in _LEFT_OUT or "__pycache__" in parts
            if not skipped and path.is_file():
                yield "/".join(parts), path


def _package(function: Any) -> str:
    if isinstance(function, str):
        return function.partition(":")[0].partition(".")[0]
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__module__", None) or type(function).__module__
    return "" if name == "builtins" else str(name).partition(".")[0]


def package_version(package: str) -> str | None:
    """The version that a package was installed under, if any."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
