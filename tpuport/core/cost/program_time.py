"""The time of one call of a compiled program, operation by operation.

The schedule is walked in the order in which the core runs it. What the compiler
estimates takes its estimate; a Pallas kernel takes the cycles of its own schedule;
what has neither takes the time of its HBM traffic. A ``while`` takes its trip count
times its body. Transfers that are started and waited for later (``-start``, ``-done``)
run beside the core and hold it up only where they are not done in time; those over the
same link, and those over HBM, run one after the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tpuport.core.cost.account import (
    ATTENTION,
    COLLECTIVE,
    HBM,
    ICI,
    MATMUL,
    MXU,
    OTHER,
    VECTOR,
    Account,
    KernelCost,
    Row,
)
from tpuport.core.cost.collectives import Collective, collective_kind, read_collective
from tpuport.core.cost.hlo import (
    Computation,
    Instruction,
    Program,
    convolution_flops,
    hbm_bytes,
    transfer_bytes,
)
from tpuport.core.cost.network import Link, Network
from tpuport.core.mesh.chips import Chip

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
}
#: Custom calls that name memory or places and move nothing.
_FREE_TARGETS = {"ConcatBitcast", "AllocateBuffer", "Sharding", "SPMDFullToShardShape"}
#: What kernels of the project do that are no attention, by how their names begin; and
#: names that the ops of :mod:`tpuport.core.layers.attention` have in a trace.
_KERNELS = {
    "tpuport_conv": MATMUL,
    "tpuport_moments": OTHER,
    "tpuport_norm": OTHER,
    "tpuport_norm_heads": OTHER,
    "tpuport_norm_tokens": OTHER,
    "tpuport_sides": OTHER,
}
#: How the fusions are named in which a collective begins and ends that the compiler has
#: written into fusions of work between them, too; all have it with the same channel.
_PART_START, _PART_DONE = "async-collective-start", "async-collective-done"
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_ATTENTION_SCOPES = ("/scaled_dot_product_attention/", "/attention/")

Kernels = Callable[[Instruction, Sequence[Instruction]], KernelCost]


@dataclass(slots=True)
class _Flight:
    """A transfer beside the core."""

    row: Row | None
    ends: float


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


class _Walk:
    def __init__(
        self,
        program: Program,
        chip: Chip,
        network: Network,
        mesh: Mapping[str, int],
        kernels: Kernels,
        result: Account,
    ) -> None:
        self.program = program
        self.chip = chip
        self.network = network
        self.mesh = mesh
        self.kernels = kernels
        self.result = result
        self._home = {
            id(i): computation
            for computation in program.computations.values()
            for i in computation.instructions
        }
        self._tables: dict[str, dict[str, Instruction]] = {}

    def run(self, computation: Computation, times: int) -> float:
        """Seconds of one run of a computation that runs ``times`` times in all."""
        by_name = {i.name: i for i in computation.instructions}
        now = 0.0
        memory_free = 0.0
        links: dict[Link, float] = {}
        flights: dict[str, _Flight] = {}
        parted: dict[str, _Flight] = {}
        for instruction in computation.instructions:
            opcode = instruction.opcode
            if opcode in _FREE or instruction.target in _FREE_TARGETS:
                continue
            operands = [by_name[n] for n in instruction.operands if n in by_name]
            if opcode.endswith(("-done", "-update")) and opcode != "async-update":
                now = self._wait(instruction, flights, now, times)
                continue
            moved = self._moved(instruction)
            if moved is not None and _channel(moved[0]) in parted:
                # A part of a collective that work runs beside, in one fusion with it.
                flight = parted[_channel(moved[0])]
                if not instruction.name.startswith(_PART_DONE):
                    now += self._compute(instruction, operands, times)
                    continue
                now = self._held(flight, now, times)
                del parted[_channel(moved[0])]
                continue
            if moved is not None:
                inner, given = moved
                collective = read_collective(inner, given, self.mesh, self.network)
                row = self._collective_row(instruction, collective, times)
                begins = max(
                    [now, *(links.get(link, 0.0) for link in collective.loads)]
                )
                ends = begins + collective.seconds
                links.update(dict.fromkeys(collective.loads, ends))
                if instruction.name.startswith(_PART_START) and _channel(inner):
                    parted[_channel(inner)] = _Flight(row, ends)
                    continue
                if opcode.endswith("-start"):
                    flights[instruction.name] = _Flight(row, ends)
                    continue
                spent = max(ends - now, self._estimate(instruction) / self.clock)
                row.seconds = row.floor = spent * times
                now += spent
                continue
            if opcode in ("copy-start", "slice-start"):
                size = hbm_bytes(instruction.shape) + sum(
                    hbm_bytes(o.shape) for o in operands
                )
                # The result's text has the operand as well as the destination.
                size = transfer_bytes(instruction, size)
                begins = max(now, memory_free)
                memory_free = begins + size / self.chip.hbm_bandwidth
                flights[instruction.name] = _Flight(None, memory_free)
                continue
            now += self._compute(instruction, operands, times)
        return now

    @property
    def clock(self) -> float:
        return self.chip.clock_hz

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
        waited = (flight.ends - now) * times
        self.result.rows.append(
            Row(
                name=instruction.name,
                opcode=instruction.opcode,
                source=instruction.op_name,
                category=OTHER,
                times=times,
                cycles=0.0,
                seconds=waited,
                floor=waited,
                bound=HBM,
            )
        )
        return flight.ends

    @staticmethod
    def _held(flight: _Flight, now: float, times: int) -> float:
        """When the core goes on that waits for a collective."""
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
            if collective_kind(found.opcode) is None:
                continue
            near = self._siblings(found)
            given = [near[n] for n in found.operands if n in near]
            if _is_scattered(instruction, found):
                # A fusion that sums and keeps each device's slice moves what a
                # reduce-scatter moves; the text has it as an all-reduce and a slice.
                found = replace(found, opcode="reduce-scatter")
            return found, given
        return None

    def _siblings(self, instruction: Instruction) -> dict[str, Instruction]:
        """The instructions of the same computation, by name."""
        home = self._home[id(instruction)]
        if home.name not in self._tables:
            self._tables[home.name] = home.by_name()
        return self._tables[home.name]

    def _collective_row(
        self, instruction: Instruction, collective: Collective, times: int
    ) -> Row:
        row = Row(
            name=instruction.name,
            opcode=instruction.opcode,
            source=instruction.op_name,
            category=COLLECTIVE,
            times=times,
            cycles=self._estimate(instruction),
            seconds=0.0,
            bound=ICI,
            collective=collective,
        )
        self.result.rows.append(row)
        return row

    def _estimate(self, instruction: Instruction) -> float:
        return float(instruction.estimated_cycles or 0)

    def _compute(
        self, instruction: Instruction, operands: Sequence[Instruction], times: int
    ) -> float:
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
        hbm = hbm_bytes(instruction.shape) + sum(hbm_bytes(o.shape) for o in operands)
        flops = self._flops(instruction)
        bound = ""
        if instruction.target == PALLAS:
            kernel = self.kernels(instruction, operands)
            cycles, bound, flops = kernel.cycles, kernel.bound, kernel.flops
            # It cannot be done before what it reads and writes has come and gone.
            moved = min(hbm, _said_to_move(instruction, hbm))
            moving = moved / self.chip.hbm_bandwidth * self.clock
            if moving > cycles:
                cycles, bound = moving, HBM
        else:
            cycles = self._estimate(instruction)
            if instruction.estimated_cycles is None:
                cycles = hbm / self.chip.hbm_bandwidth * self.clock
        if cycles <= 0:
            return 0.0
        seconds = least = cycles / self.clock
        if instruction.target != PALLAS:
            busy = flops / self.chip.peak_flops, hbm / self.chip.hbm_bandwidth
            least = min(seconds, max(busy))
        self.result.rows.append(
            Row(
                name=instruction.name,
                opcode=instruction.opcode,
                source=instruction.op_name,
                category=self._category(instruction, flops),
                times=times,
                cycles=cycles,
                seconds=seconds * times,
                flops=flops,
                hbm_bytes=hbm,
                bound=bound or self._bound(seconds, flops, hbm),
                floor=least * times,
            )
        )
        return seconds

    def _trips(self, instruction: Instruction) -> int:
        known = instruction.trip_count
        if known is None:
            known = self._counted(instruction)
        if known is None:
            note = (
                f"the number of rounds of loop {instruction.name} is not in the "
                "program; counted as one"
            )
            self.result.notes.append(note)
            return 1
        return known

    def _counted(self, instruction: Instruction) -> int | None:
        """From the condition ``counter < constant`` of a loop that starts at 0."""
        condition = self.program.computations[instruction.called["condition"][0]]
        limits = [
            int(i.literal)
            for i in condition.instructions
            if i.opcode == "constant" and i.literal.isdecimal()
        ]
        return limits[0] if len(limits) == 1 else None

    def _branches(self, instruction: Instruction, times: int) -> float:
        """The longest branch; which one runs is not known."""
        names = [n for names in instruction.called.values() for n in names]
        best: tuple[float, list[Row]] = (0.0, [])
        before = self.result.rows
        for name in names:
            self.result.rows = []
            seconds = self.run(self.program.computations[name], times)
            if seconds >= best[0]:
                best = (seconds, self.result.rows)
        self.result.rows = before + best[1]
        return best[0]

    def _flops(self, instruction: Instruction) -> float:
        """Of the matrix products and convolutions that an instruction does."""
        inner = [instruction, *self.program.inner(instruction)]
        return math.fsum(
            convolution_flops(i, self._siblings(i))
            for i in inner
            if i.opcode in ("convolution", "dot")
        )

    def _category(self, instruction: Instruction, flops: float) -> str:
        scope = instruction.op_name
        if instruction.target == PALLAS:
            kinds = (k for n, k in _KERNELS.items() if instruction.name.startswith(n))
            return next(kinds, ATTENTION)
        if any(s in scope for s in _ATTENTION_SCOPES):
            return ATTENTION
        return MATMUL if flops else OTHER

    def _bound(self, seconds: float, flops: float, hbm: float) -> str:
        shares = {
            MXU: flops / self.chip.peak_flops / seconds,
            HBM: hbm / self.chip.hbm_bandwidth / seconds,
        }
        unit = max(shares, key=lambda name: shares[name])
        return unit if shares[unit] >= BUSY else VECTOR


def _said_to_move(kernel: Instruction, rest: float) -> float:
    """Bytes that a kernel says it moves, ``rest`` where it does not say."""
    config = kernel.config.get("custom_call_config", {})
    return float(config.get("cost_estimate", {}).get("bytes_accessed", rest))


def _channel(collective: Instruction) -> str:
    """What tells a collective from others; empty where its text does not say."""
    found = _CHANNEL.search(collective.attributes)
    return found[1] if found else ""


def _is_scattered(outer: Instruction, inner: Instruction) -> bool:
    return (
        inner.opcode == "all-reduce"
        and outer is not inner
        and outer.bytes < inner.bytes
    )
