"""The folder of a run, for the other processes of the run: a copy that nobody keeps."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tpuport.core.files.atomic import scratch_folder
from tpuport.core.files.run_lock import LOCK_FILE
from tpuport.core.mesh.hosts import here


def share_run(folder: Path) -> None:
    """Send a run's folder from process 0 to the processes that :func:`copied_run`."""
    if here().first:
        here().told(lambda: _packed(folder) if here().several else b"")


@contextlib.contextmanager
def copied_run() -> Iterator[Path]:
    """What process 0 sends, in a folder that goes with the block."""
    data = here().told(bytes)
    with (
        scratch_folder("tpuport-run-") as folder,
        tarfile.open(fileobj=io.BytesIO(data)) as packed,
    ):
        here().scratch = folder
        packed.extractall(folder, filter="data")
        yield folder


def _packed(folder: Path) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as packed:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != LOCK_FILE:
                packed.add(path, str(path.relative_to(folder)))
    return data.getvalue()
