"""How many bytes a program may use of a device, as far as anyone can tell."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
#: How the compiler says that a program is too large, before and after it has tried to
#: make it smaller.
_TOO_LARGE = (
    re.compile(r"memory space hbm\. Used ([\d.]+)([KMGT]?) of "),
    re.compile(r"out of memory on HBM, .*\(([\d.]+)([KMGT]?)\) exceeds available HBM"),
)


def array_bytes(arrays: Iterable[Any]) -> int:
    """What placed arrays, or ``ShapeDtypeStruct`` with a place, take on one device."""
    return sum(
        math.prod(a.sharding.shard_shape(tuple(a.shape))) * a.dtype.itemsize
        for a in arrays
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
