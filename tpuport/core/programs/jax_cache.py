"""jax's own persistent cache of compiled programs, on and off for a block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from jax.experimental.compilation_cache import compilation_cache

from tpuport.core.files.atomic import cannot_write

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


@contextlib.contextmanager
def persistent_cache(folder: Path | None) -> Iterator[None]:
    """Compiled programs are kept in ``folder`` while this holds; ``None`` leaves jax as
    it is set.

    The key of an entry does not depend on where ``folder`` and tpuport lie. Another
    machine with equal software finds the entry. Settings are put back on exit.

    Raises:
        ArtifactError: the folder cannot be made.
    """
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    with _set({**_SETTINGS, "jax_compilation_cache_dir": str(folder)}):
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
