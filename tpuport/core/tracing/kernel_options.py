"""Options of the project's kernels for the chip that a program is traced for."""

from __future__ import annotations

from typing import Any

import jax

from tpuport.core.mesh.chips import CHIPS
from tpuport.core.tracing.context import OpContext
from tpuport.kernels.attention.selection import DEFAULT_CHIP

#: The share of a core's VMEM that a kernel may take.
VMEM_SHARE = 7 / 8


def kernel_options(context: OpContext) -> dict[str, Any]:
    """``vmem_limit`` and ``interpret`` of the project's kernels for a context."""
    chip = CHIPS[context.chip or DEFAULT_CHIP]
    return {
        "vmem_limit": int(chip.vmem_bytes * VMEM_SHARE),
        # A mesh of other devices stands in for TPUs where a program is only traced.
        "interpret": context.chip is None and jax.default_backend() != "tpu",
    }
