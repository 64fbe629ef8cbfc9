"""What one call of a program takes, row by row: the sum anybody can redo."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tpuport.core.cost.collectives import Collective

ATTENTION, MATMUL, COLLECTIVE, OTHER = "attention", "matmul", "collective", "other"
CATEGORIES = (ATTENTION, MATMUL, COLLECTIVE, OTHER)
MXU, VECTOR, HBM, ICI = "MXU", "vector unit", "HBM", "interconnect"


@dataclass(frozen=True, slots=True)
class KernelCost:
    """What one call of a Pallas kernel takes.

    Attributes:
        cycles: of the core.
        bound: the unit that is busiest.
        flops: multiplications and additions on the MXU.
    """

    cycles: float
    bound: str
    flops: float


@dataclass(slots=True)
class Row:
    """One instruction of a program, over one call of the program.

    Attributes:
        name, opcode, source: the instruction; ``source`` is its scope in the trace.
        category: one of :data:`CATEGORIES`.
        times: how often it runs.
        cycles: of the core for one run, as the compiler or the kernel's schedule says.
        seconds: it holds up the core for, over all runs.
        flops: of one run.
        hbm_bytes: read and written in one run.
        bound: the unit that limits it.
        floor: of ``seconds``, what its matrix products and its HBM traffic take at the
            chip's peak; of kernels, collectives and waiting all of it.
        collective: what it moves, where it is one.
    """

    name: str
    opcode: str
    source: str
    category: str
    times: int
    cycles: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    bound: str = ""
    floor: float = 0.0
    collective: Collective | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        moved = data.pop("collective")
        if moved is None:
            return data
        moves = {"axis": moved.axis, "bytes": moved.bytes}
        return {**data, **moves, "link_seconds": moved.seconds}


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """All collectives of one kind over the same mesh axes, in one call of a program.

    Attributes:
        kind, axis: as in :class:`Collective`.
        count: how many run.
        bytes: of their arrays on one device, together: results, of reduce-scatters
            operands.
        seconds: on the links.
        exposed_seconds: of these, not hidden behind other work.
    """

    kind: str
    axis: str
    count: int
    bytes: int
    seconds: float
    exposed_seconds: float


@dataclass(slots=True)
class Account:
    """What one call of a program takes.

    Attributes:
        seconds: of one call.
        rows: every instruction that takes time or moves data between devices.
        notes: what could not be known, in words.
    """

    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def split(self) -> dict[str, float]:
        """Seconds by category."""
        return {
            name: math.fsum(r.seconds for r in self.rows if r.category == name)
            for name in CATEGORIES
        }

    def bounds(self) -> dict[str, float]:
        """Seconds by the unit that limits them."""
        return {
            name: math.fsum(r.seconds for r in self.rows if r.bound == name)
            for name in (MXU, VECTOR, HBM, ICI)
        }

    @property
    def floor(self) -> float:
        """Seconds, were everything but kernels and transfers as fast as the chip's
        matrix units and memory allow; the compiler's estimates are above that."""
        return math.fsum(row.floor for row in self.rows)

    @property
    def bound(self) -> str:
        """The unit that limits most of the time."""
        bounds = self.bounds()
        return max(bounds, key=lambda name: bounds[name])

    def collectives(self) -> list[CollectiveUse]:
        """By kind and axis, in the order in which they first run."""
        found: dict[tuple[str, str], list[tuple[Row, Collective]]] = {}
        for row in self.rows:
            if (moved := row.collective) is not None:
                found.setdefault((moved.kind, moved.axis), []).append((row, moved))
        return [
            CollectiveUse(
                kind=kind,
                axis=axis,
                count=sum(row.times for row, _ in moves),
                bytes=sum(row.times * moved.bytes for row, moved in moves),
                seconds=math.fsum(row.times * moved.seconds for row, moved in moves),
                exposed_seconds=math.fsum(row.seconds for row, _ in moves),
            )
            for (kind, axis), moves in found.items()
        ]
