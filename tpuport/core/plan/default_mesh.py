"""The mesh that is taken where the user names none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tpuport.core.enums import Blocks
from tpuport.core.mesh.mesh_spec import MeshSpec, auto_mesh

if TYPE_CHECKING:
    import jax

    from tpuport.core.spec.model_port import ModelPort
    from tpuport.core.weights.checkpoint import Checkpoint


def default_mesh(
    port: ModelPort,
    checkpoint: Checkpoint,
    devices: Sequence[jax.Device],
    *,
    rows: int,
) -> MeshSpec:
    """One CPU device, or all devices of another kind.

    On TPUs, native blocks (``port.blocks``) split tokens. Nothing is split by heads
    then, and nothing is summed over the network. Weights that are too large for a chip
    are gathered block by block; see :mod:`tpuport.core.weights.gathering`.

    dp must divide ``rows``, the rows of the denoiser's batch.

    Raises:
        MeshError: there is no device.
    """
    if devices and devices[0].platform == "cpu":
        return MeshSpec()
    heads = heads_of(port, checkpoint)
    native = any(c.native is not None for c in port.components.values())
    tokens = native and port.blocks == Blocks.NATIVE and devices[0].platform == "tpu"
    return auto_mesh(len(devices), heads=heads, batch=rows, tokens=tokens)


def heads_of(port: ModelPort, checkpoint: Checkpoint) -> dict[str, int]:
    """Attention heads by component, which tp has to divide."""
    return {
        name: component.heads(checkpoint.config(name))
        for name, component in port.components.items()
        if component.heads is not None and checkpoint.has(name)
    }
