"""What one compiled kernel costs, read from the compiler's own schedule.

libtpu writes its VLIW program for each kernel and fusion into a folder when
``LIBTPU_INIT_ARGS`` has :func:`dump_flags`. Two files of each matter:
``final_bundles``, the program with its regions, loops and branches, and
``final_hlo-static-per-bundle-utilization``, one row a bundle and one column a unit. A
TPU core issues one bundle a cycle, in order and without caches. So bundles times trip
counts are its cycles, as long as its copies from HBM keep up; waits for copies are not
in here.

The program is walked as the core would walk it: loops by their trip counts, branches
by their conditions. Conditions on the grid's indices, such as "first key block", are
worked out for every grid step. Conditions on data are tried both ways.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tpuport.core.cost.bundles import Branch, Loop, Program, operand, parse_program
from tpuport.core.cost.expressions import Known
from tpuport.errors import TpuportError

#: Bundles after a branch that run whether or not it is taken, by chip. Counted in
#: dumps of libtpu 0.0.42.1: the regions that follow a branch begin after them.
DELAY_SLOTS = {"v4": 1, "v5e": 4, "v5p": 4, "v6e": 4, "v7x": 1}

#: Conditions on data that are tried both ways; more are all taken as "runs".
MOST_CONDITIONS = 6

_FILE = re.compile(
    r"^\d+-(?P<name>.+)-\d+-"
    r"(?P<kind>final_bundles|final_hlo-static-per-bundle-utilization)\.txt$"
)


class ScheduleError(TpuportError):
    """A schedule is missing or is not in the form this reader knows."""


def dump_flags(folder: Path) -> str:
    """``LIBTPU_INIT_ARGS`` that makes libtpu write the two files of each kernel."""
    return (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=final_bundles|final_hlo-static.*"
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Execution:
    """One way a kernel's call can go.

    Attributes:
        schedule: the kernel's.
        conditions: on data, and whether each holds; empty where nothing depends on it.
        grid: iterations of the grid, of one core.
        counts: how often each bundle runs in the whole call on one core.
    """

    schedule: KernelSchedule
    conditions: tuple[tuple[str, bool], ...]
    grid: tuple[int, ...]
    counts: np.ndarray

    @property
    def cycles(self) -> float:
        """Bundles executed in the whole call by one core."""
        return float(self.counts.sum())

    @property
    def used(self) -> dict[str, float]:
        """Unit -> slots filled in those cycles."""
        used = self.counts @ self.schedule.used
        return dict(zip(self.schedule.capacity, map(float, used), strict=True))

    @property
    def utilization(self) -> dict[str, float]:
        """Unit -> share of its slots that is filled."""
        used, cycles = self.used, self.cycles
        slots = self.schedule.capacity.items()
        return {unit: used[unit] / (cycles * most) for unit, most in slots}

    @property
    def busiest(self) -> str:
        """The unit with the fewest slots to spare."""
        found = self.utilization
        return max(found, key=lambda unit: found[unit])

    @property
    def regions(self) -> list[dict[str, float]]:
        """Neighbouring bundles that run equally often, in program order; JSON-ready.

        ``start`` and ``end`` are addresses, ``end`` not included; ``depth`` is loops
        around it, the grid's own among them.
        """
        depths = np.zeros(len(self.counts), dtype=int)
        for loop in self.schedule.program.loops:
            depths[loop.head : loop.end] += 1
        changes = (np.diff(self.counts) != 0) | (np.diff(depths) != 0)
        edges = [0, *(int(at) + 1 for at in np.flatnonzero(changes)), len(depths)]
        return [
            {
                "start": start,
                "end": end,
                "depth": int(depths[start]),
                "runs": float(self.counts[start]),
            }
            for start, end in itertools.pairwise(edges)
            if self.counts[start]
        ]


@dataclass(frozen=True, kw_only=True)
class KernelSchedule:
    """The program of one kernel or fusion.

    Attributes:
        name: as in the HLO, such as ``splash_attention.1``.
        program: its bundles, loops and branches.
        capacity: unit -> slots of one bundle.
        used: slots filled, of shape [bundles, units].
    """

    name: str
    program: Program
    capacity: dict[str, int]
    used: np.ndarray = field(repr=False)

    def executions(self, scalars: Mapping[int, int] | None = None) -> list[Execution]:
        """The whole call, once for each way its conditions on data can turn out.

        If the program does not name its grid, each turn of the outermost loop is a
        step.

        Args:
            scalars: what scalar operands of the kernel hold in every element, by their
                position; of those left out both outcomes of a test are tried.

        Returns:
            the ways, the fewest cycles first.

        Raises:
            ScheduleError: the turns of the grid's loop are not those of the grid, or
                how often a loop runs is not in the program.
        """
        found = _Walk(self, scalars or {}).whole()
        return sorted(found, key=lambda way: way.cycles)


class _Walk:
    """Walks a program as a core does, counting how often each bundle runs."""

    def __init__(self, schedule: KernelSchedule, scalars: Mapping[int, int]) -> None:
        self.known = {operand(number): value for number, value in scalars.items()}
        self.schedule = schedule
        self.program = schedule.program
        loop = self.program.grid_loop
        self.low, self.high = (
            (loop.head, loop.end) if loop else (0, self.program.bundles)
        )

    def whole(self) -> list[Execution]:
        """Every assignment of the conditions on data, over all grid steps."""
        loop, grid = self.program.grid_loop, self.program.grid
        turns = 1
        if loop is not None:
            turns = self.program.trip_count(loop, {}) or 0
            if grid is not None:
                turns = turns or math.prod(grid) + 2
                if not 0 <= turns - math.prod(grid) <= 3:
                    raise ScheduleError(
                        f"{self.schedule.name} has {turns} turns of its grid loop, "
                        f"which is not a grid of {'x'.join(map(str, grid))}"
                    )
            if not turns:
                raise ScheduleError(
                    f"the grid of {self.schedule.name} is not in its schedule"
                )
        envs = [self._indices(turn) for turn in range(turns)]
        ways = []
        for assumed in self._assignments(envs):
            counts = np.zeros(self.program.bundles)
            cache: dict[tuple[Any, ...], np.ndarray] = {}
            for indices in envs:
                env = {**indices, **assumed}
                key = (*self._jumps(env), *self._all_trips(env))
                if key not in cache:
                    cache[key] = self._run(self.low, self.high, env)
                counts += cache[key]
            if loop is not None:
                counts[: loop.head] += 1
                counts[loop.end :] += 1
            ways.append(
                Execution(
                    schedule=self.schedule,
                    conditions=tuple(assumed.items()),
                    grid=grid or (turns,),
                    counts=counts,
                )
            )
        return ways

    def _indices(self, turn: int) -> dict[str, int]:
        """Values of the grid's index variables in a turn of its loop."""
        env, grid = dict(self.known), self.program.grid
        for name, (stage, axis) in self.program.indices.items():
            at = turn - stage
            if axis is None:
                env[name] = at
            elif grid is not None and axis < len(grid):
                # Out of range in the turns that only fill and drain the pipeline,
                # in which the step itself is skipped.
                at = min(max(at, 0), math.prod(grid) - 1)
                env[name] = at // math.prod(grid[axis + 1 :]) % grid[axis]
        return env

    def _assignments(self, envs: Sequence[Known]) -> list[dict[str, bool]]:
        """All ways the unknown comparisons in the steps' conditions can turn out."""
        conditions = itertools.chain.from_iterable(map(self._jumps, envs))
        unknown = (found for found in conditions if not isinstance(found, bool))
        names = sorted(set().union(*unknown))
        if len(names) > MOST_CONDITIONS:
            return [{}]
        return [
            dict(zip(names, values, strict=True))
            for values in itertools.product((False, True), repeat=len(names))
        ]

    def _forward(self, low: int, high: int) -> list[Branch]:
        return [
            branch
            for at, branch in self.program.branches.items()
            if low <= at < high and branch.target > at
        ]

    def _jumps(self, env: Known) -> list[bool | frozenset[str]]:
        """Whether each forward branch jumps."""
        forward = self._forward(self.low, self.high)
        return [self.program.condition(branch, env) for branch in forward]

    def _all_trips(self, env: Known) -> list[int]:
        return [
            self._trips(loop, env)
            for loop in self.program.loops
            if self.low < loop.head and loop.end <= self.high
        ]

    def _trips(self, loop: Loop, env: Known) -> int:
        count = self.program.trip_count(loop, env)
        if count is None:
            raise ScheduleError(
                f"how often the loop at {loop.head:#x} of {self.schedule.name} runs is "
                "not in its schedule"
            )
        return count

    def _run(self, low: int, high: int, env: Known) -> np.ndarray:
        """How often each bundle of [low, high) runs, once through."""
        counts = np.zeros(self.program.bundles)
        at = low
        while at < high:
            loop = self.program.loop_at(at, low, high)
            if loop is not None:
                counts += self._loop(loop, env)
                at = loop.end
                continue
            counts[at] += 1
            branch = self.program.branches.get(at)
            if branch is None or branch.target <= at:
                at += 1
                continue
            after = min(at + 1 + self.program.delay_slots, high)
            counts[at + 1 : after] += 1
            # What cannot be told is not skipped.
            taken = self.program.condition(branch, env) is True
            at = max(branch.target, after) if taken else after
        return counts

    def _loop(self, loop: Loop, env: Known) -> np.ndarray:
        trips = self._trips(loop, env)
        counters = self.program.counters(loop, env)
        inside = self._forward(loop.head, loop.end)
        if not any(self.program.depends(branch, counters) for branch in inside):
            return trips * self._run(loop.head, loop.end, env)
        total = np.zeros(self.program.bundles)
        for turn in range(trips):
            values = {name: first + turn * by for name, (first, by) in counters.items()}
            total += self._run(loop.head, loop.end, {**env, **values})
        return total


def read_dump(folder: Path, chip: str, name: str) -> KernelSchedule:
    """The schedule of one kernel in a dump folder.

    Args:
        folder: that :func:`dump_flags` named.
        chip: the program is for, such as ``v6e``.
        name: of the kernel in the HLO.

    Raises:
        ScheduleError: the folder has no such schedule, or one this reader does not
            know.
    """
    files = {
        found["kind"]: path
        for path in sorted(folder.glob("*.txt"))
        if (found := _FILE.match(path.name)) and found["name"] == name
    }
    if len(files) < 2:
        raise ScheduleError(f"{folder} has no schedule of a TPU kernel named {name}")
    bundles, used = (files[kind] for kind in sorted(files))
    return read_kernel(
        name, bundles.read_text(errors="replace"), used.read_text(), chip
    )


def read_kernel(name: str, bundles: str, utilization: str, chip: str) -> KernelSchedule:
    """The schedule in the text of the two files of a kernel.

    Raises:
        ScheduleError: they are not in the form this reader knows.
    """
    if chip not in DELAY_SLOTS:
        raise ScheduleError(
            f"the schedule of chip {chip!r} cannot be read; known are "
            f"{', '.join(DELAY_SLOTS)}"
        )
    capacity, used = _utilization(name, utilization)
    try:
        program = parse_program(bundles, delay_slots=DELAY_SLOTS[chip])
    except ValueError as error:
        raise ScheduleError(f"the schedule of {name} cannot be read: {error}") from None
    if program.bundles != len(used):
        raise ScheduleError(
            f"the schedule of {name} has {program.bundles} bundles, and the use "
            f"of the units {len(used)} rows"
        )
    return KernelSchedule(name=name, program=program, capacity=capacity, used=used)


def _utilization(name: str, text: str) -> tuple[dict[str, int], np.ndarray]:
    lines = text.splitlines()
    try:
        units = [unit.strip() for unit in lines[1].split(",")]
        capacity = dict(zip(units, map(int, lines[2].split()), strict=True))
        rows = [list(map(int, line.split())) for line in lines[4:] if line.strip()]
        used = np.array(rows, dtype=np.int64).reshape(len(rows), len(units))
    except (IndexError, ValueError) as error:
        raise ScheduleError(
            f"the use of the units of {name} cannot be read: {error}"
        ) from None
    return capacity, used
