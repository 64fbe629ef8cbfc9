"""Arrays to the devices of a mesh and back, also where other processes have some.

Every process has the whole array on its host, and puts the parts of its own devices
there. To the host comes what every device has; other arrays are made so first, which
all processes do together, in one order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    import numpy as np


def to_mesh(array: np.ndarray, place: Any) -> Any:
    """An array of the host on the devices; ``place`` may be jax's Format."""
    import jax

    sharding = getattr(place, "sharding", place)
    if sharding.is_fully_addressable:
        return jax.device_put(array, place)
    layout = getattr(place, "layout", None)
    parts = []
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        own: Any = jax.sharding.SingleDeviceSharding(
            device, memory_kind=sharding.memory_kind
        )
        if layout is not None:
            own = type(place)(layout, own)
        parts.append(jax.device_put(array[index], own))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def readable(array: Any) -> Any:
    """An array that this process can read alone.

    An array in parts on the devices of other processes is brought together, by all
    processes at once.
    """
    import jax

    if not isinstance(array, jax.Array):  # a rehearsal's
        return array
    if array.is_fully_addressable or array.is_fully_replicated:
        return array
    return _gather(array.sharding.mesh)(array)


@functools.cache
def _gather(mesh: jax.sharding.Mesh) -> Any:
    import jax

    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda array: array, out_shardings=whole)


def own_devices(devices: Iterable[Any]) -> list[Any]:
    """Those of this process."""
    return [one for one in devices if one.process_index == one.client.process_index()]
