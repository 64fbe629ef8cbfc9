"""The cache folder: where it is, and room for a run in it."""

from __future__ import annotations

import secrets
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from tpuport.api import default_cache_dir
from tpuport.errors import OutputError


def cache_folder(asked: Path | None) -> Path:
    """The cache folder asked for or the user's own, made and known to be writable.

    Raises:
        OutputError: it cannot be made or written.
    """
    folder = asked or default_cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"the cache folder {folder} cannot be written: {error.strerror}; choose "
            "another with --cache-dir or TPUPORT_CACHE_DIR"
        ) from error
    return folder


def new_run_folder(cache: Path) -> Path:
    """The name of a fresh folder for a run that was given none; not made yet."""
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return cache / "runs" / f"{now}-{secrets.token_hex(3)}"
