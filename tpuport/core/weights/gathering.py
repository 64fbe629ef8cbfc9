"""Weights of stacked blocks, held in parts and gathered block by block.

If tokens are split over the mesh, every device multiplies with whole weights. The
weights of stacked blocks need not all be whole at once: each device holds a part of
every weight, and the devices gather a block when its turn comes (Zhao et al. 2023,
arXiv:2304.11277, for training). A device then holds one block whole at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from tpuport.core.mesh.chips import chip as chip_named
from tpuport.core.mesh.chips import chip_of
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights.sharding import ShardingPlan, Spec, spec_axes, weight_bytes

#: Share of a chip's memory for weights; the rest is for activations.
WEIGHT_SHARE = 0.7
#: Weights with fewer elements stay whole: gathering them costs more than it saves.
SMALLEST = 1 << 16


def usable_memory(devices: Iterable[jax.Device]) -> float:
    """Bytes of a device that programs may use; no limit if the chip is not a TPU."""
    device = next(iter(devices))
    if device.platform != "tpu":
        return math.inf
    return chip_named(chip_of(device)).hbm_usable_bytes


def room_for_weights(devices: Iterable[jax.Device]) -> float:
    """Bytes of a device that weights may take; no limit if the chip is not a TPU."""
    return WEIGHT_SHARE * usable_memory(devices)


def gathered(
    plan: ShardingPlan,
    ported: PortedModule,
    weights: Mapping[str, Any],
    *,
    room: float,
    within: Collection[str],
) -> ShardingPlan:
    """``plan`` with the weights of stacked blocks in parts, if they need parts.

    Parts are needed if the weights exceed ``room``. Weights are split along sp, or
    along dp and sp if parts along sp are too large.

    Args:
        plan: a plan of whole weights, or of weights that tp splits.
        weights: as :func:`plan_sharding` took them.
        room: bytes of a device that the weights may take.
        within: the axes of the mesh that lie within a slice; others hold no parts.
    """
    found = plan
    if plan.bytes_per_device <= room:
        return found
    for axes in (("sp",), ("dp",), ("dp", "sp")):
        if not {*axes} <= {*within}:
            continue
        finer = _in_parts(plan, ported, weights, axes)
        if finer.bytes_per_device < found.bytes_per_device:
            found = finer
        if found.held and found.bytes_per_device <= room:
            break
    return found


def _in_parts(
    plan: ShardingPlan,
    ported: PortedModule,
    weights: Mapping[str, Any],
    axes: Sequence[str],
) -> ShardingPlan:
    parts = math.prod(plan.mesh[axis] for axis in axes)
    held: dict[str, Spec] = {}
    saved = 0
    for array, members in ported.arrays.items():
        if not ported.leading(array) or members[0] not in plan.assignments:
            continue
        shape = tuple(int(size) for size in weights[members[0]].shape)
        spec = plan.assignments[members[0]]
        finer = _finer(spec, shape, axes, plan.mesh)
        if finer is None:
            continue
        ways = math.prod(plan.mesh[a] for entry in spec for a in spec_axes(entry))
        size = weight_bytes(weights[members[0]]) // ways
        held |= dict.fromkeys(members, finer)
        saved += (size - size // parts) * len(members)
    return replace(
        plan,
        held=held,
        gathered_over=tuple(axes) if held else (),
        bytes_per_device=plan.bytes_per_device - saved,
        gathered_bytes_per_device=saved,
    )


def _finer(
    spec: Spec, shape: Sequence[int], axes: Sequence[str], mesh: Mapping[str, int]
) -> Spec | None:
    """``spec`` with one dim split over ``axes`` too; None if no dim divides."""
    if math.prod(shape) < SMALLEST:
        return None
    entries = list(spec) + [None] * (len(shape) - len(spec))
    parts = math.prod(mesh[axis] for axis in axes)
    # The first dim that nothing splits: whole rows move.
    order = sorted(range(len(shape)), key=lambda dim: entries[dim] is not None)
    for dim in order:
        own = spec_axes(entries[dim])
        if shape[dim] % (parts * math.prod(mesh[axis] for axis in own)) == 0:
            entries[dim] = (*own, *axes)
            return tuple(entries)
    return None
