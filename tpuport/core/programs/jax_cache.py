"""jax's own persistent cache of compiled programs, on and off for a block.

Entries have the names that jax gives files. An entry appears whole or not at all, in a
folder as in a store: jax's own class leaves half an entry where a process ends, and
never replaces it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.monitoring
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface

from tpuport.core.files.atomic import atomic_write_bytes, cannot_write
from tpuport.core.files.stores import AnyPath, StorePath
from tpuport.errors import StoreError

#: A kernel carries the paths of the source it was traced from.
_PATHS = {"jax_hlo_source_file_canonicalization_regex": ".*"}
#: Small and quick programs are kept too: the decoder's many small ones are what a warm
#: start would otherwise wait for.
_SETTINGS = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_min_compile_time_secs": 0,
    # By default the folder's own path is in the key, for a GPU autotuner's cache.
    "jax_persistent_cache_enable_xla_caches": "none",
    **_PATHS,
}

#: jax's own cache, in the folder of the compile cache.
XLA_FOLDER = "xla"

_hits = 0


@dataclass(eq=False)
class _Programs(CacheInterface):
    """Programs in a folder, on this machine or in a store.

    Attributes:
        failures: what a store refused. jax warns of what the folder's disk refused.
    """

    _path: Any
    failures: list[str] = field(default_factory=list)

    def get(self, key: str) -> bytes | None:
        try:
            found: bytes = (self._path / f"{key}-cache").read_bytes()
            return found
        except FileNotFoundError:
            return None
        except StoreError as error:
            self.failures.append(str(error))
            return None

    def put(self, key: str, value: bytes) -> None:
        """Also in place of an entry that jax could not read."""
        entry = self._path / f"{key}-cache"
        if isinstance(entry, Path):
            atomic_write_bytes(entry, value)
            return
        try:
            entry.write_bytes(value)
        except StoreError as error:
            self.failures.append(str(error))


@contextlib.contextmanager
def persistent_cache(folder: AnyPath | None) -> Iterator[list[str]]:
    """Compiled programs are kept in ``folder`` while this holds; ``None`` leaves jax as
    it is set.

    The key of an entry does not depend on where ``folder`` and tpuport lie. Another
    machine with equal software finds the entry. Settings are put back on exit.

    Yields:
        what a store refused: such programs are compiled, and not kept.

    Raises:
        ArtifactError: the folder cannot be made.
    """
    if folder is None:
        yield []
        return
    if isinstance(folder, StorePath):
        name = f"{folder.scheme}:{folder.key}"  # no address, which jax would open
    else:
        name = str(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
    with _opened(name, found := _Programs(folder)):
        yield found.failures


@contextlib.contextmanager
def _opened(name: str, cache: _Programs) -> Iterator[None]:
    """jax opens this cache, in this block and after blocks within."""
    open_folder = compilation_cache.get_file_cache

    def opened(path: str) -> Any:
        return (cache, path) if path == name else open_folder(path)

    with (
        mock.patch.object(compilation_cache, "get_file_cache", opened),
        _set({**_SETTINGS, "jax_compilation_cache_dir": name}),
    ):
        yield


def lowered(traced: jax.stages.Traced) -> jax.stages.Lowered:
    """What is compiled, with no path of a source file in it."""
    with _set(_PATHS):
        return traced.lower()


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Programs are compiled by the compiler while this holds, whatever is cached."""
    with _set({"jax_enable_compilation_cache": False}):
        yield


@contextlib.contextmanager
def _set(settings: Mapping[str, Any]) -> Iterator[None]:
    """Settings of jax that hold in this block."""
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        # jax opens its cache once and keeps the folder that the cache had then.
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def cache_hits() -> int:
    """How many programs came out of the persistent cache in this process so far."""
    return _hits


def _on_event(event: str, **kwargs: Any) -> None:
    global _hits
    if event == "/jax/compilation_cache/cache_hits":
        _hits += 1


jax.monitoring.register_event_listener(_on_event)
