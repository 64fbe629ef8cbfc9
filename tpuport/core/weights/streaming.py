"""Weights of stacked blocks that wait in the host's memory and stream to the devices.

Vectors and small weights stay on the devices. They would save little, and a TPU cannot
cut one of a stack of vectors in the host's memory (libtpu 0.0.42.1: "Sublane slicing
size must be multiple of element packing factor").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights.gathering import SMALLEST
from tpuport.core.weights.sharding import ShardingPlan, spec_axes, weight_bytes


def streamable(
    plan: ShardingPlan, ported: PortedModule, weights: Mapping[str, Any]
) -> dict[str, int]:
    """The weights that may wait on the host -> bytes of each on a device.

    Args:
        plan: of a module whose blocks run under scans.
        weights: as :func:`~tpuport.core.weights.sharding.plan_sharding` took them.
    """
    specs = {**plan.assignments, **plan.held}
    found: dict[str, int] = {}
    for array, members in ported.arrays.items():
        if not ported.leading(array) or members[0] not in specs:
            continue
        shape = tuple(weights[members[0]].shape)
        if len(shape) < 2 or math.prod(shape) < SMALLEST:
            continue
        axes = (axis for entry in specs[members[0]] for axis in spec_axes(entry))
        ways = math.prod(plan.mesh[axis] for axis in axes)
        found |= {name: weight_bytes(weights[name]) // ways for name in members}
    return found


def streaming(plan: ShardingPlan, waiting: Mapping[str, int]) -> ShardingPlan:
    """``plan`` with weights on the host, of :func:`streamable`."""
    total = sum(waiting.values())
    return replace(
        plan,
        streamed=frozenset(waiting),
        bytes_per_device=plan.bytes_per_device - total,
        host_bytes_per_device=total,
    )
