"""The cache folder: where it is."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tpuport.api import default_cache_dir
from tpuport.core.files.atomic import cannot_write, no_room
from tpuport.core.files.folders import check_folder
from tpuport.core.spec.run_settings import COMPILED, DEMO
from tpuport.errors import OutputError

#: The folders in the cache folder that commands write to.
_FOLDERS = (COMPILED, DEMO, "runs", "kernels", "schedules")


def cache_folder(asked: Path | None) -> Path:
    """The cache folder asked for or the user's own, made and known to be writable."""
    folder = asked or default_cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if no_room(error):
            raise cannot_write(folder, error) from error
        raise OutputError(
            f"the cache folder {folder} cannot be written: {error.strerror}; choose "
            "another with --cache-dir or TPUPORT_CACHE_DIR"
        ) from error
    for name in _FOLDERS:
        check_folder("--cache-dir", folder / name)
    return folder
