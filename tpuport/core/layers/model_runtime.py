"""The runtime of a model: op overrides of every model, and of this model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpuport.core.layers.exchanged_attention import EXCHANGED_ATTENTION
from tpuport.core.tracing.op_overrides import OpOverride
from tpuport.core.tracing.runtime import Runtime

EVERYWHERE: tuple[OpOverride, ...] = (EXCHANGED_ATTENTION,)
"""The op overrides of every model."""


def model_runtime(*, overrides: Sequence[OpOverride] = (), **settings: Any) -> Runtime:
    """A runtime that has :data:`EVERYWHERE` in front of a model's own overrides.

    Args:
        overrides: the model's own.
        settings: the other fields of :class:`~tpuport.core.tracing.runtime.Runtime`.

    Raises:
        OpConflictError: an operator does not exist, or is claimed twice.
    """
    return Runtime(overrides=(*EVERYWHERE, *overrides), **settings)
