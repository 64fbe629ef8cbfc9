"""What convolutions ran as: noted while tracing, in reports of runs and of plans."""

from __future__ import annotations

from dataclasses import asdict, replace

from tpuport.core.reports import words
from tpuport.core.tracing.context import ConvolutionRecord, OpContext, counted


def test_what_a_refused_attempt_noted_is_forgotten() -> None:
    context = OpContext(mesh=None, platform="tpu", records=[])

    def refuse() -> None:
        context.note("k")
        raise NotImplementedError("too wide")

    context.note("k")
    assert context.tried("block", "other code", refuse) is None
    assert context.convolutions == [
        ConvolutionRecord(call="convolution", implementation="k"),
        ConvolutionRecord(call="block", implementation="other code", reason="too wide"),
    ]


def test_records_of_one_kind_add_up() -> None:
    one = ConvolutionRecord(call="convolution", implementation="k")
    other = ConvolutionRecord(call="convolution", implementation="XLA", count=2)
    assert {r.count for r in counted([one, other, replace(one, count=3)])} == {4, 2}


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
