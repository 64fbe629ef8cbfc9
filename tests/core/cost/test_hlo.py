"""The text of compiled programs is read as it is written."""

from __future__ import annotations

import pytest

from tests.core.cost.programs import LOOPS
from tpuport.core.cost.hlo import Array, HloError, arrays_of, parse


def test_an_instruction_over_several_lines_is_one() -> None:
    kernel = parse(LOOPS).computations["main"]["kernel.1"]
    assert kernel.arrays == (Array("bf16", (64, 32)), Array("f32", (64, 128)))
    assert kernel.config["custom_call_config"]["body"] == "AAAA"


@pytest.mark.parametrize(
    ("text", "arrays"),
    [
        ("bf16[2,3]{1,0:T(8,128)(2,1)S(1)}", [("bf16", (2, 3), 12)]),
        ("(f32[4]{0}, pred[8], s4[3])", [("f32", (4,), 16), ("pred", (8,), 8)]),
        ("u32[]{:S(2)}", [("u32", (), 4)]),
        ("f8e4m3fn[16]", [("f8e4m3fn", (16,), 16)]),
        ("s4[3]", [("s4", (3,), 2)]),
    ],
)
def test_shapes_are_dtypes_and_sizes(text: str, arrays: list[tuple]) -> None:
    found = [(a.dtype, a.shape, a.bytes) for a in arrays_of(text)]
    assert found[: len(arrays)] == arrays


@pytest.mark.parametrize("text", ["", "HloModule jit_f\n\n%f (x: f32[]) -> f32[] {\n}"])
def test_text_without_a_program_is_refused(text: str) -> None:
    with pytest.raises(HloError, match="no ENTRY"):
        parse(text)
