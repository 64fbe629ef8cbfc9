"""Two calls of one step, run as one program.

Upstream calls a denoiser twice in a guided step: with the prompt, and without. A call
waits until somebody reads its answer. If upstream makes a second call of the same
program first, both run as one: a gather of weights serves both, and an axis of the mesh
that nothing else uses takes one call each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.core.seam.device_tensors import Value
from tpuport.core.tracing.context import AttentionRecord

#: Parameters of forward that tell a denoiser, which upstream calls each step.
_TIMES = frozenset({"timestep", "timesteps"})


def is_denoiser(module: torch.nn.Module) -> bool:
    """Whether upstream calls a module each step: its forward takes a time step."""
    return not _TIMES.isdisjoint(inspect.signature(type(module).forward).parameters)


@dataclass(frozen=True, kw_only=True, eq=False)
class Waiting:
    """A call that waits.

    Attributes:
        program: what runs it.
        inputs: on the devices.
        answers: what upstream has in place of the results.
    """

    program: Any
    inputs: Sequence[jax.Array]
    answers: Sequence[Value]


def together(
    call: Callable[..., list[Any]], differ: Sequence[bool], axis: str | None
) -> Callable[..., tuple[list[Any], list[Any]]]:
    """Two calls as one function of (weights, first inputs, second inputs).

    Args:
        call: of (weights, inputs).
        differ: which inputs differ; the second inputs are those alone.
        axis: of the mesh that takes one call each; ``None`` for no axis.
    """

    def both(
        weights: Any, first: Sequence[Any], second: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        others = iter(second)
        inputs = [
            jnp.stack([one, next(others)]) if differs else one
            for one, differs in zip(first, differ, strict=True)
        ]
        axes = [0 if differs else None for differs in differ]
        found = jax.vmap(
            lambda inputs: call(weights, inputs), in_axes=(axes,), spmd_axis_name=axis
        )(inputs)
        return [one[0] for one in found], [one[1] for one in found]

    return both


def doubled(records: Sequence[AttentionRecord]) -> tuple[AttentionRecord, ...]:
    """What the attention of two calls as one runs as, from that of one."""

    def twice(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (2 * shape[0], *shape[1:])

    return tuple(
        replace(record, query=twice(record.query), key=twice(record.key))
        for record in records
    )
