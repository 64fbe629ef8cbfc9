"""The order of devices along a slice's links: near each other where they exchange."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import pytest

from tests.processes import needs_libtpu, run_json
from tpuport.core.cost.network import Network
from tpuport.core.layers.sequence_parallel import Degrees, degrees
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.device_mesh import OWN_ORDER, build_mesh, torus_order
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import TOPOLOGY_NAMES, Topology, parse_topology


def chips_of(name: str) -> int:
    return parse_topology(name).chips


LARGER = [
    name
    for name in TOPOLOGY_NAMES
    if chips_of(name) > OWN_ORDER and parse_topology(name).devices <= 512
]
#: Slices with an order of their own, and those that keep theirs.
LARGE = [name for name in LARGER if name.startswith(("v5e", "v6e"))]
DEEP = [name for name in LARGER if name not in LARGE]


@dataclass(frozen=True)
class Device:
    coords: tuple[int, ...]
    core_on_chip: int = 0


def listed(name: str) -> list[Device]:
    """The devices of a slice as libtpu lists them: host by host of 2 x 2 chips."""
    topology = parse_topology(name)
    dims = (*topology.dims, 1)[:3]
    most = (2, 4, 1) if dims == (2, 4, 1) else (2, 2, 1)
    host = tuple(map(min, most, dims))

    def places(steps: Sequence[int]) -> list[tuple[int, ...]]:
        backwards = itertools.product(*(range(n) for n in reversed(steps)))
        return [place[::-1] for place in backwards]

    hosts = places([n // one for n, one in zip(dims, host, strict=True)])
    return [
        Device(tuple(h * n + c for h, n, c in zip(at, host, of, strict=True)), core)
        for at in hosts
        for of in places(host)
        for core in range(topology.devices // topology.chips)
    ]


_LIBTPU = """
import json, sys
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.slices import parse_topology, topology_devices
found = {}
for name in sys.argv[1].split(","):
    devices = topology_devices(parse_topology(name))
    mesh = build_mesh(MeshSpec(dp=2, sp=-1), devices[::-1])
    found[name] = [[[*d.coords, d.core_on_chip] for d in order]
                   for order in (devices, mesh.devices.flat)]
print(json.dumps(found))
"""


@needs_libtpu
def test_libtpu_lists_devices_as_these_tests_do() -> None:
    names = ["v6e-8", "v6e-16", "v6e-256", "v5p-64", "v7x-64"]
    found = run_json(_LIBTPU, ",".join(names))
    for name in names:
        mine = listed(name)
        spec = MeshSpec(dp=2, sp=-1).resolve(len(mine))
        given, placed = ([Device(tuple(p[:3]), p[3]) for p in o] for o in found[name])
        assert given == mine
        # The mesh of the same devices in another order, of more than eight chips.
        wanted = torus_order(mine, spec) if name in LARGE else mine[::-1]
        assert placed == wanted


_SLICES = """
import json
import numpy as np
from tpuport.core.mesh.device_mesh import axes_within, build_mesh, on_one_slice
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.pictures import picture_of
from tpuport.core.mesh.slices import parse_topology, topology_devices
from tpuport.core.space.pictures import Pictures, ways

def placed(name, slices, spec):
    devices = topology_devices(parse_topology(name).times(slices))
    return build_mesh(MeshSpec.parse(spec), devices[::-1])

def at(devices):
    return [[getattr(d, "slice_index", 0), *d.coords[:2]] for d in devices]

wide, pair = placed("v6e-16", 2, "dp=4,sp=8"), placed("v6e-4", 2, "dp=2,sp=2")
one = placed("v6e-16", 1, "dp=2,sp=8")
mesh = placed("v6e-4", 4, "dp=4,sp=4")

def split(videos):
    pictures = Pictures(videos=videos, rows=16, columns=64, places=frozenset({0}),
                        scales=frozenset({1}))
    parts = next(ways(pictures, [], list(mesh.devices.flat), True))
    found = parts.mesh(list(mesh.devices.flat))
    # Programs share weights, so all have one order of the devices.
    assert [*found.devices.flat] == [*mesh.devices.flat]
    by_video = np.moveaxis(found.devices, found.axis_names.index("videos"), 0)
    return [dict(found.shape), [[d.slice_index for d in one.flat] for one in by_video]]

whole = picture_of(mesh, 16, 64)
print(json.dumps({
    "order": at(wide.devices.flat), "one": at(one.devices.flat),
    "within": axes_within(wide), "alone": axes_within(one),
    "sizes": on_one_slice(wide)[1], "some": at(pair.devices.flat),
    "one video": split(1), "eight": split(8),
    "picture": [dict(whole.mesh.shape), at(whole.mesh.devices[0].flat)],
}))
"""


@needs_libtpu
def test_dp_goes_across_slices_and_all_else_stays_within() -> None:
    found = run_json(_SLICES)
    # Each slice has the order of one slice alone.
    one = [place[1:] for place in found["one"]]
    assert found["order"] == [[n, *place] for n in (0, 1) for place in one]
    assert (found["within"], found["alone"]) == (["sp"], ["dp", "sp"])
    assert found["sizes"] == {"dp": 2, "sp": 8, "tp": 1}
    # A mesh of fewer devices takes as many of each slice.
    assert [place[0] for place in found["some"]] == [0, 0, 1, 1]
    # Each of four slices has all parts of the one video; of eight videos two are there.
    shape, (slices,) = found["one video"]
    assert shape == {"copies": 4, "videos": 1, "rows": 1, "columns": 4}
    assert slices == [n // 4 for n in range(16)]
    shape, slices = found["eight"]
    assert shape == {"copies": 1, "videos": 8, "rows": 1, "columns": 2}
    assert slices == [[n // 2] * 2 for n in range(8)]
    shape, places = found["picture"]
    assert shape == {"slices": 4, "videos": 1, "rows": 1, "columns": 4}
    assert {place[0] for place in places} == {0}


def meshes(devices: int) -> list[MeshSpec]:
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    return [
        MeshSpec(dp=devices // (sp * tp), sp=sp, tp=tp)
        for sp in sizes
        for tp in (1, 2, 8)
        if devices % (sp * tp) == 0
    ]


@pytest.mark.parametrize("name", LARGE)
def test_every_mesh_has_each_device_once_in_whatever_order_they_come(name: str) -> None:
    given = listed(name)
    mixed = random.Random(3).sample(given, len(given))
    for spec in meshes(len(given)):
        order = torus_order(given, spec)
        assert order != mixed
        assert sorted(map(str, order)) == sorted(map(str, given))
        assert torus_order(mixed, spec) == order


@pytest.mark.parametrize(
    "name", [n for n in TOPOLOGY_NAMES if n in DEEP or chips_of(n) <= OWN_ORDER]
)
def test_eight_chips_and_slices_in_three_dims_keep_their_order(name: str) -> None:
    given = listed(name)
    mixed = random.Random(5).sample(given, len(given))
    for order in (given, given[::-1], mixed):
        for spec in meshes(len(order)):
            assert torus_order(order, spec) == order


@pytest.mark.parametrize("name", ["v5e-16", "v6e-16", "v6e-32"])
def test_slices_of_short_rows_are_listed_in_this_order(name: str) -> None:
    given = listed(name)
    for dp in (1, 2, 4):
        spec = MeshSpec(dp=dp, sp=-1).resolve(len(given))
        assert torus_order(given[::-1], spec) == given


def test_devices_without_coordinates_keep_their_order() -> None:
    devices = jax.devices()[::-1]
    mesh = build_mesh(MeshSpec(dp=2, sp=3), devices)
    assert list(mesh.devices.flat) == devices[:6]


def test_what_fills_no_box_keeps_its_order() -> None:
    slice_ = listed("v6e-64")
    # 5 x 5 chips and one more, two slices with the same coordinates, and a box that has
    # no part of five chips.
    for devices, spec in (
        (slice_[:26], MeshSpec(dp=2, sp=13)),
        ([*listed("v6e-16"), *listed("v6e-16")], MeshSpec(dp=2, sp=16)),
        (slice_[:60], MeshSpec(sp=60)),
    ):
        assert len(devices) == spec.size
        assert torus_order(devices, spec) == devices
    # The first 48 fill 8 x 6, which has parts of 4 x 6 and of 4 x 3.
    some = torus_order(slice_[:48], MeshSpec(dp=2, sp=24))
    assert extents(some[:24]) == (4, 6)
    assert some != slice_[:48]


def extents(devices: Sequence[Device]) -> tuple[int, ...]:
    """Of the box that so many devices fill; their coordinates have no gap then."""
    sides = list(zip(*(d.coords for d in devices), strict=True))
    size = tuple(max(side) - min(side) + 1 for side in sides)
    cores = len({d.core_on_chip for d in devices})
    assert cores * math.prod(size) == len(devices)
    return tuple(n for n in size if n > 1)


@pytest.mark.parametrize(
    ("name", "spec", "sizes"),
    [
        ("v6e-256", MeshSpec(dp=2, sp=128), {128: (16, 8), 16: (16,)}),
        ("v6e-256", MeshSpec(dp=4, sp=64), {64: (8, 8), 16: (8, 2), 8: (8,)}),
        ("v6e-256", MeshSpec(dp=16, sp=16), {16: (4, 4), 8: (4, 2), 4: (2, 2)}),
        ("v6e-64", MeshSpec(dp=2, sp=32), {32: (8, 4), 16: (4, 4), 4: (2, 2)}),
        ("v6e-64", MeshSpec(dp=4, sp=4, tp=4), {16: (4, 4), 4: (2, 2), 2: (2,)}),
        ("v6e-256", MeshSpec(sp=64, tp=4), {256: (16, 16), 32: (16, 2), 4: (2, 2)}),
    ],
)
def test_neighbours_fill_boxes(
    name: str, spec: MeshSpec, sizes: dict[int, tuple[int, ...]]
) -> None:
    order = torus_order(listed(name), spec)
    for size, box in sizes.items():
        for start in range(0, len(order), size):
            assert extents(order[start : start + size]) == box


def network(name: str, devices: Sequence[Device]) -> Network:
    topology: Topology = parse_topology(name)
    return Network(topology, chip(topology.chip), devices)


def groups(spec: MeshSpec, places: list[list[int]]) -> list[list[int]]:
    """Of each place of dp, those of the sequence axis."""
    starts = range(0, spec.size, spec.sp)
    return [[start + i for i in group] for start in starts for group in places]


def passes(spec: MeshSpec, split: Degrees) -> list[tuple[int, int]]:
    """Who sends keys to whom."""
    rings = groups(spec, split.rings)
    return [(r[i - 1], r[i]) for r in rings for i in range(len(r))]


@pytest.mark.parametrize(
    ("name", "spec", "heads", "hops"),
    [
        # Heads of CogVideoX1.5-5B and of HunyuanVideo-1.5, a guided pair: rings of
        # eight. The last of a column goes home over the seven links of its way back.
        ("v6e-256", MeshSpec(dp=2, sp=128), 48, 1),
        ("v6e-256", MeshSpec(dp=2, sp=128), 16, 1),
        # Of the original HunyuanVideo: two rings of eight side by side.
        ("v6e-64", MeshSpec(sp=64), 24, 1),
        ("v6e-256", MeshSpec(sp=256), 24, 2),
        ("v6e-256", MeshSpec(sp=256), 48, 1),
    ],
)
def test_rings_pass_on_to_neighbours(
    name: str, spec: MeshSpec, heads: int, hops: int
) -> None:
    split = degrees(heads, spec.sp)
    torus = network(name, torus_order(listed(name), spec))
    near = [pair for pair in passes(spec, split) if pair[0] < pair[1]]
    assert torus.hops(near) == hops
    # Every link has the keys of one device, also those of the way home.
    loads = torus.permute(passes(spec, split), 1.0)
    assert set(loads.values()) == {1.0}
    before = network(name, listed(name)).permute(passes(spec, split), 1.0)
    assert max(before.values()) >= 4


def layer(name: str, devices: Sequence[Device], spec: MeshSpec, heads: int) -> float:
    """Seconds in which the links of a slice move what attention of one layer does.

    Queries, keys, values and the result are exchanged once, keys and values passed on;
    a device has 2 MiB of each.
    """
    split = degrees(heads, spec.sp)
    torus, size = network(name, devices), 2.0 * 2**20
    moved = torus.seconds(torus.all_to_all(groups(spec, split.exchanges), size))
    passed = torus.seconds(torus.permute(passes(spec, split), size))
    return 4 * moved + 2 * (split.ring - 1) * passed


@pytest.mark.parametrize("heads", [48, 24, 16])
@pytest.mark.parametrize("name", LARGE)
def test_no_slice_moves_a_layer_more_slowly_than_in_its_own_order(
    name: str, heads: int
) -> None:
    given = listed(name)
    for dp in (1, 2, 4, 8, 16):
        spec = MeshSpec(dp=dp, sp=-1).resolve(len(given))
        own = layer(name, given, spec, heads)
        assert layer(name, torus_order(given, spec), spec, heads) <= own * (1 + 1e-9)


def test_what_the_order_is_worth() -> None:
    """The largest slice, and one where heads alone are exchanged."""

    def worth(name: str, spec: MeshSpec) -> Any:
        given = listed(name)
        own = layer(name, given, spec, 48)
        return own / layer(name, torus_order(given, spec), spec, 48)

    # (4 * 2 + 14 * 8) / (4 * 2.25 + 14), in units of a device's array over one link.
    assert worth("v6e-256", MeshSpec(dp=2, sp=128)) == pytest.approx(120 / 23)
    assert worth("v6e-64", MeshSpec(dp=4, sp=16)) == pytest.approx(2)
