"""A plan as text: what a person finds in it, of plans whose figures are made up."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from tpuport.cli.shown.plan_text import everything, text
from tpuport.core.cost.network import Collective
from tpuport.core.cost.program_time import Account, Row
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.plan.measure import Measured, Memory
from tpuport.core.plan.plan import Plan, StagePlan
from tpuport.core.reports import bytes_text
from tpuport.core.tracing.context import AttentionRecord

MESH = MeshSpec(dp=2, sp=4)
V6E = chip("v6e")
GIB = 2**30


def measured(gib: float, seconds: float, **changes: Any) -> Measured:
    """A program that takes so much memory, 4 GiB of it weights, and time."""
    size = int(gib * GIB)
    row = Row("op", "fusion", "", "other", 1, 1.0, seconds, bound="vector unit")
    fits = size <= V6E.hbm_usable_bytes
    values: dict[str, Any] = {
        "stage": "denoise",
        "program": "step",
        "component": "transformer",
        "calls": 4,
        "memory": Memory(
            weights=4 * GIB,
            inputs=0,
            temporaries=size - 4 * GIB - 1000,
            code=1000,
            resident=0,
            total=size,
        ),
        "limit": V6E.hbm_usable_bytes,
        "lower_seconds": 1.0,
        "compile_seconds": 2.0,
        "account": Account(seconds, [row]) if fits else None,
        "flops": 1e12,
        "devices": 8,
        "error": "" if fits else "too large",
    }
    return Measured(**{**values, **changes})


def plan_of(mesh: MeshSpec, *programs: Measured, **changes: Any) -> Plan:
    """A plan with a stage for each program."""
    values: dict[str, Any] = {
        "model": "m",
        "weights": "w",
        "topology": "v6e-8",
        "chip": V6E,
        "mesh": mesh,
        "settings": {"width": 256, "height": 128, "num_frames": 33},
        "dtype": "bfloat16",
        "attention": "auto",
        "sharding": "default",
        "blocks": "upstream",
        "stages": tuple(
            StagePlan(name=program.stage, programs=(program,), chip=V6E)
            for program in programs
        ),
    }
    return Plan(**{**values, **changes})


JOINT = AttentionRecord(
    query=(2, 48, 39826, 64),
    key=(2, 48, 39826, 64),
    implementation="splash",
    reason="a fused TPU kernel takes this call",
    split=("dp", None, "sp", None),
    blocks={"block_q": 3072, "block_kv": 3072, "block_kv_compute": 256},
    dtype="bfloat16",
    padded=39936,
    ulysses=2,
    ring=2,
)
APART = AttentionRecord(
    query=(1, 8, 100, 64),
    key=(1, 8, 70, 64),
    implementation="jax",
    reason="jax's fused TPU kernel takes this call; not splash: it takes no mask",
    split=(None, "tp", "sp", None),
    key_lengths=True,
)


def lines(plan: Plan) -> list[str]:
    return [line.strip() for line in everything(plan).splitlines()]


def planned(*records: AttentionRecord, **changes: Any) -> Plan:
    program = measured(10, 0.5, attention=[asdict(record) for record in records])
    return plan_of(MESH, replace(program, **changes))


def test_an_attention_call_is_told_once_with_its_blocks_its_split_and_why() -> None:
    (stage,) = planned(JOINT).stages
    (step,) = stage.programs
    other = replace(step, program="other", attention=[asdict(JOINT), asdict(APART)])
    found = lines(plan_with(stage, step, other))
    first = found.index("attention calls, by what they run as:") + 1
    assert found[first : first + 8] == [
        "denoise/step, denoise/other: splash, block_q 3072, block_kv 3072, "
        "block_kv_compute 256",
        "batch 2, 48 heads of 64, 39826 queries x 39826 keys (padded to 39936), "
        "bfloat16",
        "batch over dp=2, tokens over sp=4 (ulysses 2 x ring 2)",
        "a fused TPU kernel takes this call",
        "denoise/other: jax",
        "batch 1, 8 heads of 64, 100 queries x 70 keys, float32, each item with its "
        "own number of keys",
        "heads over tp=1, queries over sp=4 (keys are gathered)",
        APART.reason,
    ]
    assert "attention calls" not in everything(planned())


def plan_with(stage: StagePlan, *programs: Measured) -> Plan:
    """A plan of one stage with these programs."""
    return replace(planned(), stages=(replace(stage, programs=programs),))


def test_every_option_of_a_call_is_told() -> None:
    plain = everything(planned(JOINT))
    for change, shown in (
        ({"window": (3, 5)}, "window 3,5"),
        ({"k_smooth": True}, "k_smooth"),
        ({"causal": True}, "causal"),
        ({"frame_tokens": 9}, "frames of 9 see those before"),
        ({"split": (None, None, None, None)}, "not split"),
    ):
        options: dict[str, Any] = change
        assert shown not in plain
        assert shown in everything(planned(replace(JOINT, **options)))


def test_convolutions_are_told_in_a_line_each_with_why() -> None:
    told = [
        {"call": "convolution", "implementation": "k", "reason": "", "count": 3},
        {"call": "convolution", "implementation": "XLA", "reason": "wide", "count": 1},
    ]
    assert "convolutions of one call" not in everything(planned())
    (stage,) = planned(convolutions=told).stages
    (step,) = stage.programs
    both = plan_with(stage, step, replace(step, program="other", convolutions=told[:1]))
    found = lines(both)
    first = found.index("convolutions of one call, by what they run as:") + 1
    assert found[first : first + 2] == [
        "denoise/step, denoise/other: 3 convolutions by k",
        "denoise/step: 1 convolution by XLA: wide",
    ]
    told = both.as_dict()["stages"]["denoise"]["programs"][0]["convolutions"]
    assert step.convolutions == told


def test_what_a_refused_program_does_not_tell_is_left_open() -> None:
    found = lines(plan_of(MESH, measured(40, 0.5)))
    row = next(line for line in found if line.startswith("denoise/step"))
    shown = ["4.00 GiB", "-", "36.00 GiB", "-", "0 B", "40.00 GiB"]
    assert row.split() == ["denoise/step", *" ".join(shown).split()]


def test_a_sum_is_called_the_whole_run_only_where_it_is() -> None:
    names = ("encode", "denoise", "decode")
    encode, denoise, decode = (measured(10, 0.5, stage=name) for name in names)
    one, two = plan_of(MESH, denoise), plan_of(MESH, denoise, decode)
    assert "whole run" not in everything(one)
    assert "together" not in everything(one)
    assert "together: denoise 2.000 s + decode 2.000 s = 4.000 s" in everything(two)
    assert "not planned: encode (--stage all plans them too)" in lines(two)
    every = plan_of(MESH, encode, denoise, decode)
    assert "whole run: encode 2.000 s + denoise 2.000 s" in everything(every)


@pytest.mark.parametrize(
    ("name", "mesh", "head", "what"),
    [
        ("v6e", MeshSpec(dp=8), "(8 x TPU v6e (Trillium))", "chip"),
        ("v7x", MeshSpec(dp=2), "(2 devices on 1 chip of TPU7x (Ironwood))", "device"),
    ],
)
def test_figures_are_of_a_device_where_a_chip_has_two(
    name: str, mesh: MeshSpec, head: str, what: str
) -> None:
    moved = Collective("all-gather", "dp", 1 << 20, 1e-5, {})
    row = Row("op", "all-gather", "", "collective", 1, 1.0, 1e-5, collective=moved)
    program = measured(10, 0.5, account=Account(0.5, [row]))
    shown = everything(replace(plan_of(mesh, program), chip=chip(name)))
    assert head in shown.splitlines()[0]
    assert f"GiB HBM per {what}" in shown
    assert f"memory per {what}:" in shown
    assert f"collectives of one call, per {what}:" in shown
    assert shown.count("per chip") == (3 if what == "chip" else 0), shown


def test_sizes_are_never_rounded_to_nothing() -> None:
    shown = [bytes_text(size) for size in (0, 12, 3000, 1 << 17, 300 << 20)]
    assert shown == ["0 B", "12 B", "2.9 KiB", "0.1 MiB", "0.29 GiB"]


def test_the_compiler_s_flags_are_told() -> None:
    flags = ("--xla_a=1", "--xla_b=2")
    assert "compiler flags" not in everything(planned())
    shown = everything(replace(planned(), compiler_flags=flags)).splitlines()
    assert "with compiler flags: --xla_a=1 --xla_b=2" in shown


def test_in_short_a_plan_has_25_lines_at_most_whatever_it_has() -> None:
    """A search of many meshes on a slice on which nothing fits, with all notes."""
    stages = [measured(40, 0.5, stage=n) for n in ("encode", "denoise", "decode")]
    first = plan_of(MESH, *(replace(s, attention=[]) for s in stages))
    mesh = {
        "mesh": {"dp": 1}, "seconds_per_step": 1.0, "stage_seconds": None,
        "compiled": True, "fits": True, "hbm_bytes_per_chip": 1,
    }  # fmt: skip
    full = replace(
        first,
        meshes=[mesh] * 20,
        notes=[f"note {number}" for number in range(20)],
        compiler_flags=("--a",) * 9,
    )
    lines = text(full).splitlines()
    assert len(lines) <= 25, text(full)
    assert "and 16 more: --verbose" in text(full)
    assert "--report" in lines[-1]
    row = text(planned()).splitlines()[4].split()
    assert row[:5] == ["denoise", "10.00", "GiB", "4.00", "GiB"]
