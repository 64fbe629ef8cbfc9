"""The interconnect of a slice, and what joins slices: how long a collective takes.

Devices are places in the mesh: a compiled program numbers them in the order of its
device assignment, which is that of ``mesh.devices``.

Every transfer is routed over the torus, one axis after the other, and a collective
takes as long as its busiest link. All groups of a collective run at once, so groups
that share a link wait for each other.

Between slices every device has its share of its host's network, and nothing else is
known of the way: a transfer takes the bytes that a device sends, or receives, over that
bandwidth. The compiler gathers and sums within slices as far as possible and sends the
rest through the hosts: a ``send`` and a ``recv`` for the runtime of several slices.

Source of the formulas: "How to Scale Your Model", ``jax-ml.github.io/scaling-book``,
section "How do we do communication?": bytes over bandwidth of the links in both
directions, and about a microsecond a hop.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuport.core.cost.hlo import HloError, Instruction, first
from tpuport.core.mesh.chips import Chip
from tpuport.core.mesh.slices import Topology

Place = tuple[int, ...]
Link = tuple[Place, Place]
Loads = dict[Link, float]
"""Bytes by link."""

HOP_SECONDS = 1e-6
"""Latency of one hop. [book, "about 1us per hop"]"""

DIE_TO_DIE = 6.0
"""Bandwidth between the two cores of a chip over that of a link. Google Cloud's page on
TPU7x: "six times faster than a 1D ICI link"."""


SLICES = "slices"
"""In place of a mesh axis, of what goes to other slices."""

TO_SLICES: Link = ((), ())
"""A device's share of the data-centre network."""


class Network:
    """Links between the devices of a mesh on one slice, by their place in it.

    Args:
        topology: the slice.
        chip: its constants.
        devices: of the mesh on one slice, in its order; only ``coords`` and
            ``core_on_chip`` are read.
    """

    def __init__(self, topology: Topology, chip: Chip, devices: Sequence[Any]) -> None:
        self._chip = chip
        self._dims = topology.dims
        self._rings = topology.rings
        self._places: list[Place] = [
            (*(int(c) for c in d.coords[: len(self._dims)]), int(d.core_on_chip))
            for d in devices
        ]

    def route(self, start: int, end: int) -> list[Link]:
        """The links from one device to another, the shorter way round each ring."""
        here, there = self._places[start], self._places[end]
        links: list[Link] = []
        for axis, (size, ring) in enumerate(zip(self._dims, self._rings, strict=True)):
            while here[axis] != there[axis]:
                ahead = (there[axis] - here[axis]) % size
                back = size - ahead
                forward = ahead <= back if ring else there[axis] > here[axis]
                # Links belong to the chip; both of its cores share them.
                at = (here[axis] + (1 if forward else -1)) % size
                nearer = (*here[:axis], at, *here[axis + 1 :])
                links.append(((*here[:-1], 0), (*nearer[:-1], 0)))
                here = nearer
        if here != there:
            links.append((here, there))
        return links

    def seconds(self, loads: Mapping[Link, float]) -> float:
        """How long the busiest of links with so many bytes each is busy."""
        return max((b / self._bandwidth(link) for link, b in loads.items()), default=0)

    def _bandwidth(self, link: Link) -> float:
        if link == TO_SLICES:
            assert self._chip.dcn_bandwidth is not None  # others are refused
            return self._chip.dcn_bandwidth
        within = link[0][:-1] == link[1][:-1]
        return self._chip.ici_link_bandwidth * (DIE_TO_DIE if within else 1.0)

    def permute(self, pairs: Iterable[tuple[int, int]], size: float) -> Loads:
        """Loads where the first of each pair sends ``size`` bytes to the second."""
        loads: Loads = defaultdict(float)
        for start, end in pairs:
            for link in self.route(start, end):
                loads[link] += size
        return loads

    def hops(self, pairs: Iterable[tuple[int, int]]) -> int:
        """The longest way of a pair."""
        return max((len(self.route(a, b)) for a, b in pairs), default=0)

    def all_to_all(self, groups: Sequence[Sequence[int]], size: float) -> Loads:
        """Loads where every device sends an even share of ``size`` to each other."""
        return _together(
            self.permute(itertools.permutations(group, 2), size / len(group))
            for group in groups
        )

    def ring(self, groups: Sequence[Sequence[int]], size: float) -> Loads:
        """Loads of passing ``size`` bytes round each group, half in each direction.

        ``size`` is what every device has to receive: of an all-gather, all parts but
        its own.
        """
        loads = []
        for group in groups:
            order = self._round(group)
            pairs, share = _closed(order), size
            if len(order) == 1:
                continue
            if len(order) > 2:
                pairs += [(b, a) for a, b in pairs]
                share = size / 2
            # If every member has links along more axes, rings along each axis share
            # the work.
            share /= max(1, self._degree(group) // 2)
            loads.append(self.permute(pairs, share))
        return _together(loads)

    def _degree(self, group: Sequence[int]) -> int:
        """The fewest links that a member has to other members."""
        places = {self._places[d][:-1] for d in group}
        return min(len(set(self._near(place)) & places) for place in places)

    def _near(self, place: Place) -> Iterator[Place]:
        """The neighbours of a chip."""
        for axis, (size, ring) in enumerate(zip(self._dims, self._rings, strict=True)):
            for at in (place[axis] - 1, place[axis] + 1):
                if size > 1 and (ring or 0 <= at < size):
                    yield (*place[:axis], at % size, *place[axis + 1 :])

    def _round(self, group: Sequence[int]) -> list[int]:
        """The members in an order that goes round over few links."""
        if len(group) <= 2:
            return list(group)
        axes = itertools.permutations(range(len(self._dims)))
        return min(
            (self._snake(group, order) for order in axes),
            key=lambda order: sum(len(self.route(*pair)) for pair in _closed(order)),
        )

    def _snake(self, group: Sequence[int], axes: tuple[int, ...]) -> list[int]:
        """Back and forth along the first axis, and back home through its first line.

        On a grid of even size this is a round trip over neighbours: the first column is
        kept for the way back.
        """
        places = {d: self._places[d] for d in group}
        first, rest = axes[0], axes[1:]
        lines: dict[tuple[int, ...], list[int]] = {}
        for device in sorted(group, key=lambda d: self._along(places[d], rest)):
            line = tuple(places[device][axis] for axis in rest)
            lines.setdefault(line, []).append(device)
        home: list[int] = []
        order: list[int] = []
        keep = len(lines) > 2 and all(len(v) > 1 for v in lines.values())
        for index, members in enumerate(lines.values()):
            row = sorted(members, key=lambda d: (places[d][first], places[d][-1]))
            if keep and index:
                home.append(row.pop(0))
            order += row if index % 2 == 0 else row[::-1]
        return order + home[::-1]

    def _along(self, place: Place, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Sorts lines so that each is next to the one before."""
        key: list[int] = []
        flip = False
        for axis in reversed(axes):
            at = place[axis]
            key.append(self._dims[axis] - 1 - at if flip else at)
            flip = at % 2 == 1
        return tuple(key)


def _closed(order: Sequence[int]) -> list[tuple[int, int]]:
    """Each device with the next one, and the last with the first."""
    return [(order[i - 1], order[i]) for i in (*range(1, len(order)), 0)]


def _together(loads: Iterable[Loads]) -> Loads:
    """What several transfers at once put on each link."""
    total: Loads = defaultdict(float)
    for each in loads:
        for link, part in each.items():
            total[link] += part
    return total


KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)

_LISTED = re.compile(r"\breplica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"\breplica_groups=(?:@\w+)?mesh\[([^\]]*)\]"
    r"(?:, device_ids=\((.*?)\)(?= \{))? ?\{([^}]*)\}"
)
_TRANSFER = re.compile(r'\b_xla_megascale_transfer_type="(\w+)"')
_TARGETS = re.compile(r'\b_xla_megascale_target=(?:"\{([\d,]+)\}x|\{\{([\d,]+)\})')
_RENDEZVOUS = re.compile(r'\b_xla_host_transfer_rendezvous="([^"]*)"')
#: What a ``send`` to other slices does, as the compiler calls it.
_BETWEEN_SLICES = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: one of :data:`KINDS`.
        axis: the mesh axes it crosses, joined by ``+``; empty where it crosses none;
            :data:`SLICES` if it goes to other slices.
        bytes: of its array on one device: the result, of a reduce-scatter the operand.
        seconds: how long it takes when nothing else uses its links.
        loads: bytes on each link.
    """

    kind: str
    axis: str
    bytes: int
    seconds: float
    loads: Mapping[Link, float]


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


def collective_kind(instruction: Instruction) -> str | None:
    """The kind of a collective, a ``-start`` or a ``send`` to slices; else ``None``."""
    if instruction.opcode == "send":
        return _BETWEEN_SLICES.get(first(_TRANSFER, instruction.attributes))
    base = instruction.opcode.removesuffix("-start")
    return base if base in KINDS else None


def read_collective(
    instruction: Instruction,
    operands: Sequence[Instruction],
    mesh: Mapping[str, int],
    network: Network,
) -> Collective:
    """What a collective does, on the links of a network.

    Args:
        instruction: its opcode is a collective's, or its ``-start``, or a ``send``.
        operands: the instructions it reads.
        mesh: axis name -> size on one slice, in order.
        network: of the same mesh.

    Raises:
        HloError: its groups are written in a way that is not known.
    """
    kind = collective_kind(instruction)
    assert kind is not None
    given = sum(operand.bytes for operand in operands)
    if instruction.opcode == "send":
        return _between_slices(kind, instruction.attributes, given, network)
    if kind == "collective-permute":
        pairs = read_pairs(instruction.attributes)
        loads = network.permute(pairs, given)
        seconds = network.seconds(loads) + HOP_SECONDS * network.hops(pairs)
        return Collective(kind, _axes(pairs, mesh), given, seconds, loads)
    groups = read_groups(instruction.attributes, math.prod(mesh.values()))
    size = len(groups[0])
    axis = _axes([p for g in groups for p in itertools.pairwise(g)], mesh)
    payload = given * size if kind == "all-gather" else given
    moved = {
        "all-gather": given * (size - 1),
        "reduce-scatter": given * (size - 1) // size,
        "all-reduce": 2 * given * (size - 1) // size,
    }.get(kind, given)
    if kind in ("all-to-all", "ragged-all-to-all"):
        loads = network.all_to_all(groups, given)
        steps = network.hops(itertools.permutations(groups[0], 2))
    else:
        loads = network.ring(groups, moved)
        steps = (size // 2) * (2 if kind == "all-reduce" else 1)
    seconds = network.seconds(loads) + HOP_SECONDS * steps if size > 1 else 0.0
    return Collective(kind, axis, payload, seconds, loads)


def same_transfer(send: Instruction, others: Iterable[Instruction]) -> Iterator[str]:
    """The names of a ``send`` and of its ``recv``, which end with the same transfer."""
    meeting = first(_RENDEZVOUS, send.attributes)
    for other in others:
        ends = other.opcode in ("send", "recv")
        if ends and first(_RENDEZVOUS, other.attributes) == meeting:
            yield other.name


def _between_slices(
    kind: str, attributes: str, given: int, network: Network
) -> Collective:
    """What a device sends to other slices, or receives from them, if that is more."""
    payload, moved = given, float(given)
    if kind != "collective-permute":
        found = _TARGETS.search(attributes)
        if found is None:
            raise HloError(f"no slices in {attributes[:400]!r}")
        # One device of each slice named, or ids: 200003 is on the second slice.
        named = _numbers(found[1] or found[2])
        slices = len(named if found[1] else {number // 100_000 for number in named})
        others = len(named) * (slices - 1) // slices
        payload = given * len(named) if kind == "all-gather" else given
        moved = payload * others / len(named) * (2 if kind == "all-reduce" else 1)
    loads = {TO_SLICES: moved}
    return Collective(kind, SLICES, payload, network.seconds(loads), loads)


def read_pairs(attributes: str) -> tuple[tuple[int, int], ...]:
    """The pairs of a permute.

    Raises:
        HloError: there are none.
    """
    found = _PAIRS.search(attributes)
    if found is None:
        raise HloError(f"no source_target_pairs in {attributes[:200]!r}")
    pairs = re.findall(r"(\d+),(\d+)", found[1])
    return tuple((int(source), int(target)) for source, target in pairs)


def read_groups(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of a collective, in any of the three ways XLA writes them.

    Raises:
        HloError: in none of them.
    """
    if found := _LISTED.search(attributes):
        groups = [_numbers(g) for g in re.findall(r"\{([\d,]*)\}", found[1])]
        return tuple(g for g in groups if g) or (tuple(range(devices)),)
    if found := _IOTA.search(attributes):
        rows = _iota(found[2], found[3]).reshape(_numbers(found[1]))
        return tuple(tuple(map(int, row)) for row in rows)
    if found := _MESH.search(attributes):
        return _mesh_groups(found[1], found[2], found[3])
    raise HloError(f"no replica_groups in {attributes[:200]!r}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _iota(dims: str, order: str | None) -> np.ndarray:
    """All numbers from 0 on in an array of these dims, in another order of them."""
    grid = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return grid.transpose(_numbers(order)) if order else grid


def _mesh_groups(
    axes: str, order: str | None, across: str
) -> tuple[tuple[int, ...], ...]:
    """``mesh['a'=2,'b'=4] {'b'}``, also of a part of an axis: ``'b':(1)2``."""
    named = {n: int(s) for n, s in re.findall(r"'([^']+)'=(\d+)", axes)}
    ids = np.arange(math.prod(named.values()))
    if order:
        shaped = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", order)
        if shaped is None:
            raise HloError(f"device ids {order!r} of a collective are not understood")
        ids = _iota(shaped[1], shaped[2])
    wanted = {
        name: (int(before or 1), int(part or named[name]))
        for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", across)
    }
    # Of each axis what is before the part that is crossed, that part, and the rest.
    dims: list[int] = []
    for name, size in named.items():
        before, part = wanted.get(name, (1, 1))
        dims += [before, part, size // (before * part)]
    kept = [d for d in range(len(dims)) if d % 3 != 1]
    grid = ids.reshape(dims).transpose([*kept, *range(1, len(dims), 3)])
    rows = grid.reshape(-1, math.prod(dims[1::3]))
    return tuple(tuple(map(int, row)) for row in rows)


def _axes(pairs: Sequence[tuple[int, int]], mesh: Mapping[str, int]) -> str:
    """The axes along which some pair differs."""
    ends = np.array(pairs, int).reshape(-1, 2).T
    places = (np.unravel_index(end, tuple(mesh.values())) for end in ends)
    sides = zip(mesh, *places, strict=True)
    return "+".join(name for name, a, b in sides if (a != b).any())
