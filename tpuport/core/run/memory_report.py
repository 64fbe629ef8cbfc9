"""Bytes in use and peak on every device, call by call: measured, or else planned.

Measured numbers are the backend's own, of everything in the device's memory; its peak
is the highest since the process began, which no backend sets back. Planned numbers are
the compiler's, of one program alone: what it is given, what it returns, its code, and
at its peak the memory between. The two are never mixed in one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tpuport.core.mesh.device_memory import plan_of
from tpuport.core.reports import LIVE, PLANNED, UNKNOWN, CallMemory, DeviceMemory


def memory_after(
    devices: Sequence[Any], compiled: Any, stage: str, program: str, call: int
) -> CallMemory:
    """What is on the devices of a mesh when a call has ended; others may be under way.

    Args:
        compiled: what ran; ``None`` if nothing was compiled.
        call: its number in the stage.
    """
    parts: Mapping[str, int] = {}
    source, found = LIVE, _live(devices)
    if not found:
        parts = plan_of(compiled)
        source = PLANNED if parts else UNKNOWN
        found = _planned(compiled, devices, parts) if parts else ()
    return CallMemory(
        stage=stage,
        program=program,
        call=call,
        source=source,
        devices=found,
        parts=parts,
    )


def _live(devices: Sequence[Any]) -> tuple[DeviceMemory, ...]:
    """What the backend says of each device; empty where it keeps no count (CPU)."""
    counts = [device.memory_stats() or {} for device in devices]
    if not all("bytes_in_use" in count for count in counts):
        return ()
    return tuple(
        _device(device, count["bytes_in_use"], count.get("peak_bytes_in_use"))
        for device, count in zip(devices, counts, strict=True)
    )


def _planned(
    compiled: Any, devices: Sequence[Any], parts: Mapping[str, int]
) -> tuple[DeviceMemory, ...]:
    """The plan of a program on its devices; on all where it does not tell which."""
    in_use = parts["arguments"] + parts["outputs"] - parts["shared"] + parts["code"]
    shardings = jax.tree.leaves(getattr(compiled, "output_shardings", None))
    sets = (getattr(sharding, "device_set", None) for sharding in shardings)
    used = next(filter(None, sets), devices)
    peak = in_use + parts["temporaries"]
    return tuple(_device(d, in_use, peak) for d in devices if d in used)


def _device(device: Any, in_use: int, peak: int | None) -> DeviceMemory:
    name = f"{device.platform}:{device.id}"
    peak = in_use if peak is None else peak
    return DeviceMemory(device=name, in_use=int(in_use), peak=int(peak))
