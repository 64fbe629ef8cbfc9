"""Loading what may end the process: it is tried once, and then known.

An executable that was built without the chip is handed to a driver that never saw it.
jax's own test of that on TPUs is skipped because the process died in it
(``tests/aot_test.py``, ``test_topology_jit_serialize``), and no exception can be caught
from a process that is gone. So a process leaves a mark while it loads such a file, with
who it is: one that finds the mark of a process that is gone does not try again.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpuport.core.files.atomic import replacing

_PROC = Path("/proc")


class DiedLoading(Exception):
    """An earlier process ended while it loaded this file."""


@contextlib.contextmanager
def guarded(marks: Path, name: str) -> Iterator[None]:
    """The block loads ``name``; a mark in ``marks`` says so while it does.

    Processes on this host may load it at once. Whether one on another host is alive
    cannot be known, so a mark of one counts as that of a dead process. Where the mark
    cannot be written, the block runs without one.

    Raises:
        DiedLoading: a mark of an earlier process is there. Its message names the file
            to remove to try again.
    """
    beginning = f"loading-{name}"
    for mark in _marks(marks, beginning):
        found = _read(mark)
        if found is not None and not _alive(found):
            raise DiedLoading(
                f"an earlier process ended while it loaded {name}{_who(found)}, so it "
                f"is not tried again; remove {mark} to try"
            )
    own = _self()
    mark = marks / f"{beginning}.{own['pid']}"
    with contextlib.suppress(OSError):
        marks.mkdir(parents=True, exist_ok=True)
        with replacing(mark) as temporary:
            temporary.write_text(json.dumps(own), encoding="utf-8")
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)


def _marks(folder: Path, beginning: str) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.name == beginning
        or (
            path.name.startswith(f"{beginning}.")
            and path.name.removeprefix(f"{beginning}.").isdecimal()
        )
    )


def _self() -> dict[str, Any]:
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "started": _started(pid)}


def _read(mark: Path) -> dict[str, Any] | None:
    """Whose mark it is: empty where that cannot be read, None where it is gone."""
    try:
        found = json.loads(mark.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _alive(found: dict[str, Any]) -> bool:
    """Whether it is of a process that runs here, not of an older one of its number."""
    pid = found.get("pid")
    if found.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is another user's
    return bool(found.get("started") == _started(pid))


def _started(pid: int) -> str | None:
    """When a process began, in ticks since the machine did; None where nobody says."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8")
    except OSError:
        return None
    # The name in brackets, the second field, may hold anything.
    return text.rpartition(")")[2].split()[19]


def _who(found: dict[str, Any]) -> str:
    if "pid" not in found or "host" not in found:
        return ""
    return f" (process {found['pid']} on {found['host']})"
