"""The account of programs that are small enough to be added up by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.core.cost.programs import (
    BETWEEN_SLICES,
    FROM_HOST,
    LOOPS,
    OVERLAP,
    config,
)
from tests.core.cost.test_network import network
from tpuport.core.cost.hlo import Instruction, convolution_flops, parse
from tpuport.core.cost.network import HOP_SECONDS
from tpuport.core.cost.program_time import (
    ATTENTION,
    COLLECTIVE,
    DCN,
    HBM,
    HOST_LINK,
    ICI,
    MATMUL,
    MXU,
    OTHER,
    VECTOR,
    Account,
    KernelCost,
    account,
)
from tpuport.core.mesh.chips import chip

V6E = chip("v6e")
CLOCK = V6E.clock_hz
MESH = {"dp": 2, "sp": 1, "tp": 4}


def kernel(found: Instruction, operands: Sequence[Instruction]) -> KernelCost:
    """A kernel of 90000 cycles."""
    assert [o.name for o in operands] == ["x", "x"]
    return KernelCost(90000, MXU, 1e9)


def add_up(text: str) -> Account:
    return account(parse(text), V6E, network("v6e-8"), MESH, kernel)


def test_every_second_is_in_one_row_and_one_category() -> None:
    found = add_up(LOOPS)
    rows = {row.name: row for row in found.rows}
    # 8 MiB in 4 microseconds are more than the memory gives.
    assert {name: row.bound for name, row in rows.items()} == {
        "matmul": VECTOR,
        "kernel.1": MXU,
        "all-reduce.1": ICI,
        "copy": HBM,
    }
    # One loop's rounds are in its attributes, the other's in its condition.
    assert rows["matmul"].times == 15
    split = found.split()
    summed = 2 * (3 / 4) * (4 << 20)  # an all-reduce over 4, half on either side
    link = summed / 2 / V6E.ici_link_bandwidth + 4 * HOP_SECONDS
    assert split[MATMUL] == pytest.approx(15000 / CLOCK)
    assert split[ATTENTION] == pytest.approx(90000 / CLOCK)
    assert split[OTHER] == pytest.approx(7000 / CLOCK)
    assert split[COLLECTIVE] == pytest.approx(link)
    assert found.seconds == pytest.approx(sum(split.values()))
    assert sum(found.bounds().values()) == pytest.approx(found.seconds)
    assert found.notes == []
    (use,) = found.collectives()
    assert (use.kind, use.axis, use.count) == ("all-reduce", "tp", 1)
    assert use.bytes == 4 << 20
    assert use.exposed_seconds == pytest.approx(use.seconds)


def test_the_floor_is_what_the_chips_peak_allows() -> None:
    found = add_up(LOOPS)
    floors = {r.name: r.floor for r in found.rows}
    seconds = {r.name: r.seconds for r in found.rows}
    assert floors["kernel.1"] == seconds["kernel.1"]
    assert floors["all-reduce.1"] == seconds["all-reduce.1"]
    # The copy's estimate is below what its 8 MiB take, and stands.
    assert floors["copy"] == seconds["copy"]
    flops, traffic = 2 * 64 * 32 * 16, 64 * 128 * 2 + 2 * 64 * 128
    assert 0 < floors["matmul"] < seconds["matmul"]
    assert floors["matmul"] > 15 * flops / V6E.peak_flops
    assert floors["matmul"] > 15 * traffic / V6E.hbm_bandwidth
    assert found.floor == pytest.approx(sum(floors.values()))


def test_transfers_run_beside_the_core() -> None:
    """4 MiB over a link take 46.6 us, the work 10 us, the copy to VMEM 2.6 us."""
    found = add_up(OVERLAP)
    (use,) = found.collectives()
    link = (4 << 20) / V6E.ici_link_bandwidth + HOP_SECONDS
    assert use.seconds == pytest.approx(link)
    assert use.exposed_seconds == pytest.approx(link - 17500 / CLOCK)
    assert found.seconds == pytest.approx(link)
    assert {r.name for r in found.rows} == {"send", "work"}


def test_what_goes_to_another_slice_runs_beside_the_core() -> None:
    """4 MiB at 12.5 GB/s take 336 us, the work 100 us; one transfer has two ends."""
    found = add_up(BETWEEN_SLICES)
    (use,) = found.collectives()
    assert (use.kind, use.axis, use.count) == ("all-gather", "slices", 1)
    network = (4 << 20) / 12.5e9
    assert use.seconds == pytest.approx(network)
    assert use.exposed_seconds == pytest.approx(network - 175000 / CLOCK)
    assert found.seconds == pytest.approx(network)
    assert found.bound == DCN
    assert DCN not in add_up(OVERLAP).bounds()


def test_what_comes_from_the_host_takes_the_hosts_link() -> None:
    """2 MiB take 65.5 us, the work beside 40 us; one after the other, the sum."""
    link, work = (2 << 20) / V6E.host_bandwidth, 70000 / CLOCK
    found = add_up(FROM_HOST)
    assert found.host_bytes == 2 << 20
    assert found.link_seconds == pytest.approx(link)
    assert found.seconds == pytest.approx(link)
    assert found.bounds()[HOST_LINK] == pytest.approx(link - work)
    assert found.bound == VECTOR
    *head, start, line, done, end = FROM_HOST.splitlines()
    late = add_up("\n".join([*head, line, start, done, end]))
    assert late.seconds == pytest.approx(link + work)
    assert late.bound == HOST_LINK
    assert HOST_LINK not in add_up(OVERLAP).bounds()


def test_a_copy_from_the_host_says_its_destination_first() -> None:
    _, start, *_ = parse(FROM_HOST).computations["main"].values()
    (whole, part) = ("bf16[8]{0:T(8)S(5)}", "bf16[8]{0:T(8)}")

    def copied(source: str, to: str) -> Instruction:
        shape = f"({to}, {source}, u32[]{{:S(2)}})"
        return replace(start, opcode="copy-start", shape=shape)

    assert copied(whole, part).from_host
    assert not copied(part, whole).from_host
    assert not copied(part, part).from_host


def test_a_copy_that_is_waited_for_at_once_holds_up_the_core() -> None:
    found = add_up(OVERLAP.replace('"17500"', '"0"'))
    (waited,) = (r for r in found.rows if r.opcode == "copy-done")
    assert waited.seconds == pytest.approx((4 << 20) / V6E.hbm_bandwidth)
    assert waited.bound == HBM


@pytest.mark.parametrize(
    ("before", "after", "size"),
    [
        ("copy(", "copy(", 8 << 20),
        # Arrays in other memories are no traffic.
        ("T(8,128)} copy", "T(8,128)S(1)} copy", 4 << 20),
        # Columns are padded to 128 lanes where they are minor, to 8 sublanes where not.
        ("f32[1024,1024]", "f32[1024,1]", 1024 * 128 * 4 + 1024 * 8 * 4),
    ],
    ids=["whole", "in another memory", "with the padding of tiles"],
)
def test_what_has_no_estimate_takes_the_time_of_its_traffic(
    before: str, after: str, size: int
) -> None:
    text = LOOPS.replace(f", {config(7000)}", "").replace(before, after)
    (row,) = (r for r in add_up(text).rows if r.name == "copy")
    assert row.hbm_bytes == size
    assert row.seconds == pytest.approx(size / V6E.hbm_bandwidth)


def test_a_kernel_takes_no_less_than_its_traffic() -> None:
    """Its schedule has no waits for what it reads and writes."""

    def quick(found: Instruction, operands: Sequence[Instruction]) -> KernelCost:
        return KernelCost(10, VECTOR, 0.0)

    found = account(parse(LOOPS), V6E, network("v6e-8"), MESH, quick)
    (row,) = (r for r in found.rows if r.name == "kernel.1")
    # Lanes are padded to 128: three arrays of bfloat16, and one of float32.
    assert row.hbm_bytes == 64 * 128 * (3 * 2 + 4)
    assert row.seconds == pytest.approx(row.hbm_bytes / V6E.hbm_bandwidth)
    assert row.bound == HBM
    (row,) = (r for r in add_up(LOOPS).rows if r.name == "kernel.1")
    assert (row.cycles, row.bound) == (90000, MXU)
    # One that says how little it reads of them takes the time of that.
    little = '"body":"AAAA","cost_estimate":{"bytes_accessed":"32768"}'
    text = LOOPS.replace('"body":"AAAA"', little)
    found = account(parse(text), V6E, network("v6e-8"), MESH, quick)
    (row,) = (r for r in found.rows if r.name == "kernel.1")
    assert row.seconds == pytest.approx(32768 / V6E.hbm_bandwidth)


def test_a_loop_without_a_count_is_named() -> None:
    text = LOOPS.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")
    found = add_up(text)
    assert len(found.notes) == 1
    assert "outer" in found.notes[0]
    (row,) = (r for r in found.rows if r.name == "matmul")
    assert row.times == 3


BRANCHES = f"""HloModule jit_branches, is_scheduled=true

%short (a: f32[8]) -> f32[8] {{
  %a = f32[8] parameter(0)
  ROOT %few = f32[8] copy(%a), {config(1750)}
}}

%long (b: f32[8]) -> f32[8] {{
  %b = f32[8] parameter(0)
  ROOT %many = f32[8] copy(%b), {config(3500)}
}}

ENTRY %main (i: s32[], x: f32[8]) -> f32[8] {{
  %i = s32[] parameter(0)
  %x = f32[8] parameter(1)
  ROOT %either = f32[8] conditional(%i, %x, %x), branch_computations={{%short, %long}}
}}
"""


def test_of_a_conditional_the_longest_branch_counts() -> None:
    found = add_up(BRANCHES)
    assert [r.name for r in found.rows] == ["many"]
    assert found.seconds == pytest.approx(3500 / CLOCK)


SCATTER = """HloModule jit_scatter, is_scheduled=true

%all-reduce-scatter (g.1: f32[1024,1024]) -> f32[1024,256] {
  %g.1 = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  %sum.1 = f32[1024,1024]{1,0:T(8,128)} all-reduce(%g.1), replica_groups=[2,4]<=[8]
  %at = u32[] constant(0)
  ROOT %part = f32[1024,256]{1,0:T(8,128)} dynamic-slice(%sum.1, %at, %at)
}

ENTRY %main (g: f32[1024,1024]) -> f32[1024,256] {
  %g = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  ROOT %fused = f32[1024,256]{1,0:T(8,128)} fusion(%g), calls=%all-reduce-scatter
}
"""


def test_a_fused_sum_that_keeps_a_slice_is_a_reduce_scatter() -> None:
    (use,) = add_up(SCATTER).collectives()
    assert (use.kind, use.axis, use.bytes) == ("reduce-scatter", "tp", 4 << 20)
    assert use.seconds == pytest.approx(
        (3 << 20) / 2 / V6E.ici_link_bandwidth + 2 * HOP_SECONDS
    )


BESIDE = f"""HloModule jit_beside, is_scheduled=true

%called (g.1: f32[1024,256]) -> f32[1024,1024] {{
  %g.1 = f32[1024,256]{{1,0:T(8,128)}} parameter(0)
  ROOT %all.1 = f32[1024,1024]{{1,0:T(8,128)}} all-gather(%g.1), replica_groups=[2,4]<=[8], dimensions={{1}}
}}, execution_thread="sparsecore"

ENTRY %main (g: f32[1024,256]) -> f32[1024,1024] {{
  %g = f32[1024,256]{{1,0:T(8,128)}} parameter(0)
  %begun = ((f32[1024,256]), f32[1024,1024]) call-start(%g), async_execution_thread="sparsecore", to_apply=%called
  %work = f32[1024,256]{{0,1:T(8,128)}} copy(%g), {config(17500)}
  ROOT %ended = f32[1024,1024]{{1,0:T(8,128)}} call-done(%begun)
}}
"""  # noqa: E501


def test_a_collective_on_another_core_runs_beside_the_work() -> None:
    """As v7x has it: its sparse cores gather while the tensor core works."""
    found = add_up(BESIDE)
    (use,) = found.collectives()
    link = (3 << 20) / 2 / V6E.ici_link_bandwidth + 2 * HOP_SECONDS
    assert (use.kind, use.axis, use.bytes) == ("all-gather", "tp", 4 << 20)
    assert use.seconds == pytest.approx(link)
    assert use.exposed_seconds == pytest.approx(link - 17500 / CLOCK)


GATHER = "all-gather(%g.{0}), channel_id=5, replica_groups=[2,4]<=[8], dimensions={{1}}"
PARTED = f"""HloModule jit_parted, is_scheduled=true

%begin (g.1: f32[1024,256]) -> (f32[1024,256], f32[1024,1024]) {{
  %g.1 = f32[1024,256]{{1,0:T(8,128)}} parameter(0)
  %all.1 = f32[1024,1024]{{1,0:T(8,128)}} {GATHER.format(1)}
  ROOT %begun = (f32[1024,256], f32[1024,1024]) custom-call(%g.1, %all.1), custom_call_target="AsyncCollectiveStart"
}}

%beside (g.2: f32[1024,256]) -> f32[1024,256] {{
  %g.2 = f32[1024,256]{{1,0:T(8,128)}} parameter(0)
  %all.2 = f32[1024,1024]{{1,0:T(8,128)}} {GATHER.format(2)}
  ROOT %turned = f32[1024,256]{{0,1:T(8,128)}} copy(%g.2)
}}

%end (g.3: f32[1024,256]) -> f32[1024,1024] {{
  %g.3 = f32[1024,256]{{1,0:T(8,128)}} parameter(0)
  ROOT %all.3 = f32[1024,1024]{{1,0:T(8,128)}} {GATHER.format(3)}
}}

ENTRY %main (g: f32[1024,256]) -> f32[1024,1024] {{
  %g = f32[1024,256]{{1,0:T(8,128)}} parameter(0)
  %async-collective-start = (f32[1024,256], f32[1024,1024]) fusion(%g), kind=kCustom, calls=%begin
  %work = f32[1024,256]{{0,1:T(8,128)}} fusion(%g), kind=kOutput, calls=%beside, {config(8750)}
  %more = f32[1024,256]{{0,1:T(8,128)}} fusion(%g), kind=kOutput, calls=%beside, {config(8750)}
  ROOT %async-collective-done = f32[1024,1024]{{1,0:T(8,128)}} fusion(%g), kind=kCustom, calls=%end
}}
"""  # noqa: E501


@pytest.mark.parametrize(("cycles", "waits"), [(8750, True), (87500, False)])
def test_a_collective_in_several_fusions_is_one_that_work_runs_beside(
    cycles: int, waits: bool
) -> None:
    """As v5e has it: each fusion has the same gather, and its own estimate."""
    found = add_up(PARTED.replace('"8750"', f'"{cycles}"'))
    (use,) = found.collectives()
    link = (3 << 20) / 2 / V6E.ici_link_bandwidth + 2 * HOP_SECONDS
    work = 2 * cycles / CLOCK
    assert (use.kind, use.count, use.bytes) == ("all-gather", 1, 4 << 20)
    assert use.seconds == pytest.approx(link)
    assert use.exposed_seconds == pytest.approx(link - work if waits else 0)
    assert found.seconds == pytest.approx(max(link, work))
    assert sum(r.seconds for r in found.rows) == pytest.approx(found.seconds)
    assert found.split()[COLLECTIVE] == pytest.approx(use.exposed_seconds)


@pytest.mark.parametrize(
    ("opcode", "left", "right", "out", "attributes", "flops"),
    [
        (
            *("dot", "f32[8,32]", "f32[32,4]", "f32[8,4]"),
            *("lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 8 * 4 * 32),
        ),
        (
            *("convolution", "f32[1,9,9,3]", "f32[3,3,3,16]", "f32[1,7,7,16]"),
            *("window={size=3x3}, dim_labels=b01f_01io->b01f", 2 * 49 * 16 * 27),
        ),
        (
            *("convolution", "bf16[64,32]", "bf16[16,32]", "bf16[64,16]"),
            *("dim_labels=bf_oi->bf", 2 * 64 * 16 * 32),
        ),
    ],
    ids=["dot", "convolution", "product"],
)
def test_products_count_what_they_multiply(
    opcode: str, left: str, right: str, out: str, attributes: str, flops: float
) -> None:
    near = {
        "l": Instruction("l", "parameter", left, (), ""),
        "r": Instruction("r", "parameter", right, (), ""),
    }
    found = Instruction("c", opcode, out, ("l", "r"), ", " + attributes)
    assert convolution_flops(found, near) == flops
