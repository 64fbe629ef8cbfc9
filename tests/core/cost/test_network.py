"""Collectives on the links of a torus, against figures worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tpuport.core.cost.hlo import Instruction
from tpuport.core.cost.network import (
    SLICES,
    TO_SLICES,
    Collective,
    Network,
    read_collective,
    read_groups,
    read_pairs,
)
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.slices import Topology, parse_topology
from tpuport.errors import TpuportError

V6E = chip("v6e")
LINK = V6E.ici_link_bandwidth


def network(name: str) -> Network:
    """Of a slice, devices in the order of their coordinates, x first."""
    topology = parse_topology(name)
    return Network(topology, chip(topology.chip), devices(topology))


def devices(topology: Topology) -> list[SimpleNamespace]:
    """As libtpu describes them for one host."""
    dims = topology.dims
    places: list[tuple[int, ...]] = [()]
    for size in reversed(dims):
        places = [(i, *p) for i in range(size) for p in places]
    places.sort(key=lambda p: p[::-1])
    cores = topology.devices // topology.chips
    return [
        SimpleNamespace(coords=place, core_on_chip=core)
        for place in places
        for core in range(cores)
    ]


def test_a_route_goes_along_one_axis_after_the_other() -> None:
    found = network("v6e-8").route(0, 7)  # (0, 0) to (1, 3)
    assert [end[:2] for _, end in found] == [(1, 0), (1, 1), (1, 2), (1, 3)]


def test_a_ring_is_left_by_the_shorter_way() -> None:
    open_ends, ring = network("v6e-64"), network("v6e-256")
    assert len(open_ends.route(0, 7)) == 7  # 8 x 8 has no wrap-around links
    assert len(ring.route(0, 15)) == 1


@pytest.mark.parametrize(
    ("name", "groups", "size", "seconds"),
    [
        # Half of what each chip of a square has to receive comes from either side.
        ("v6e-4", [range(4)], 3e9, 3e9 / 2),
        # All eight chips of a host are one round trip over neighbours.
        ("v6e-8", [range(8)], 7e9, 7e9 / 2),
        # A column of four has no way home but back: its ends have one link.
        ("v6e-8", [(0, 2, 4, 6), (1, 3, 5, 7)], 3e9, 3e9),
        # Two groups of two hops along one column share the middle link.
        ("v6e-8", [(0, 4)], 1e9, 1e9),
        ("v6e-8", [(0, 4), (2, 6)], 1e9, 2e9),
        # Rings along two axes share the work.
        ("v6e-256", [range(16)], 255e9, 255e9 / 2),
        ("v6e-256", [range(256)], 255e9, 255e9 / 4),
    ],
    ids=["square", "host", "lines", "alone", "shared link", "row", "pod"],
)
def test_a_ring_is_as_slow_as_its_busiest_link(
    name: str, groups: list[Sequence[int]], size: float, seconds: float
) -> None:
    found = network(name)
    assert found.seconds(found.ring(groups, size)) == pytest.approx(seconds / LINK)


def test_the_cores_of_a_chip_are_nearer_than_its_neighbours() -> None:
    pair = network("v7x-8")
    near = pair.seconds(pair.permute([(0, 1)], 1e9))
    far = pair.seconds(pair.permute([(0, 2)], 1e9))
    assert far == pytest.approx(6 * near)


def test_an_all_to_all_is_limited_by_the_middle_of_the_slice() -> None:
    """Of 4 in a line, the two on one side send half of their data over one link."""
    host = network("v6e-8")
    seconds = host.seconds(host.all_to_all([(0, 2, 4, 6)], 4e9))
    assert seconds == pytest.approx(4 * 1e9 / LINK)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", ((0, 1), (2, 3))),
        ("replica_groups={}, x", ((0, 1, 2, 3),)),
        ("replica_groups=[2,2]<=[4], x", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}, x", ((0, 1, 2, 3),)),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}, x",
            ((0, 2), (1, 3)),
        ),
        ("replica_groups=mesh['a'=4] {'a':(1)2}, x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}, x", ((0, 1), (2, 3))),
    ],
    ids=str,
)
def test_groups_are_read_in_every_form(
    text: str, groups: tuple[tuple[int, ...], ...]
) -> None:
    assert read_groups(text, 4) == groups


def test_a_form_that_is_not_known_is_refused() -> None:
    with pytest.raises(TpuportError, match="replica_groups"):
        read_groups("replica_groups=something", 4)
    with pytest.raises(TpuportError, match="source_target_pairs"):
        read_pairs("no pairs")


def read(opcode: str, attributes: str, shape: str = "f32[1024,1024]") -> Collective:
    given = Instruction("g", "parameter", shape, (), "")
    found = Instruction("c", opcode, shape, ("g",), attributes)
    mesh = {"dp": 2, "sp": 1, "tp": 4}
    return read_collective(found, [given], mesh, network("v6e-8"))


@pytest.mark.parametrize(
    ("opcode", "groups", "axis", "size"),
    [
        ("all-reduce", "[2,4]<=[8]", "tp", 4 << 20),
        ("all-gather", "[2,4]<=[8]", "tp", 16 << 20),
        ("all-gather-start", "[4,2]<=[2,4]T(1,0)", "dp", 8 << 20),
        ("reduce-scatter", "[1,8]<=[8]", "dp+tp", 4 << 20),
        ("all-to-all", "{{0,1,2,3},{4,5,6,7}}", "tp", 4 << 20),
    ],
)
def test_collectives_have_the_axes_they_cross_and_the_size_of_their_array(
    opcode: str, groups: str, axis: str, size: int
) -> None:
    found = read(opcode, f"channel_id=1, replica_groups={groups}, dimensions={{0}}")
    assert (found.kind, found.axis) == (opcode.removesuffix("-start"), axis)
    assert found.bytes == size


def test_a_sum_takes_twice_as_long_as_its_scatter() -> None:
    groups = "replica_groups=[2,4]<=[8]"
    large = "f32[65536,1024]"
    summed = read("all-reduce", groups, large).seconds
    scattered = read("reduce-scatter", groups, large).seconds
    assert summed == pytest.approx(2 * scattered)


def test_a_permute_has_the_axis_along_which_its_pairs_differ() -> None:
    found = read("collective-permute-start", "source_target_pairs={{0,4},{1,5}}")
    assert (found.kind, found.axis) == ("collective-permute", "dp")
    assert read("collective-permute", "source_target_pairs={{3,0}}").axis == "tp"


TWO, FOUR = '"{1,2}x{0:3}"', '"{1,2,3,4}x{0:3}"'


@pytest.mark.parametrize(
    ("type_", "target", "kind", "crosses", "size"),
    [
        # Every device sends its array, and receives those of the other slices.
        ("ALL_GATHER", TWO, "all-gather", 4, 8),
        ("ALL_GATHER", FOUR, "all-gather", 12, 16),
        # A share to each other slice, and for a sum the sums back.
        ("REDUCE_SCATTER", FOUR, "reduce-scatter", 3, 4),
        ("ALL_REDUCE", TWO, "all-reduce", 4, 4),
        ("ALL_REDUCE", FOUR, "all-reduce", 6, 4),
        ("ALL_TO_ALL", "{{100000,200000},{100001,200001}}", "all-to-all", 2, 4),
        # One of the three others is on the same slice.
        ("ALL_TO_ALL", "{{100000,100004,200000,200004}}", "all-to-all", 2, 4),
        ("ONE_TO_ONE", "{{100004->200000}}", "collective-permute", 4, 4),
    ],
)
def test_what_goes_to_other_slices_takes_the_share_of_a_chip(
    type_: str, target: str, kind: str, crosses: float, size: int
) -> None:
    """Of 4 MiB a device; 100 Gb/s a chip are 12.5 GB/s."""
    named = f'_xla_megascale_target={target},_xla_megascale_transfer_type="{type_}"'
    found = read("send", f"channel_id=2, frontend_attributes={{{named}}}, x")
    assert (found.kind, found.axis, found.bytes) == (kind, SLICES, size << 20)
    assert found.loads == {TO_SLICES: crosses * (1 << 20)}
    assert found.seconds == pytest.approx(crosses * (1 << 20) / 12.5e9)


def test_slices_that_are_written_in_another_way_are_refused() -> None:
    with pytest.raises(TpuportError, match="no slices in"):
        read(
            "send",
            '_xla_megascale_target="all",_xla_megascale_transfer_type="ALL_GATHER"',
        )
