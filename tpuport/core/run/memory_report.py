"""Bytes in use and peak on every device, call by call: measured, or else planned.

Measured numbers are the backend's own, of everything in the device's memory; its peak
is the highest since the process began, which no backend sets back. Planned numbers are
the compiler's, of one program alone: what it is given, what it returns, its code, and
at its peak the memory between. The two are never mixed in one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tpuport.core.mesh.device_memory import plan_of

if TYPE_CHECKING:
    from tpuport.core.programs.program_store import Ready

LIVE, PLANNED, UNKNOWN = "live", "planned", "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """One device after one call.

    Attributes:
        device: such as ``"tpu:3"``.
        in_use: bytes held once the call has ended.
        peak: the most that was held.
    """

    device: str
    in_use: int
    peak: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CallMemory:
    """One call of a stage.

    Attributes:
        stage, program: which.
        call: its number in the stage, from 0, over all batches.
        source: ``"live"``, ``"planned"``, or ``"unknown"`` where the backend tells
            nothing and the call was not compiled.
        devices: of the mesh; empty where nothing is known.
        parts: planned bytes per device by what they are for; empty for live ones.
    """

    stage: str
    program: str
    call: int
    source: str
    devices: tuple[DeviceMemory, ...] = ()
    parts: Mapping[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


class MemoryLog:
    """Gathers :class:`CallMemory` while a stage runs.

    Args:
        devices: those of the mesh.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self._devices = list(devices)
        self.calls: list[CallMemory] = []
        # A program's plan is looked up once; a stage has a few of them.
        self._plans: dict[int, tuple[Ready, Mapping[str, int]]] = {}

    def ended(self, stage: str, call: int, program: str, ready: Ready) -> None:
        """A call has ended; others may be under way by now."""
        found = live_memory(self._devices)
        parts: Mapping[str, int] = {}
        source = LIVE
        if not found:
            parts = self._plan(ready)
            source = PLANNED if parts else UNKNOWN
            found = planned_memory(_used_by(ready, self._devices), parts)
        self.calls.append(
            CallMemory(
                stage=stage,
                program=program,
                call=call,
                source=source,
                devices=found,
                parts=parts,
            )
        )

    def _plan(self, ready: Ready) -> Mapping[str, int]:
        if id(ready) not in self._plans:
            self._plans[id(ready)] = (ready, plan_of(ready.call))
        return self._plans[id(ready)][1]

    def take(self) -> tuple[dict[str, Any], ...]:
        """The calls so far, JSON-ready; they are then forgotten."""
        calls, self.calls = self.calls, []
        self._plans.clear()
        return tuple(call.as_dict() for call in calls)


class RunMemory:
    """The calls of the stages of a run so far, for where one of them fails."""

    def __init__(self) -> None:
        self._run: Any = None
        self._stages: dict[str, tuple[str, Sequence[Mapping[str, Any]]]] = {}

    def clear(self) -> None:
        """The run is over."""
        self._run = None
        self._stages.clear()

    def begins(self, run: Any, stage: str) -> None:
        """A stage begins; what another run told, or this one from it on, is forgotten.

        Args:
            run: compares equal for the stages of one run, such as its request.
        """
        names = list(self._stages)
        if run != self._run:
            self.clear()
        elif stage in names:
            for name in names[names.index(stage) :]:
                del self._stages[name]
        self._run = run

    def ended(self, stage: str, unit: str, calls: Sequence[Mapping[str, Any]]) -> None:
        """A stage ended, well or not; ``calls`` as :meth:`MemoryLog.take` has them."""
        if calls:
            self._stages[stage] = (unit, calls)

    def text(self) -> str:
        """A table of all that was told, for people; nothing where that is nothing."""
        stages = [(name, unit, calls) for name, (unit, calls) in self._stages.items()]
        return "\n".join(["memory until then:", *lines(stages)]) if stages else ""


def live_memory(devices: Iterable[Any]) -> tuple[DeviceMemory, ...]:
    """What the backend says of each device; empty where it keeps no count (CPU)."""
    found = []
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_in_use" not in stats:
            return ()
        in_use = int(stats["bytes_in_use"])
        peak = int(stats.get("peak_bytes_in_use", in_use))
        found.append(DeviceMemory(device=_name(device), in_use=in_use, peak=peak))
    return tuple(found)


def planned_memory(
    devices: Iterable[Any], parts: Mapping[str, int]
) -> tuple[DeviceMemory, ...]:
    """The plan of a program on each of its devices; empty without a plan."""
    if not parts:
        return ()
    in_use = parts["arguments"] + parts["outputs"] - parts["shared"] + parts["code"]
    peak = in_use + parts["temporaries"]
    return tuple(
        DeviceMemory(device=_name(device), in_use=in_use, peak=peak)
        for device in devices
    )


def _used_by(ready: Ready, devices: Sequence[Any]) -> list[Any]:
    """The devices that a compiled program runs on; all of them when it cannot tell."""
    import jax

    shardings = getattr(ready.call, "output_shardings", None)
    for sharding in jax.tree.leaves(shardings):
        used = getattr(sharding, "device_set", None)
        if used:
            return [device for device in devices if device in used]
    return list(devices)


def _name(device: Any) -> str:
    return f"{device.platform}:{device.id}"


# --- for people


def table(
    stages: Iterable[tuple[str, str, Sequence[Mapping[str, Any]]]],
) -> list[list[str]]:
    """Rows of text: a head, and a line for the calls in a row that are alike.

    Args:
        stages: (name, what one call is called, its calls as :meth:`MemoryLog.take`
            gives them).
    """
    rows = [["stage", "call", "program", "device", "in use", "peak", ""]]
    for stage, unit, calls in stages:
        for group in _alike(calls):
            first, last = group[0]["call"] + 1, group[-1]["call"] + 1
            which = f"{unit} {first}" + (f"-{last}" if last > first else "")
            head = [stage, which, group[0]["program"]]
            for place, device in enumerate(_same_devices(group[0]["devices"])):
                rows.append(
                    [
                        *(head if place == 0 else ["", "", ""]),
                        device[0],
                        _mebibytes(device[1]),
                        _mebibytes(device[2]),
                        group[0]["source"],
                    ]
                )
            if not group[0]["devices"]:
                rows.append([*head, "", "-", "-", group[0]["source"]])
    return rows


def lines(
    stages: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]],
) -> list[str]:
    """:func:`table` in aligned columns, and what its sources mean."""
    rows = table(stages)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    made = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    sources = dict.fromkeys(c["source"] for _, _, calls in stages for c in calls)
    return [f"  {x}".rstrip() for x in [*made, *(EXPLAINED[s] for s in sources)]]


def _alike(calls: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Calls in a row that have the same program and the same numbers."""
    groups: list[list[Mapping[str, Any]]] = []
    for call in calls:
        rest = {key: value for key, value in call.items() if key != "call"}
        before = groups[-1][-1] if groups else None
        if before is not None and rest == {
            key: value for key, value in before.items() if key != "call"
        }:
            groups[-1].append(call)
        else:
            groups.append([call])
    return groups


def _same_devices(
    devices: Sequence[Mapping[str, Any]],
) -> list[tuple[str, int, int]]:
    """Devices with the same numbers in one: ``tpu:0-3``, ``tpu:0,2``."""
    found: dict[tuple[int, int], list[str]] = {}
    for device in devices:
        key = (device["in_use"], device["peak"])
        found.setdefault(key, []).append(device["device"])
    return [(_names(names), *numbers) for numbers, names in found.items()]


def _names(names: Sequence[str]) -> str:
    platform = names[0].split(":")[0]
    numbers = [int(name.split(":")[1]) for name in names]
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{platform}:{numbers[0]}-{numbers[-1]}"
    return f"{platform}:{','.join(map(str, numbers))}"


def _mebibytes(size: int) -> str:
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.1f} MiB"


EXPLAINED = {
    LIVE: "live: the device's own count after the call; peak since the process began",
    PLANNED: "planned: the compiler's, for the program alone; this backend keeps no "
    "count",
    UNKNOWN: "unknown: this backend keeps no count, and what runs op by op has no plan",
}
"""A line for each source that a table has."""
