"""A look at the calls of a pipeline's modules: memory, a profile, or op by op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from tpuport.core.drive.driving import UNITS
from tpuport.core.enums import StageName
from tpuport.core.mesh.mesh_arrays import own_devices
from tpuport.core.reports import CallMemory, StageReport, memory_sources, memory_table
from tpuport.core.run.memory_report import memory_after
from tpuport.core.run.profile import SteadyTrace
from tpuport.core.seam.device_tensors import DeviceTensor
from tpuport.core.seam.journal import Journal


class Inspection:
    """Makes the calls of a pipeline's modules, and notes what was asked for.

    Args:
        journal: of the port.
        devices: of its mesh.
        memory: note the bytes on each device after every call.
        profile: a folder for a profile of each stage; ``None`` for none.
        calls: of each stage that are recorded at most.
        op_by_op: the stages whose programs run op by op.
    """

    def __init__(
        self,
        journal: Journal,
        devices: Iterable[Any],
        *,
        memory: bool,
        profile: Path | None,
        calls: int,
        op_by_op: Sequence[StageName],
    ) -> None:
        self._journal = journal
        self._devices = own_devices(devices) if memory else None
        self._memory: dict[StageName, list[CallMemory]] = {}
        self._op_by_op = op_by_op
        self._traces = {
            stage: SteadyTrace(stage, profile, calls) for stage in StageName
        }
        self._done: Counter[StageName] = Counter()

    def around(self, stage: StageName, name: str, run: Callable[[], Any]) -> Any:
        """The result of a call, which is there.

        Args:
            stage: that the call belongs to.
            name: of the module.
            run: makes the call.
        """
        trace, number = self._traces[stage], self._done[stage]
        self._done[stage] += 1
        self._journal.op_by_op = stage in self._op_by_op
        before = [one for one in self._journal.calls if one.name == name]
        steady = bool(before) and before[-1].compiled is None
        trace.turn(steady and stage not in self._op_by_op)
        self._journal.ran = None
        with trace.call(name, number):
            result = run()
            _wait(result)
        if self._devices is not None:
            ran = self._journal.ran
            noted = memory_after(self._devices, ran, stage, name, number)
            self._memory.setdefault(stage, []).append(noted)
        return result

    def ended(self, reports: Sequence[StageReport]) -> list[StageReport]:
        """The reports of the stages, with what was noted."""
        found = []
        for report in reports:
            stage = StageName(report.stage)
            self._traces[stage].stop()
            found.append(
                replace(
                    report,
                    op_by_op=stage in self._op_by_op,
                    memory=tuple(self._memory.get(stage, ())),
                    profile=self._traces[stage].result(),
                )
            )
        return found

    def text(self) -> str:
        """The memory that was noted by an error, for people; empty for none."""
        stages = [(name, UNITS[name], calls) for name, calls in self._memory.items()]
        if not stages:
            return ""
        told = ["  ".join(row) for row in memory_table(stages)]
        return "\n  ".join(["memory until then:", *told, *memory_sources(stages)])

    def lines(self, reports: Sequence[StageReport]) -> list[str]:
        """What was profiled, for people; the summary of a run has the memory."""
        told = [self._traces[StageName(one.stage)].line() for one in reports]
        return [line for line in told if line]


def _wait(result: Any) -> None:
    """Wait for the arrays of a result; a call may wait for a second one."""
    leaves = jax.tree.leaves(result, is_leaf=lambda one: isinstance(one, DeviceTensor))
    arrays = [one.value.array for one in leaves if isinstance(one, DeviceTensor)]
    jax.block_until_ready([array for array in arrays if array is not None])
