"""Weights from the host to their shards, one tensor at a time.

A stack of blocks is filled on the devices: the devices make empty buffers, and every
tensor is written into its buffer as it comes. The host holds no more of a stack than of
any other weight, and the devices hold each weight once. A stack that waits on the host
is put together there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.core.arrays import array_dtype
from tpuport.core.mesh.device_memory import HOST, on_host
from tpuport.core.mesh.mesh_arrays import to_mesh
from tpuport.core.tracing.array_layout import in_order
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights.sharding import ShardingPlan, named_shardings
from tpuport.errors import ShardingError

#: Most bytes of a stack put together on the host: biases, and scales of norms.
GATHERED_BYTES = 4 * 2**20


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
    tensors: Iterable[tuple[str, np.ndarray]],
) -> dict[str, jax.Array]:
    """The arrays ``wanted``, filled from ``tensors`` in any order.

    Each tensor is on its way to the devices before the next is read, and at most two
    are in flight. Stacks of up to :data:`GATHERED_BYTES` are put together on the
    host, which compiles no program for their shapes; so are stacks that stay there.

    Args:
        wanted: the result of :func:`abstract_weights`.
        tensors: every tensor of every wanted array, by its name in the module.
    """
    places = {
        name: (array, index)
        for array, members in ported.arrays.items()
        if array in wanted
        for index, name in enumerate(members)
    }
    weights: dict[str, Any] = {}
    before: jax.Array | None = None
    gathered: dict[str, list[Any]] = {}
    for name, tensor in tensors:
        array, index = places.pop(name)
        struct, members = wanted[array], ported.arrays[array]
        write: Any = None
        if len(members) == 1:
            part = to_mesh(tensor, struct.format, may_alias=False)
        elif on_host(struct) or struct.size * struct.dtype.itemsize <= GATHERED_BYTES:
            layers = gathered.setdefault(array, [None] * len(members))
            layers[index] = tensor
            if any(layer is None for layer in layers):
                continue
            stack = np.stack(gathered.pop(array))
            part = to_mesh(stack, struct.sharding, may_alias=False)
        else:
            make, write, one = _filling(struct.shape, struct.dtype, struct.sharding)
            if array not in weights:
                weights[array] = make()
            part = to_mesh(tensor, one)
        # Before a write takes over the memory of the last: then nothing can be awaited.
        jax.block_until_ready(before)
        before = write(weights[array], part, index) if write else part
        weights[array] = before
    assert not places, f"no tensor for {next(iter(places))}"
    return jax.block_until_ready(weights)


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
