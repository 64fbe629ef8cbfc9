"""How many bytes a program may use of a device, as far as anyone can tell."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tpuport.core.mesh.chips import chip as chip_named
from tpuport.core.mesh.chips import chip_of

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
#: How the compiler says that a program is too large, before and after it has tried to
#: make it smaller.
_TOO_LARGE = (
    re.compile(r"memory space hbm\. Used ([\d.]+)([KMGT]?) of "),
    re.compile(r"out of memory on HBM, .*\(([\d.]+)([KMGT]?)\) exceeds available HBM"),
)

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
#: Limit, use, statistics and how names in these begin, by cgroup v2 and v1.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", ""),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_",
    ),
)
#: Version 1 says "no limit" with a number near 2**63.
_NO_LIMIT = 2**60


def program_room(devices: Sequence[Any], held: int = 0, own: int = 0) -> int | None:
    """Bytes of one device that a stage may use, its weights included.

    A device that counts its memory tells; for a TPU that is only described, the table
    of chips does; CPU devices share what the machine has left.

    Args:
        devices: those of the mesh.
        held: bytes of a device that other components hold.
        own: bytes of the stage's own weights that are on the device already.

    Returns:
        ``None`` where nothing is known.
    """
    device = devices[0]
    if device.platform == "cpu":
        left = host_memory()
        return None if left is None else left // len(devices) + own
    counts = [stats for each in devices if (stats := _counted(each)) is not None]
    if counts:
        # A program runs on all of them: the fullest decides.
        return own + min(int(c["bytes_limit"]) - int(c["bytes_in_use"]) for c in counts)
    if device.platform == "tpu":
        return chip_named(chip_of(device)).hbm_usable_bytes - held
    return None


def array_bytes(arrays: Iterable[Any]) -> int:
    """What placed arrays, or ``ShapeDtypeStruct`` with a place, take on one device."""
    return sum(
        math.prod(a.sharding.shard_shape(tuple(a.shape))) * a.dtype.itemsize
        for a in arrays
    )


def _counted(device: Any) -> dict[str, Any] | None:
    """The device's own count; ``None`` where it keeps none."""
    import jax

    try:
        stats = device.memory_stats()
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        return None  # a device that is described only
    return stats if stats and {"bytes_limit", "bytes_in_use"} <= set(stats) else None


def host_memory(
    meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, *, total: bool = False
) -> int | None:
    """Bytes that this process may still take; ``None`` where the system is silent.

    Args:
        total: what the machine or the container has, taken or not.
    """
    found = []
    field = "MemTotal" if total else "MemAvailable"
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == field:
                found.append(int(value.split()[0]) * 1024)
    for *names, prefix in _CGROUP_FILES:
        limit, used, stat = (cgroup / name for name in names)
        if limit.is_file() and used.is_file():
            text = limit.read_text().strip()
            if text != "max" and int(text) < _NO_LIMIT:
                words = stat.read_text().split() if stat.is_file() else []
                told = dict(zip(words[::2], words[1::2], strict=True))
                # Page cache that can be dropped is counted as used.
                cached = (f"{prefix}{kind}_file" for kind in ("active", "inactive"))
                taken = int(used.read_text()) - sum(int(told.get(n, 0)) for n in cached)
                found.append(max(int(text) - (0 if total else max(taken, 0)), 0))
    return min(found, default=None)


def refused_bytes(message: str) -> int | None:
    """Bytes of HBM a program would use, by the compiler's error; else ``None``."""
    found = next((f for p in _TOO_LARGE if (f := p.search(message))), None)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def planned_bytes(compiled: Any) -> int | None:
    """Bytes of a device that a compiled program takes at its peak, weights included.

    Args:
        compiled: a ``jax.stages.Compiled``; of anything else nothing is known.
    """
    parts = plan_of(compiled)
    return sum(parts.values()) - 2 * parts["shared"] if parts else None


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
