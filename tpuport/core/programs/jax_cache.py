"""Compiling programs, and the persistent cache that spares most of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from jax.experimental.compilation_cache import compilation_cache

_SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_hlo_source_file_canonicalization_regex",
    "jax_persistent_cache_enable_xla_caches",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_min_compile_time_secs",
)

#: jax's own cache, in the folder of the compile cache.
XLA_FOLDER = "xla"

_HIT_EVENT = "/jax/compilation_cache/cache_hits"
_hits = 0
_listening = False
_lock = threading.Lock()


@contextlib.contextmanager
def persistent_cache(folder: Path | None) -> Iterator[None]:
    """Compiled programs are kept in ``folder`` while this holds; ``None`` leaves jax as
    it is set.

    Small and quick programs are kept too: the decoder's many small ones are what a warm
    start would otherwise wait for. The key of an entry does not depend on where
    ``folder`` and tpuport lie, so that an entry made on one machine is found on another
    with the same software. Settings are put back on exit.

    Raises:
        OSError: the folder cannot be made.
    """

    if folder is None:
        yield
        return
    _listen()
    folder.mkdir(parents=True, exist_ok=True)
    before = {name: getattr(jax.config, name) for name in _SETTINGS}
    try:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        # By default the folder's own path is in the key, for a GPU autotuner's cache.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
        # A kernel carries the paths of the source it was traced from.
        jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*")
        # jax opens its cache once and keeps the folder it had then.
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Programs are compiled by the compiler while this holds, whatever is cached."""

    before = jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def cache_hits() -> int:
    """How many programs came out of the persistent cache in this process so far."""
    return _hits


def _listen() -> None:
    """Count cache hits from now on; once per process."""
    global _listening

    with _lock:
        if not _listening:
            jax.monitoring.register_event_listener(_on_event)
            _listening = True


def _on_event(event: str, **kwargs: Any) -> None:
    global _hits
    if event == _HIT_EVENT:
        _hits += 1
