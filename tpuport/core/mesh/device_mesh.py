"""The order of a mesh's devices along the links of their slice.

A slice lists its chips machine by machine, two by two chips each: sixteen of them are
8 x 2. If sixteen devices exchange heads, and pass keys on to the next sixteen
(``sequence_parallel.py``), keys go over half a row of a 16 x 16 slice: eight hops, with
the keys of eight devices on every link of the way.

Here the devices of each place of ``dp`` are a *box* of the slice, as near a square as
there is. The devices of each place of ``sp`` are a box within that box. The order
depends on how many devices a place of ``dp`` has:

- Few: any 2, 4, 8, ... neighbours are a compact box again, which exchanges heads over
  short ways.
- Many: row by row, so that rings of whole rows pass keys on over one hop.

Several slices are joined by the data-centre network alone. The first places of ``dp``
are one slice, the next ones another, and each slice has this order.

Slices in three dims (v5p, v7x) are listed in compact boxes as they are, and keep their
order: by the same rules rings of two would be two hops apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpuport.core.mesh.mesh_spec import MeshSpec, divisors

if TYPE_CHECKING:
    import jax

#: Chips up to which a slice's own order is kept, which has the same boxes.
OWN_ORDER = 8
#: Devices of a place of dp up to which all of its groups are compact. Planned for
#: CogVideoX1.5-5B at 720p, boxes of 4 x 4 that share heads take 0.91 of the step that
#: rows take on 32 devices, 1.11 on 64 and 1.54 on 128: heads are exchanged in half the
#: time, but keys are passed on over four hops, which hides behind long chunks alone.
MOST_COMPACT = 32
#: Chips of a row from which every second one comes first. Half a row then meets the
#: other half one hop on, not eight, where eight devices exchange heads and not sixteen.
LONG_ROW = 16

Place = tuple[int, ...]
"""Coordinates of a chip, the last one first, and the core on it."""
Box = tuple[Place, Place]
"""Its first place, and its size along each axis."""


def torus_order(devices: Sequence[Any], spec: MeshSpec) -> list[Any]:
    """The devices of one slice in the order of the mesh's places (dp, sp, tp).

    The last axis is the fastest. The order depends on the mesh and on where the devices
    are, not on the order of ``devices``. All processes of a run and ``tpuport compile``
    have one order.

    Args:
        devices: all of the mesh there. TPUs have ``coords`` and ``core_on_chip``.
        spec: without an axis of -1.

    Returns:
        the devices. Their order stays if they have no coordinates, share coordinates,
        are on at most :data:`OWN_ORDER` chips, lie in three dims, or do not fill a box
        that divides into boxes for every place.
    """
    given = list(devices)
    found = {_place(device): device for device in given}
    if len(found) < len(given) or len({p[:-1] for p in found}) <= OWN_ORDER:
        return given
    low, high = (tuple(map(end, zip(*found, strict=True))) for end in (min, max))
    size = tuple(b - a + 1 for a, b in zip(low, high, strict=True))
    flat = sum(n > 1 for n in size[:-1]) <= 2
    if math.prod(size) != len(given) or not flat:
        return given
    boxes: list[Box] = [(low, size)]
    for count, row_by_row in _levels(spec):
        boxes = [part for box in boxes for part in _split(box, count, row_by_row)]
    # A box that does not divide has no parts.
    return [found[start] for start, _ in boxes] or given


def _place(device: Any) -> Place:
    coords, core = (getattr(device, n, None) for n in ("coords", "core_on_chip"))
    if coords is None or core is None:
        return ()
    return (*(int(at) for at in reversed(coords)), int(core))


def _levels(spec: MeshSpec) -> list[tuple[int, bool]]:
    """Devices of the boxes that are split off one after the other, down to one.

    With each whether the boxes are the rows of a large place of dp.
    """
    if spec.sp * spec.tp > MOST_COMPACT:
        within = [(spec.tp, True)]
    else:
        within = [(part * spec.tp, False) for part in _parts(spec.sp)]
    heads = [(part, False) for part in _parts(spec.tp)]
    return [(spec.sp * spec.tp, False), *within, *heads]


def _parts(number: int) -> list[int]:
    """What is left of a number by each division by its least factor, down to 1."""
    parts = []
    while number > 1:
        number //= next(f for f in range(2, number + 1) if number % f == 0)
        parts.append(number)
    return parts


def _split(box: Box, count: int, row_by_row: bool) -> list[Box]:
    """The most compact boxes of ``count`` devices that fill a box, in row order.

    Boxes with long rows win among equals. No boxes are returned if no size of boxes
    divides the box.
    """
    start, whole = box
    every = itertools.product(*map(divisors, whole))
    sizes = [size for size in every if math.prod(size) == count]
    if not sizes:
        return []
    size = min(sizes, key=lambda size: (sum(size[:-1]), size[:-1]))
    steps = [list(range(0, w, part)) for w, part in zip(whole, size, strict=True)]
    row = steps[-2]
    if row_by_row and whole[-2] >= LONG_ROW:
        steps[-2] = row[::2] + row[1::2]
    return [
        (tuple(a + step for a, step in zip(start, along, strict=True)), size)
        for along in itertools.product(*steps)
    ]


def by_slice(devices: Iterable[Any]) -> list[list[Any]]:
    """The devices of each slice, in their order; all together if they are no TPUs."""
    found: dict[int, list[Any]] = {}
    for device in devices:
        index = getattr(device, "slice_index", 0) if _place(device) else 0
        found.setdefault(index, []).append(device)
    return [found[index] for index in sorted(found)]


def on_one_slice(mesh: jax.sharding.Mesh) -> tuple[list[jax.Device], dict[str, int]]:
    """The devices of a mesh on its first slice, in order, and how many along each axis.

    The compiler numbers the devices of each slice in this order.
    """
    import numpy as np

    devices = by_slice(mesh.devices.flat)[0]
    ids = [device.id for device in devices]
    places = np.isin([d.id for d in mesh.devices.flat], ids).nonzero()[0]
    along = np.unravel_index(places, mesh.devices.shape)
    sizes = (len(np.unique(one)) for one in along)
    return devices, dict(zip(mesh.axis_names, sizes, strict=True))


def axes_within(mesh: jax.sharding.Mesh) -> list[str]:
    """The axes with several devices, along which none lies on another slice."""
    _, own = on_one_slice(mesh)
    return [a for a, n in own.items() if n > 1 and n == mesh.shape[a]]


@dataclass(frozen=True)
class PlacedMesh:
    """A mesh of devices with what it was made of.

    Attributes:
        spec: without an axis of -1.
        mesh: the devices.
    """

    spec: MeshSpec
    mesh: jax.sharding.Mesh


def place_mesh(
    spec: MeshSpec, devices: Sequence[jax.Device] | None = None
) -> PlacedMesh:
    """The mesh of :func:`build_mesh`, and its spec.

    Raises:
        MeshError: there are too few devices, or dp is not a multiple of the slices.
    """
    mesh = build_mesh(spec, devices)
    return PlacedMesh(MeshSpec(**dict(mesh.shape)), mesh)


def build_mesh(
    spec: MeshSpec, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """The jax mesh of axes (dp, sp, tp) over the first ``spec.size`` devices.

    On more than eight chips of a TPU slice they are put in an order along its links,
    whatever order they come in (:func:`tpuport.core.mesh.device_mesh.torus_order`;
    ``jax.make_mesh`` refuses some subsets of a slice). Otherwise the order of
    ``devices`` is kept. On several slices dp goes across them, and each slice gives as
    many devices. Axis types are Auto, so the compiler chooses the shardings that are
    not given.

    Args:
        spec: may have one axis of -1.
        devices: ``jax.devices()`` when not given.

    Raises:
        MeshError: there are too few devices, or dp is not a multiple of the slices.
    """
    import jax

    found = list(jax.devices() if devices is None else devices)
    spec = spec.resolve(len(found))
    slices = by_slice(found)
    own = spec.within(len(slices), len(found))
    ordered = (torus_order(one[: own.size], own) for one in slices)
    return mesh_over(itertools.chain(*ordered), spec.shape)


def mesh_over(
    devices: Iterable[jax.Device], shape: Mapping[str, int]
) -> jax.sharding.Mesh:
    """Devices in their order along axes, the last one fastest, of type Auto."""
    import jax
    import numpy as np

    return jax.sharding.Mesh(
        np.array(list(devices), dtype=object).reshape(tuple(shape.values())),
        tuple(shape),
        axis_types=(jax.sharding.AxisType.Auto,) * len(shape),
    )
