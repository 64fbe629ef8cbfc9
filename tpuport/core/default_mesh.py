"""The mesh that is taken where the user names none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpuport.core import checkpoint as checkpoints
from tpuport.core.arrays import torch_dtype
from tpuport.core.chips import chip as chip_named
from tpuport.core.chips import chip_of
from tpuport.core.mesh import MeshSpec, auto_mesh

if TYPE_CHECKING:
    import jax
    import torch

    from tpuport.core.checkpoint import Checkpoint
    from tpuport.core.spec import ModelPort

#: Of a chip's memory, for weights that are whole on it: the rest is for activations.
WEIGHT_SHARE = 0.7

Skeleton = Callable[[str], "torch.nn.Module"]


def default_mesh(
    port: ModelPort,
    checkpoint: Checkpoint,
    devices: Sequence[jax.Device],
    *,
    rows: int,
    dtype: str,
    together: bool = False,
) -> MeshSpec:
    """One CPU device, or all devices of another kind.

    On TPUs, where the model's blocks split tokens (``port.blocks`` is native), heads
    are split only as far as the weights ask for: with whole weights on every device
    nothing is summed over the network.

    Args:
        port: the model, with its blocks in place.
        checkpoint: its configs.
        devices: to choose from.
        rows: of the denoiser's batch, which dp must divide.
        dtype: of the weights.
        together: whether the weights of all stages are on the devices at once.

    Raises:
        MeshError: there is no device.
    """
    if devices and devices[0].platform == "cpu":
        return MeshSpec()
    heads = {
        name: component.heads(checkpoint.config(name))
        for name, component in port.components.items()
        if component.heads is not None and checkpoint.has(name)
    }
    room = None
    native = any(c.native is not None for c in port.components.values())
    if native and port.blocks == "native" and devices[0].platform == "tpu":
        chip = chip_named(chip_of(devices[0]))
        needed = weight_bytes(port, checkpoint, dtype, together=together)
        room = needed / (WEIGHT_SHARE * chip.hbm_usable_bytes)
    return auto_mesh(len(devices), heads=heads, batch=rows, parts=room)


def weight_bytes(
    port: ModelPort, checkpoint: Checkpoint, dtype: str, *, together: bool
) -> int:
    """Bytes of the weights that are on the devices at once, before any split.

    Those of the stage with the most of them, or of all components if ``together``.
    """
    sizes = {
        name: _size(port, checkpoint, name, component.dtype or dtype)
        for name, component in port.components.items()
        if checkpoint.has(name)
    }
    if together:
        return sum(sizes.values())
    return max(sum(sizes.get(n, 0) for n in stage.components) for stage in port.stages)


_sizes: dict[tuple[Any, ...], int] = {}


def _size(port: ModelPort, checkpoint: Checkpoint, name: str, dtype: str) -> int:
    config: Mapping[str, Any] = checkpoint.config(name)
    key = (port.name, port.form, name, repr(sorted(config.items(), key=str)))
    if key not in _sizes:
        module = checkpoints.build_skeleton(port.components[name], config)
        _sizes[key] = sum(p.numel() for p in module.state_dict().values())
    return _sizes[key] * torch_dtype(dtype).itemsize
