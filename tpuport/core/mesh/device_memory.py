"""How many bytes programs use of a device, and what the host has."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
#: How the compiler says that a program is too large, before and after it has tried to
#: make it smaller.
_TOO_LARGE = (
    re.compile(r"memory space hbm\. Used ([\d.]+)([KMGT]?) of "),
    re.compile(r"out of memory on HBM, .*\(([\d.]+)([KMGT]?)\) exceeds available HBM"),
)


_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
#: The files of a limit, by cgroup v2 and v1.
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
#: Version 1 says "no limit" with a number near 2**63.
_NO_LIMIT = 2**60


def host_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Bytes of memory that the machine or the container has, taken or not.

    ``None`` where the system is silent.
    """
    found = []
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemTotal":
                found.append(int(value.split()[0]) * 1024)
    for name in _LIMITS:
        limit = cgroup / name
        if limit.is_file():
            text = limit.read_text().strip()
            if text != "max" and int(text) < _NO_LIMIT:
                found.append(int(text))
    return min(found, default=None)


#: The kind of memory in which arrays of the host wait for a device.
HOST = "pinned_host"


def on_host(array: Any) -> bool:
    """Whether an array, or a struct with a place, is in the host's memory."""
    return getattr(array.sharding, "memory_kind", None) == HOST


def array_bytes(arrays: Iterable[Any], *, host: bool = False) -> int:
    """What placed arrays, or ``ShapeDtypeStruct`` with a place, take on one device.

    Args:
        host: count those that wait in the host's memory, and no others.
    """
    return sum(
        math.prod(a.sharding.shard_shape(tuple(a.shape))) * a.dtype.itemsize
        for a in arrays
        if on_host(a) == host
    )


def refused_bytes(message: str) -> int | None:
    """Bytes of HBM a program would use, by the compiler's error; else ``None``."""
    found = next((f for p in _TOO_LARGE if (f := p.search(message))), None)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def plan_of(compiled: Any) -> dict[str, int]:
    """Bytes per device by what a compiled program uses them for.

    Args:
        compiled: a ``jax.stages.Compiled``, compiled here or loaded from a file.

    Returns:
        ``arguments``, ``outputs``, ``shared`` (outputs in the place of arguments),
        ``temporaries`` and ``code``; empty for what is no compiled program.
    """
    analyse = getattr(compiled, "memory_analysis", None)
    found = analyse() if analyse is not None else None
    if found is None:
        return {}
    return {
        name: int(getattr(found, f"{jaxs}_size_in_bytes"))
        for name, jaxs in (
            ("arguments", "argument"),
            ("outputs", "output"),
            ("shared", "alias"),
            ("temporaries", "temp"),
            ("code", "generated_code"),
        )
    }
