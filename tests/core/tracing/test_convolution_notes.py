"""What convolutions ran as: noted while tracing, in reports of runs and of plans."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tpuport.core.reports import words
from tpuport.core.tracing.context import ConvolutionRecord, OpContext
from tpuport.core.tracing.convolution_notes import counted, note, passed_over


@pytest.fixture
def context() -> OpContext:
    return OpContext(mesh=None, platform="tpu", records=[])


def test_calls_of_one_kind_and_reason_are_counted(context: OpContext) -> None:
    for implementation, reason in (("k", ""), ("XLA", "a"), ("k", ""), ("XLA", "b")):
        note(context, implementation, reason)
    found = counted(context.convolutions)
    assert [(r.implementation, r.reason, r.count) for r in found] == [
        ("k", "", 2),
        ("XLA", "a", 1),
        ("XLA", "b", 1),
    ]


def test_what_was_noted_before_a_refusal_is_forgotten(context: OpContext) -> None:
    note(context, "k")
    known = len(context.convolutions)
    note(context, "k")
    passed_over(context, known, "block", "other code", NotImplementedError("too wide"))
    assert context.convolutions == [
        ConvolutionRecord(call="convolution", implementation="k"),
        ConvolutionRecord(call="block", implementation="other code", reason="too wide"),
    ]


def test_calls_are_told_in_words() -> None:
    def told(implementation: str, reason: str, count: int) -> str:
        record = ConvolutionRecord(
            call="convolution",
            implementation=implementation,
            reason=reason,
            count=count,
        )
        return words(asdict(record))

    assert told("k", "", 40) == "40 convolutions by k"
    assert told("XLA", "too wide", 1) == "1 convolution by XLA: too wide"
