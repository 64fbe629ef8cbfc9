"""Weights from their files to their shards, one tensor at a time.

Of a tensor the parts that the devices of this process hold are read, each once. A stack
of blocks is filled on the devices: the devices make empty buffers, and every tensor is
written into its buffer as it comes. The host holds no more of a stack than of any other
weight, and the devices hold each weight once. A stack that waits on the host is put
together there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.core.arrays import array_dtype
from tpuport.core.mesh.device_memory import HOST, on_host
from tpuport.core.tracing.array_layout import in_order
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights.file_parts import IN_FLIGHT, Index
from tpuport.core.weights.sharding import ShardingPlan, named_shardings
from tpuport.core.weights.stored_tensors import stored_in
from tpuport.errors import ShardingError

Bounds = tuple[tuple[int, int], ...]
"""A start and a stop for each dim."""

#: Most bytes of a stack put together on the host: biases, and scales of norms.
GATHERED_BYTES = 4 * 2**20
#: Most bytes of files that are read ahead, beside the next part.
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
    steps = [*_steps(ported, wanted)]
    asked = [(name, index) for step in steps for _, name, index in step.parts()]
    weights: dict[str, Any] = {}
    before: jax.Array | None = None
    given: Iterator[np.ndarray] = itertools.starmap(read, asked)
    with contextlib.ExitStack() as stack:
        if ahead:
            tensors = ported.tensors()
            sizes = [_bytes_of(tensors[name], index) for name, index in asked]
            pool = stack.enter_context(ThreadPoolExecutor(IN_FLIGHT))
            stack.callback(pool.shutdown, cancel_futures=True)
            given = _read_ahead(pool, read, asked, sizes)
        for step in steps:
            if step.at is None:
                made = step.placed(given)
                jax.block_until_ready(before)
                weights[step.array] = made
            else:
                struct = wanted[step.array]
                make, write = _filling(struct.shape, struct.dtype, struct.sharding)
                if step.at == 0:
                    weights[step.array] = make()
                layer = step.placed(given)
                # Before a write takes over the memory of the last: then nothing can be
                # awaited.
                jax.block_until_ready(before)
                weights[step.array] = write(weights[step.array], layer, step.at)
            before = weights[step.array]
    return jax.block_until_ready(weights)


@dataclass(frozen=True)
class _Step:
    """What goes to the devices at once.

    Attributes:
        array: that this is, or is a block of.
        names: of the tensors, several for a stack that is put together on the host.
        shape: of what goes.
        place: its sharding, or format.
        at: the number of the block; ``None`` for a whole array.
    """

    array: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    place: Any
    at: int | None = None

    def parts(self) -> Iterator[tuple[Bounds, str, Index]]:
        """What is read, in the order of the reads: a part, and what of a tensor is in
        the part."""
        for bounds in _held(self.shape, getattr(self.place, "sharding", self.place)):
            index = tuple(slice(*pair) for pair in bounds)
            for name in self.names:
                yield bounds, name, index[len(self.names) > 1 :]

    def placed(self, given: Iterator[np.ndarray]) -> jax.Array:
        """The array of its parts, which are read once for all devices that hold them.

        Args:
            given: the tensors' parts, of which this takes its own.
        """
        found: dict[Bounds, list[np.ndarray]] = {}
        for (bounds, *_), part in zip(self.parts(), given, strict=False):
            found.setdefault(bounds, []).append(part)
        several = len(self.names) > 1
        parts = {b: np.stack(one) if several else one[0] for b, one in found.items()}
        return jax.make_array_from_callback(
            self.shape, self.place, lambda index: parts[_bounds(index, self.shape)]
        )


def _steps(
    ported: PortedModule, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[_Step]:
    for array, members in ported.arrays.items():
        if array not in wanted:
            continue
        struct = wanted[array]
        size = struct.size * struct.dtype.itemsize
        if len(members) == 1:
            yield _Step(array, members, struct.shape, struct.format)
        elif on_host(struct) or size <= GATHERED_BYTES:
            yield _Step(array, members, struct.shape, struct.sharding)
        else:
            place = struct.sharding
            one = NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))
            for at, name in enumerate(members):
                yield _Step(array, (name,), struct.shape[1:], one, at)


def _bytes_of(tensor: torch.Tensor, index: Index) -> int:
    """Bytes of a part of a tensor as its file has the tensor."""
    count = math.prod(one.stop - one.start for one in index)
    stored = stored_in([tensor])
    dtype = stored[0].written if stored else tensor.dtype
    return count * dtype.itemsize


def _read_ahead(
    pool: ThreadPoolExecutor,
    read: Callable[[str, Index], np.ndarray],
    asked: Sequence[tuple[str, Index]],
    sizes: Sequence[int],
) -> Iterator[np.ndarray]:
    """What ``read`` gives, read by threads before it is taken, in the order asked."""
    waiting: deque[tuple[int, Future[np.ndarray]]] = deque()
    left = zip(sizes, asked, strict=True)

    def fill() -> None:
        while len(waiting) < IN_FLIGHT:
            if waiting and sum(size for size, _ in waiting) > AHEAD_BYTES:
                return
            if (one := next(left, None)) is None:
                return
            waiting.append((one[0], pool.submit(read, *one[1])))

    def taken() -> np.ndarray:
        _, future = waiting.popleft()
        fill()
        return future.result()

    fill()
    while waiting:
        yield taken()


def _bounds(index: Index, shape: tuple[int, ...]) -> Bounds:
    pairs = zip(index, shape, strict=True)
    return tuple(one.indices(size)[:2] for one, size in pairs)


def _held(shape: tuple[int, ...], sharding: Any) -> list[Bounds]:
    """The parts that devices of this process hold, each once."""
    held = sharding.addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(_bounds(index, shape) for index in held))


@functools.cache
def _filling(
    shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.NamedSharding
) -> tuple[Any, Any]:
    """``make() -> stack``; ``write(stack, layer, index) -> stack`` in its memory."""

    def make() -> jax.Array:
        return jnp.zeros(shape, dtype)

    def write(stack: jax.Array, layer: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0)

    return (
        # Make the buffer on the devices: streaming avoids a host array of this size.
        jax.jit(make, out_shardings=sharding),
        jax.jit(write, donate_argnums=0, out_shardings=sharding),
    )
