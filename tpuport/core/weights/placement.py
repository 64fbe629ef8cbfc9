"""Weights from their files to their shards, one tensor at a time.

Of a tensor the parts that the devices of this process hold are read, each once. A stack
of blocks is filled on the devices: the devices make empty buffers, and every tensor is
written into its buffer as it comes. The host holds no more of a stack than of any other
weight, and the devices hold each weight once. A stack that waits on the host is put
together there.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.core.arrays import array_dtype
from tpuport.core.mesh.device_memory import HOST, on_host
from tpuport.core.tracing.array_layout import in_order
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights.file_parts import IN_FLIGHT, Index
from tpuport.core.weights.sharding import ShardingPlan, named_shardings
from tpuport.errors import ShardingError

Bounds = tuple[tuple[int, int], ...]
"""A start and a stop for each dim."""

#: Most bytes of a stack put together on the host: biases, and scales of norms.
GATHERED_BYTES = 4 * 2**20
#: Most bytes of parts that are read ahead, beside the next one.
AHEAD_BYTES = 256 * 2**20


def abstract_weights(
    ported: PortedModule,
    plan: ShardingPlan,
    mesh: jax.sharding.Mesh,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype, sharding and layout of a module's arrays; nothing is read.

    A stack is split like its blocks; its leading dim is whole. Buffers that no file
    holds are replicated. ``ported.gathered`` notes weights that the plan holds in more
    parts than a block uses, ``ported.streamed`` those that wait on the host.

    Args:
        ported: the module, which may be on the meta device.
        plan: plan of the stored tensors, by their names in the module.

    Raises:
        ShardingError: the plan has problems, or splits the blocks of a stack in
            different ways.
    """
    shardings = named_shardings(plan, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    tensors = ported.tensors()
    found: dict[str, jax.ShapeDtypeStruct] = {}
    streamed: dict[str, NamedSharding] = {}
    for array, members in ported.arrays.items():
        each = {name: shardings.get(name, replicated) for name in members}
        sharding = each[members[0]]
        for name, other in each.items():
            if other != sharding:
                raise ShardingError(
                    f"sharding of {plan.component}: {name} is split by {other.spec} "
                    f"and {members[0]} by {sharding.spec}; stacked blocks ({array}) "
                    "are all split alike"
                )
        if ported.leading(array):
            if members[0] in plan.streamed:
                streamed[array] = sharding.with_memory_kind("device")
            kind = HOST if members[0] in plan.streamed else None
            spec = PartitionSpec(None, *sharding.spec)
            sharding = NamedSharding(mesh, spec, memory_kind=kind)
        one = tensors[members[0]]
        shape = ported.leading(array) + tuple(one.shape)
        place = sharding if ported.leading(array) else in_order(shape, sharding)
        found[array] = jax.ShapeDtypeStruct(shape, array_dtype(one), sharding=place)
    used_as = {
        array: NamedSharding(mesh, PartitionSpec(*plan.assignments[members[0]]))
        for array, members in ported.arrays.items()
        if members[0] in plan.held
    }
    ported.gathered, ported.streamed = used_as, streamed
    return found


def place_weights(
    ported: PortedModule,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    read: Callable[[str, Index], np.ndarray],
    *,
    ahead: bool = False,
) -> dict[str, jax.Array]:
    """The arrays ``wanted``; every process that has some of their devices calls this.

    Each tensor is on its way to the devices before the next is read, and at most two
    are in flight. Stacks of up to :data:`GATHERED_BYTES` are put together on the
    host, which compiles no program for their shapes; so are stacks that stay there.

    Args:
        wanted: the result of :func:`abstract_weights`.
        read: ``read(name, index)`` gives a part of a tensor, by its name in the module,
            in memory that nothing else uses.
        ahead: read the next parts by threads while one is on its way: a store answers
            late.
    """
    if ahead:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            given = _Ahead(pool, read, _asked(ported, wanted))
            try:
                return place_weights(ported, wanted, given.part)
            finally:
                pool.shutdown(cancel_futures=True)
    weights: dict[str, Any] = {}
    before: jax.Array | None = None
    for array, members in ported.arrays.items():
        if array not in wanted:
            continue
        struct = wanted[array]
        size = struct.size * struct.dtype.itemsize
        if len(members) == 1:
            part = functools.partial(read, members[0])
            weights[array] = _from_parts(struct.shape, struct.format, part)
        elif on_host(struct) or size <= GATHERED_BYTES:
            part = functools.partial(_stacked, members, read)
            weights[array] = _from_parts(struct.shape, struct.sharding, part)
        else:
            make, write, one = _filling(struct.shape, struct.dtype, struct.sharding)
            weights[array] = make()
            for index, name in enumerate(members):
                part = functools.partial(read, name)
                layer = _from_parts(struct.shape[1:], one, part)
                # Before a write takes over the memory of the last: then nothing can be
                # awaited.
                jax.block_until_ready(before)
                before = weights[array] = write(weights[array], layer, index)
            continue
        jax.block_until_ready(before)
        before = weights[array]
    return jax.block_until_ready(weights)


def _asked(
    ported: PortedModule, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[tuple[str, Index, int]]:
    """The parts that :func:`place_weights` reads, in that order, and their bytes."""
    for array, members in ported.arrays.items():
        if array not in wanted:
            continue
        struct = wanted[array]
        parts = _held(struct.shape, struct.sharding)
        size = struct.size * struct.dtype.itemsize
        pairs = [(name, one) for one in parts for name in members]
        if len(members) > 1 and not on_host(struct) and size > GATHERED_BYTES:
            pairs = [(name, one) for name in members for one in parts]
        for name, bounds in pairs:
            own = bounds[len(members) > 1 :]
            count = math.prod(stop - start for start, stop in own)
            index = tuple(slice(*pair) for pair in own)
            yield name, index, count * struct.dtype.itemsize


class _Ahead:
    """Reads parts by threads before they are asked for, in the order of the asking."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        read: Callable[[str, Index], np.ndarray],
        asked: Iterator[tuple[str, Index, int]],
    ) -> None:
        self._pool, self._read, self._asked = pool, read, asked
        self._waiting: deque[tuple[str, Index, int, Future[np.ndarray]]] = deque()

    def part(self, name: str, index: Index) -> np.ndarray:
        """What ``read`` gives."""
        self._fill()
        found, at, _, future = self._waiting.popleft()
        assert (found, at) == (name, index)
        self._fill()
        return future.result()

    def _fill(self) -> None:
        while len(self._waiting) < IN_FLIGHT:
            total = sum(size for _, _, size, _ in self._waiting)
            if self._waiting and total > AHEAD_BYTES:
                return
            one = next(self._asked, None)
            if one is None:
                return
            self._waiting.append((*one, self._pool.submit(self._read, *one[:2])))


def _bounds(index: Index, shape: tuple[int, ...]) -> Bounds:
    pairs = zip(index, shape, strict=True)
    return tuple(one.indices(size)[:2] for one, size in pairs)


def _from_parts(
    shape: tuple[int, ...], place: Any, read: Callable[[Index], np.ndarray]
) -> jax.Array:
    """An array of parts, each of which is read once for the devices here that hold the
    part."""
    parts = {
        bounds: read(tuple(slice(*pair) for pair in bounds))
        for bounds in _held(shape, getattr(place, "sharding", place))
    }
    return jax.make_array_from_callback(
        shape, place, lambda index: parts[_bounds(index, shape)]
    )


def _held(shape: tuple[int, ...], sharding: Any) -> list[Bounds]:
    """The parts that devices of this process hold, each once."""
    held = sharding.addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(_bounds(index, shape) for index in held))


def _stacked(
    members: tuple[str, ...], read: Callable[[str, Index], np.ndarray], index: Index
) -> np.ndarray:
    """A part of a stack, of which every device has all blocks."""
    return np.stack([read(name, index[1:]) for name in members])


@functools.cache
def _filling(
    shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.NamedSharding
) -> tuple[Any, Any, jax.sharding.NamedSharding]:
    """``make() -> stack``, ``write(stack, layer, index) -> stack`` in the same memory,
    and the sharding of a layer."""

    def make() -> jax.Array:
        return jnp.zeros(shape, dtype)

    def write(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)

    one = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    return (
        # Make the buffer on the devices: streaming avoids a host array of this size.
        jax.jit(make, out_shardings=sharding),
        jax.jit(write, donate_argnums=0, out_shardings=sharding),
        one,
    )
