"""Reading a kernel's schedule: recorded dumps of a kernel whose counts are known.

``tests/core/cost/schedules/make.py`` makes the recordings and has the kernel.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tpuport.core.cost.bundles import parse_program
from tpuport.core.cost.kernel_schedule import (
    Execution,
    KernelSchedule,
    ScheduleError,
    read_dump,
    read_kernel,
)

FOLDER = Path(__file__).parent / "schedules"
#: Steps of the example's grid, 2 x 4 x 3, and how often its last axis begins anew.
STEPS, SWEEPS = 24, 8


def example(chip: str) -> KernelSchedule:
    return read_dump(FOLDER, chip, f"example.{chip}")


def runs(execution: Execution) -> dict[int, float]:
    """How often each bundle runs, by address."""
    return {at: float(n) for at, n in enumerate(execution.counts) if n}


@pytest.mark.parametrize("chip", ["v6e", "v7x"])
def test_parts_are_counted_as_often_as_the_kernel_runs_them(chip: str) -> None:
    schedule = example(chip)
    _, products, by_data = schedule.program.loops
    ways = schedule.executions(scalars={0: 3})
    counts = runs(ways[-1])
    assert math.prod(ways[-1].grid) == STEPS
    assert counts[products.head] == 4 * STEPS
    assert counts[by_data.head] == 3 * STEPS
    # Clearing the sums and writing the result: once for each sweep of the last axis.
    once_a_sweep = {at for at, n in counts.items() if n == SWEEPS}
    before = {at for at in once_a_sweep if at < products.head}
    after = {at for at in once_a_sweep if at >= by_data.end}
    assert before
    assert after
    assert before | after == once_a_sweep
    spent = sum((r["end"] - r["start"]) * r["runs"] for r in ways[-1].regions)
    assert spent == sum(counts.values()) == ways[-1].cycles


@pytest.mark.parametrize("chip", ["v6e", "v7x"])
def test_a_choice_by_the_data_is_taken_one_way_or_the_other(chip: str) -> None:
    """The example's is at above 3: dear and cheap side exclude each other."""
    schedule = example(chip)
    low, high = (runs(schedule.executions({0: value})[-1]) for value in (3, 4))
    assert set(low) - set(high)
    assert set(high) - set(low)
    assert max(len(low), len(high)) < schedule.program.bundles


@pytest.mark.parametrize("chip", ["v6e", "v7x"])
@pytest.mark.parametrize("value", [0, 2, 3, 5])
def test_what_a_scalar_operand_holds_settles_all_that_hangs_on_it(
    chip: str, value: int
) -> None:
    """Of the example both numbers: the turns of a loop, and the choice at above 3."""
    schedule = example(chip)
    by_data = schedule.program.loops[2]
    ways = schedule.executions(scalars={0: value})
    told = [w.conditions for w in ways]
    assert not any("smem" in name for conditions in told for name, _ in conditions)
    assert runs(ways[-1]).get(by_data.head, 0) == value * STEPS
    one, two = (schedule.executions({0: n})[-1].cycles for n in (1, 2))
    assert two - one == STEPS * (by_data.end - by_data.head)


def test_a_test_of_an_index_against_data_is_one_condition_in_all_steps() -> None:
    """With the index in place of its name there would be one for each step."""
    schedule = small(
        """
        %s1_s0 = smov 0 /* iteration_bounds: (8) */
        %s2_s0 = sphi %s1_s0, %s5_s0 /* iteration index, stage = 0; Start region 4 */
        %s3_s0 = sld [smem:[#allocation4]]
        %p2_p0 = scmp.ge.s32.totalorder %s2_s0, %s3_s0
        %3 = sbr.rel (%p2_p0) target = $region9
        %v4_v0 = vmov 0.0
        %v5_v0 = vmov 0.0
        %s5_s0 = sadd.s32 1, %s2_s0 /* Start region 9 */
        %p5_p0 = scmp.ge.s32.totalorder %s5_s0, 8
        %5 = sbr.rel (!%p5_p0) target = $region4
        %v7_v0 = vmov 0.0
        """,
        "v7x",
    )
    skipped, ran = schedule.executions()
    assert skipped.conditions != ran.conditions
    assert len(skipped.conditions) == len(ran.conditions) == 1
    assert ran.cycles - skipped.cycles == 8 * 1


def test_the_use_of_the_units_is_weighed_by_what_runs() -> None:
    schedule = example("v6e")
    way = schedule.executions(scalars={0: 3})[-1]
    counts = runs(way)
    units = list(schedule.capacity)
    assert schedule.capacity["MXU"] == 2
    assert schedule.capacity["VALU"] == 4
    expected = sum(
        (n * schedule.used[at] for at, n in counts.items()),
        np.zeros(len(units)),
    )
    for i, unit in enumerate(units):
        share = expected[i] / (way.cycles * schedule.capacity[unit])
        assert way.utilization[unit] == pytest.approx(share)
        assert 0 <= share <= 1
    # Only the loop of products uses the MXU.
    products = schedule.program.loops[1]
    per_turn = schedule.used[products.head : products.end, units.index("MXU")].sum()
    assert way.used["MXU"] == 4 * STEPS * per_turn
    assert way.busiest == max(way.utilization, key=way.utilization.__getitem__)


def test_what_is_not_in_a_schedule_is_refused(tmp_path: Path) -> None:
    schedule = example("v6e")
    with pytest.raises(ScheduleError, match=r"the loop at 0x[0-9a-f]+ of example"):
        schedule.executions()  # how often a loop runs that only the data knows
    other = replace(schedule, program=replace(schedule.program, grid=(2, 4, 4)))
    with pytest.raises(ScheduleError, match="is not a grid of 2x4x4"):
        other.executions()
    for folder in (tmp_path, FOLDER, tmp_path / "missing"):
        with pytest.raises(ScheduleError, match=r"has no schedule of .* named other"):
            read_dump(folder, "v6e", "other")


UTILIZATION = """== CAPACTIY:
MXU, VALU
    2     4
== UTILIZATION:
"""


def small(body: str, chip: str = "v6e") -> KernelSchedule:
    """A program of one bundle a line, written by hand."""
    lines = [line.strip() for line in body.strip().splitlines()]
    text = "".join(f"{at:#6x}   :  {{ {line} }}\n" for at, line in enumerate(lines))
    return read_kernel("hand", text, UTILIZATION + "1 0\n" * len(lines), chip)


SKIP = """
%s1_s0 = sld [smem:[#allocation4]]
%p2_p0 = scmp.gt.s32.totalorder %s1_s0, 3
%3 = sbr.rel (%p2_p0) target = $region9
%v4_v0 = vmov 0.0
%v5_v0 = vmov 0.0
%v6_v0 = vmov 0.0
%v7_v0 = vmov 0.0
%v8_v0 = vmov 0.0
%v9_v0 = vmov 0.0
%v10_v0 = vmov 0.0 /* Start region 9 */
"""


@pytest.mark.parametrize(("chip", "taken"), [("v6e", 8), ("v7x", 5)])
def test_what_follows_a_branch_runs_even_where_it_is_taken(
    chip: str, taken: int
) -> None:
    """Four bundles on v6e, one on v7x; then the rest of what is jumped over is not."""
    ways = small(SKIP, chip).executions()
    assert [way.cycles for way in ways] == [taken, 10]
    # It is taken above 3, told by the opposite.
    assert dict(ways[0].conditions) == {"load([smem:[#allocation4]]) le 3": False}


@pytest.mark.parametrize(
    ("condition", "skips"),
    [
        ("scmp.eq.s32.totalorder %s1_s0, 6", True),
        ("scmp.ne.s32.totalorder %s1_s0, 6", False),
        ("scmp.lt.s32.totalorder %s1_s0, 4294967295", False),
        ("scmp.ge.s32.totalorder %s1_s0, 4294967295", True),
        ("pneg %p0_p5", True),
        ("por %p0_p5, %p0_p6", True),
        ("pand %p0_p5, %p0_p6", False),
        ("pnand %p0_p5, %p0_p6", True),
    ],
)
def test_scalars_are_worked_out(condition: str, skips: bool) -> None:
    """s1 is 6: (2 << 2) - 3 + 1, of which the sum is spilled and loaded again."""
    schedule = small(
        f"""
        %s0_s1 = smov 2
        %s0_s2 = sshll.u32 %s0_s1, 2
        %s0_s3 = sadd.s32 4294967293, %s0_s2 /* minus three */
        %p0_p5 = scmp.gt.s32.totalorder %s0_s3, 5
        %p0_p6 = scmp.le.s32.totalorder %s0_s3, 5
        %9 = sst [smem:[#allocation7_spill]] %s0_s3
        %s0_s4 = sld [smem:[#allocation7_spill]]
        %s1_s0 = scalar_select /*predicate=*/%p0_p6, /*on_true=*/%s0_s7, /*on_false=*/0
        %s0_s7 = sadd.s32 %s0_s4, 1
        %p1_p0 = {condition}
        %3 = sbr.rel (%p1_p0) target = $region9
        %v4_v0 = vmov 0.0
        %v6_v0 = vmov 0.0 /* Start region 9 */
        """,
        "v4",
    )
    (way,) = schedule.executions()
    assert way.conditions == ()
    # The only bundle that can be skipped is in the delay slot, so ask the branch.
    program = schedule.program
    assert program.condition(program.branches[10], {}) is skips


def test_a_predicated_move_keeps_the_old_value_where_it_does_not_hold() -> None:
    program = parse_program(
        "   0x0   :  { %s1_s0 = smov 5 }\n"
        "   0x1   :  { %p1_p0 = scmp.eq.s32.totalorder %s9_s9, 1 }\n"
        "   0x2   :  { %s2_s0 = smov (!%p1_p0, %s1_s0), 7 }\n",
        delay_slots=4,
    )
    assert program.evaluate("s2_s0", {"s9_s9": 1}) == 5
    assert program.evaluate("s2_s0", {"s9_s9": 0}) == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no bundles"),
        ("   0x0   :  {}\n   0x2   :  {}\n", "bundle 0x2 follows 0x0"),
        ("   0x0   :  { %3 = sbr.abs %s1 }\n", "unknown branch in bundle 0x0"),
        ("   0x0   :  { %3 = sbr.rel target = $region7 }\n", "region 7, which is"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        read_kernel("hand", text, UTILIZATION, "v6e")


@pytest.mark.parametrize(
    ("utilization", "chip", "said"),
    [
        (UTILIZATION, "v6e", "1 bundles, and the use of the units 0"),
        ("nonsense", "v6e", "cannot be read"),
        (UTILIZATION, "v9", "chip 'v9'"),
    ],
)
def test_units_and_chips_that_are_not_known_are_refused(
    utilization: str, chip: str, said: str
) -> None:
    with pytest.raises(ScheduleError, match=said):
        read_kernel("hand", "   0x0   :  {}\n", utilization, chip)
