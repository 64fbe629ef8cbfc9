"""The text of compiled programs is read as it is written."""

from __future__ import annotations

import pytest

from tests.core.cost.programs import LOOPS
from tpuport.core.cost.hlo import Array, HloError, arrays_of, parse


def test_computations_and_instructions_are_found_in_order() -> None:
    program = parse(LOOPS)
    assert program.entry == "main"
    entry = program.computations["main"]
    assert [i.opcode for i in entry.values()] == [
        *("parameter", "parameter", "parameter", "constant", "tuple", "while"),
        *("custom-call", "all-reduce", "copy"),
    ]
    loop = entry["outer"]
    assert loop.called == {
        "condition": ("outer_condition",),
        "body": ("outer_body",),
    }
    assert loop.trip_count == 5
    assert loop.operands == ("start",)


def test_an_instruction_over_several_lines_is_one() -> None:
    kernel = parse(LOOPS).computations["main"]["kernel.1"]
    assert kernel.target == "tpu_custom_call"
    assert kernel.operands == ("x", "x")
    assert kernel.arrays == (Array("bf16", (64, 32)), Array("f32", (64, 128)))
    assert kernel.config["custom_call_config"]["body"] == "AAAA"
    assert kernel.op_name == "jit(step)/scaled_dot_product_attention/pallas_call"


def test_the_compilers_estimate_is_read_where_there_is_one() -> None:
    by_name = parse(LOOPS).computations["main"]
    assert by_name["copy"].estimated_cycles == 7000
    assert by_name["all-reduce.1"].estimated_cycles is None


def test_what_a_fusion_holds_is_walked() -> None:
    program = parse(LOOPS)
    fusion = program.computations["inner_body"]["matmul"]
    assert [i.opcode for i in program.inner(fusion)] == [
        "parameter",
        "parameter",
        "convolution",
    ]


@pytest.mark.parametrize(
    ("text", "arrays"),
    [
        ("bf16[2,3]{1,0:T(8,128)(2,1)S(1)}", [("bf16", (2, 3), 12)]),
        ("(f32[4]{0}, pred[8], s4[3])", [("f32", (4,), 16), ("pred", (8,), 8)]),
        ("u32[]{:S(2)}", [("u32", (), 4)]),
        ("f8e4m3fn[16]", [("f8e4m3fn", (16,), 16)]),
    ],
)
def test_shapes_are_dtypes_and_sizes(text: str, arrays: list[tuple]) -> None:
    found = [(a.dtype, a.shape, a.bytes) for a in arrays_of(text)]
    assert found[: len(arrays)] == arrays


def test_four_bit_numbers_take_half_a_byte() -> None:
    (array,) = arrays_of("s4[3]")
    assert array.bytes == 2


@pytest.mark.parametrize("text", ["", "HloModule jit_f\n\n%f (x: f32[]) -> f32[] {\n}"])
def test_text_without_a_program_is_refused(text: str) -> None:
    with pytest.raises(HloError, match="no ENTRY"):
        parse(text)
