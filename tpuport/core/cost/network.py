"""The interconnect of a slice: how long a collective occupies its links.

Every transfer is routed over the torus, one axis after the other, and a collective
takes as long as its busiest link. All groups of a collective run at once, so groups
that share a link wait for each other.

Source of the formulas: "How to Scale Your Model", ``jax-ml.github.io/scaling-book``,
section "How do we do communication?": bytes over bandwidth of the links in both
directions, and about a microsecond a hop.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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


class Network:
    """Links between the devices of a mesh, by their place in it.

    Args:
        topology: the slice.
        chip: its constants.
        devices: of the mesh, in its order; only ``coords`` and ``core_on_chip`` are
            read.
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
            pairs = list(zip(order, [*order[1:], order[0]], strict=True))
            share = size
            if len(order) == 1:
                continue
            if len(order) > 2:
                pairs += [(b, a) for a, b in pairs]
                share = size / 2
            # Where every member has links along more axes, rings along each of them
            # share the work.
            share /= max(1, self._degree(group) // 2)
            loads.append(self.permute(pairs, share))
        return _together(loads)

    def _degree(self, group: Sequence[int]) -> int:
        """The fewest links that a member has to other members."""
        places = {self._places[d][:-1] for d in group}
        fewest = 2 * len(self._dims)
        for place in places:
            near = set()
            for axis, (size, ring) in enumerate(
                zip(self._dims, self._rings, strict=True)
            ):
                for step in (-1, 1):
                    at = place[axis] + step
                    if size > 1 and (ring or 0 <= at < size):
                        near.add((*place[:axis], at % size, *place[axis + 1 :]))
            fewest = min(fewest, len((near - {place}) & places))
        return fewest

    def _round(self, group: Sequence[int]) -> list[int]:
        """The members in an order that goes round over few links."""
        if len(group) <= 2:
            return list(group)
        orders = itertools.permutations(range(len(self._dims)))
        return min(
            (self._snake(group, axes) for axes in orders),
            key=lambda order: sum(
                len(self.route(a, b))
                for a, b in zip(order, [*order[1:], order[0]], strict=True)
            ),
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


def _together(loads: Iterable[Loads]) -> Loads:
    """What several transfers at once put on each link."""
    total: Loads = defaultdict(float)
    for each in loads:
        for link, part in each.items():
            total[link] += part
    return total
