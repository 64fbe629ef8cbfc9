"""Loading what may end the process: it is tried once, and then known.

An executable that was built without the chip is handed to a driver that never saw it.
jax's own test of that on TPUs is skipped because the process died in it
(``tests/aot_test.py``, ``test_topology_jit_serialize``), and no exception can be caught
from a process that is gone. So a mark is left while such a file is loaded: a process
that finds one does not try again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tpuport.core.files import replacing


class DiedLoading(Exception):
    """An earlier process ended while it loaded this file."""


@contextlib.contextmanager
def guarded(marks: Path, name: str) -> Iterator[None]:
    """The block loads ``name``; a mark in ``marks`` says so while it does.

    Where the mark cannot be written, the block runs without one.

    Raises:
        DiedLoading: a mark of an earlier process is there. Its message names the file
            to remove to try again.
    """
    mark = marks / f"loading-{name}"
    if mark.exists():
        raise DiedLoading(
            f"an earlier process ended while it loaded {name}, so it is not tried "
            f"again; remove {mark} to try"
        )
    with contextlib.suppress(OSError):
        marks.mkdir(parents=True, exist_ok=True)
        with replacing(mark):
            pass
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)
