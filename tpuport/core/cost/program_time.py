"""The time of one call of a compiled program, operation by operation.

The schedule is walked in the order in which the core runs it. What the compiler
estimates takes its estimate; a Pallas kernel takes the cycles of its own schedule;
what has neither takes the time of its HBM traffic. A ``while`` takes its trip count
times its body. Transfers that are started and waited for later (``-start``, ``-done``)
run beside the core and hold it up only where they are not done in time; those over the
same link, and those over HBM, run one after the other. What goes to another slice is a
``send`` and a ``recv`` of one transfer. What comes from the host's
memory takes the link to the host.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpuport.core.cost.flops import ELEMENTWISE, PRODUCTS
from tpuport.core.cost.hlo import (
    Computation,
    Instruction,
    Program,
    convolution_flops,
    first,
)
from tpuport.core.cost.network import (
    SLICES,
    Collective,
    CollectiveUse,
    Network,
    collective_kind,
    read_collective,
    same_transfer,
)
from tpuport.core.mesh.chips import Chip

ATTENTION, MATMUL, COLLECTIVE, OTHER = "attention", "matmul", "collective", "other"
CATEGORIES = (ATTENTION, MATMUL, COLLECTIVE, OTHER)
MXU, VECTOR, HBM, ICI = "MXU", "vector unit", "HBM", "interconnect"
HOST_LINK, DCN = "host link", "data-centre network"


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
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        moved = data.pop("collective")
        if moved is None:
            return data
        moves = {"axis": moved.axis, "bytes": moved.bytes}
        return {**data, **moves, "link_seconds": moved.seconds}


@dataclass(slots=True)
class Account:
    """What one call of a program takes.

    Attributes:
        seconds: of one call.
        rows: every instruction that takes time or moves data between devices.
        notes: what could not be known, in words.
        host_bytes: that come from the host's memory in one call.
        link_seconds: that these bytes take, waited for or not.
    """

    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    host_bytes: float = 0.0
    link_seconds: float = 0.0

    def split(self) -> dict[str, float]:
        """Seconds by category."""
        return {
            name: math.fsum(r.seconds for r in self.rows if r.category == name)
            for name in CATEGORIES
        }

    def bounds(self) -> dict[str, float]:
        """Seconds by the unit that limits them; links beyond a slice where used."""
        units = [MXU, VECTOR, HBM, ICI, *((HOST_LINK,) if self.host_bytes else ())]
        units += {DCN for row in self.rows if row.bound == DCN}
        return {
            name: math.fsum(r.seconds for r in self.rows if r.bound == name)
            for name in units
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


PALLAS = "tpu_custom_call"

#: A unit that is busy for this share of an operation's time is what bounds it. Below,
#: it is the work on registers: arithmetic, and moving data between lanes and sublanes.
BUSY = 0.5

_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "iota",
    "optimization-barrier",
    "add-dependency",
    "recv",
}
#: Custom calls that name memory or places and move nothing.
_FREE_TARGETS = {"ConcatBitcast", "AllocateBuffer", "Sharding", "SPMDFullToShardShape"}
#: How the fusions are named in which a collective begins and ends that the compiler has
#: written into fusions of work between them, too; all have it with the same channel.
_PART_START, _PART_DONE = "async-collective-start", "async-collective-done"
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
#: Names that the ops of :mod:`tpuport.core.layers.attention` have in a trace.
_ATTENTION_SCOPES = ("/scaled_dot_product_attention/", "/attention/")

Kernels = Callable[[Instruction, Sequence[Instruction]], KernelCost]


@dataclass(slots=True)
class _Flight:
    """A transfer beside the core."""

    row: Row | None
    ends: float
    bound: str = HBM


def account(
    program: Program,
    chip: Chip,
    network: Network,
    mesh: Mapping[str, int],
    kernels: Kernels,
) -> Account:
    """Add up one call of a compiled program on one device.

    Args:
        program: read by :func:`tpuport.core.cost.hlo.parse`.
        chip: the constants.
        network: the links between the devices of the mesh.
        mesh: axis name -> size, in order.
        kernels: what a Pallas kernel takes, from its instruction and its operands.

    Raises:
        HloError: a collective is written in a way that is not known.
    """
    result = Account()
    walk = _Walk(program, chip, network, mesh, kernels, result)
    result.seconds = walk.run(program.computations[program.entry], 1)
    return result


@dataclass
class _Walk:
    program: Program
    chip: Chip
    network: Network
    mesh: Mapping[str, int]
    kernels: Kernels
    result: Account
    clock: float = field(init=False)

    def __post_init__(self) -> None:
        self.clock = self.chip.clock_hz
        # The computation of each instruction.
        self._home = {
            id(instruction): computation
            for computation in self.program.computations.values()
            for instruction in computation.values()
        }

    def run(self, computation: Computation, times: int) -> float:
        """Seconds of one run of a computation that runs ``times`` times in all."""
        now = 0.0
        # When the links, and HBM, are free again.
        busy: dict[Any, float] = {}
        flights: dict[str, _Flight] = {}
        parted: dict[str, _Flight] = {}
        for instruction in computation.values():
            opcode = instruction.opcode
            if opcode in _FREE or instruction.target in _FREE_TARGETS:
                continue
            if opcode.endswith(("-done", "-update")) and opcode != "async-update":
                now = self._wait(instruction, flights, now, times)
                continue
            moved = self._moved(instruction)
            channel = first(_CHANNEL, moved[0].attributes) if moved else ""
            if moved is not None and channel in parted:
                # A part of a collective that work runs beside, in one fusion with it.
                if instruction.name.startswith(_PART_DONE):
                    now = self._held(parted.pop(channel), now, times)
                else:
                    now += self._compute(instruction, times)
            elif moved is not None:
                collective = read_collective(*moved, self.mesh, self.network)
                row = self._row(
                    instruction,
                    times,
                    category=COLLECTIVE,
                    cycles=float(instruction.estimated_cycles or 0),
                    bound=DCN if collective.axis == SLICES else ICI,
                    collective=collective,
                )
                ends = _occupied(busy, collective.loads, now, collective.seconds)
                if instruction.name.startswith(_PART_START) and channel:
                    parted[channel] = _Flight(row, ends)
                elif opcode.endswith("-start"):
                    flights[instruction.name] = _Flight(row, ends)
                elif opcode == "send":
                    flight, others = _Flight(row, ends), computation.values()
                    flights |= dict.fromkeys(same_transfer(instruction, others), flight)
                else:
                    spent = max(ends - now, row.cycles / self.clock)
                    row.seconds = row.floor = spent * times
                    now += spent
            elif opcode in ("copy-start", "slice-start") or instruction.from_host:
                # The result's text has the operand as well as the destination: of
                # a copy between memories the smaller array counts, once.
                size = min((a.bytes for a in instruction.arrays if a.shape), default=0)
                unit, bandwidth = HBM, self.chip.hbm_bandwidth
                if instruction.from_host:
                    unit, bandwidth = HOST_LINK, self.chip.host_bandwidth
                    self.result.host_bytes += size * times
                    self.result.link_seconds += size / bandwidth * times
                ends = _occupied(busy, [unit], now, size / bandwidth)
                flights[instruction.name] = _Flight(None, ends, unit)
            else:
                now += self._compute(instruction, times)
        return now

    def _row(self, instruction: Instruction, times: int, **known: Any) -> Row:
        row = Row(
            name=instruction.name,
            opcode=instruction.opcode,
            source=instruction.op_name,
            times=times,
            **known,
        )
        self.result.rows.append(row)
        return row

    def _wait(
        self,
        instruction: Instruction,
        flights: dict[str, _Flight],
        now: float,
        times: int,
    ) -> float:
        flight = next((flights[n] for n in instruction.operands if n in flights), None)
        if flight is None or flight.ends <= now:
            return now
        if flight.row is not None:
            return self._held(flight, now, times)
        flight.row = self._row(instruction, times, category=OTHER, bound=flight.bound)
        self._held(flight, now, times)
        return flight.ends

    @staticmethod
    def _held(flight: _Flight, now: float, times: int) -> float:
        """When the core goes on that waits for a transfer."""
        waited = max(flight.ends - now, 0.0)
        assert flight.row is not None
        flight.row.seconds += waited * times
        flight.row.floor += waited * times
        return now + waited

    def _moved(
        self, instruction: Instruction
    ) -> tuple[Instruction, list[Instruction]] | None:
        """The collective that an instruction is or holds, with what it reads."""
        candidates = [instruction]
        if instruction.opcode in ("fusion", "async-start", "call-start"):
            candidates = list(self.program.inner(instruction))
        for found in candidates:
            if collective_kind(found) is None:
                continue
            given = self._operands(found)
            inside = found is not instruction and found.opcode == "all-reduce"
            if inside and instruction.bytes < found.bytes:
                # A fusion that sums and keeps each device's slice moves what a
                # reduce-scatter moves; the text has it as an all-reduce and a slice.
                found = replace(found, opcode="reduce-scatter")
            return found, given
        return None

    def _operands(self, instruction: Instruction) -> list[Instruction]:
        near = self._home[id(instruction)]
        return [near[name] for name in instruction.operands if name in near]

    def _compute(self, instruction: Instruction, times: int) -> float:
        """Seconds of one run of an instruction on the core."""
        called = instruction.called
        if instruction.opcode == "while":
            trips = self._trips(instruction)
            inside = times * trips
            each = self.run(self.program.computations[called["body"][0]], inside)
            each += self.run(self.program.computations[called["condition"][0]], inside)
            return trips * each
        if instruction.opcode == "conditional":
            return self._branches(instruction, times)
        if instruction.opcode == "call":
            return self.run(self.program.computations[called["to_apply"][0]], times)
        operands = self._operands(instruction)
        hbm = instruction.hbm_bytes + sum(o.hbm_bytes for o in operands)
        if instruction.opcode == "dynamic-update-slice":
            # In place: the compiler writes a copy of its own where it needs one.
            hbm = 2 * operands[1].hbm_bytes if len(operands) > 1 else hbm
        flops = self._flops(instruction)
        bound = ""
        if instruction.target == PALLAS:
            kernel = self.kernels(instruction, operands)
            cycles, bound, flops = kernel.cycles, kernel.bound, kernel.flops
            # It cannot be done before what it reads and writes has come and gone:
            # all its arrays, or the part of them that it says it moves.
            said = instruction.config.get("custom_call_config", {})
            said = said.get("cost_estimate", {}).get("bytes_accessed", hbm)
            moving = min(hbm, float(said)) / self.chip.hbm_bandwidth * self.clock
            if moving > cycles:
                cycles, bound = moving, HBM
        elif (estimated := instruction.estimated_cycles) is not None:
            cycles = float(estimated)
        else:
            cycles = hbm / self.chip.hbm_bandwidth * self.clock
        if cycles <= 0:
            return 0.0
        seconds = least = cycles / self.clock
        if instruction.target != PALLAS:
            busy = flops / self.chip.peak_flops, hbm / self.chip.hbm_bandwidth
            least = min(seconds, max(busy))
        self._row(
            instruction,
            times,
            category=self._category(instruction, flops),
            cycles=cycles,
            seconds=seconds * times,
            flops=flops,
            hbm_bytes=hbm,
            bound=bound or self._bound(seconds, flops, hbm),
            floor=least * times,
        )
        return seconds

    def _trips(self, instruction: Instruction) -> int:
        """As the compiler says, or ``counter < constant`` of a loop from 0 on."""
        if instruction.trip_count is not None:
            return instruction.trip_count
        condition = self.program.computations[instruction.called["condition"][0]]
        limits = [
            int(i.literal)
            for i in condition.values()
            if i.opcode == "constant" and i.literal.isdecimal()
        ]
        if len(limits) == 1:
            return limits[0]
        self.result.notes.append(
            f"the number of rounds of loop {instruction.name} is not in the program; "
            "counted as one"
        )
        return 1

    def _branches(self, instruction: Instruction, times: int) -> float:
        """The longest branch; which one runs is not known."""
        before, longest, rows = self.result.rows, 0.0, list[Row]()
        for name in itertools.chain(*instruction.called.values()):
            self.result.rows = []
            seconds = self.run(self.program.computations[name], times)
            if seconds >= longest:
                longest, rows = seconds, self.result.rows
        self.result.rows = before + rows
        return longest

    def _flops(self, instruction: Instruction) -> float:
        """FLOPs of the matrix products and convolutions in an instruction."""
        inner = [instruction, *self.program.inner(instruction)]
        return math.fsum(
            convolution_flops(i, self._home[id(i)])
            for i in inner
            if i.opcode in ("convolution", "dot")
        )

    def _category(self, instruction: Instruction, flops: float) -> str:
        if instruction.target == PALLAS:
            if instruction.name.startswith(PRODUCTS):
                return MATMUL
            return OTHER if instruction.name.startswith(ELEMENTWISE) else ATTENTION
        if any(scope in instruction.op_name for scope in _ATTENTION_SCOPES):
            return ATTENTION
        return MATMUL if flops else OTHER

    def _bound(self, seconds: float, flops: float, hbm: float) -> str:
        shares = {
            MXU: flops / self.chip.peak_flops / seconds,
            HBM: hbm / self.chip.hbm_bandwidth / seconds,
        }
        unit = max(shares, key=lambda name: shares[name])
        return unit if shares[unit] >= BUSY else VECTOR


def _occupied(
    busy: dict[Any, float], units: Iterable[Any], now: float, seconds: float
) -> float:
    """When a transfer ends that all its units must be free for; they are, then."""
    ends = max([now, *(busy.get(unit, 0.0) for unit in units)]) + seconds
    busy.update(dict.fromkeys(units, ends))
    return ends
