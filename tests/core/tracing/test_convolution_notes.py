"""What convolutions ran as: noted while tracing, in reports of runs and of plans."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from tpuport.core.reports import RunReport, StageReport, words
from tpuport.core.tracing.context import ConvolutionRecord, OpContext
from tpuport.core.tracing.convolution_notes import counted, joined, note, passed_over


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
    # Programs are joined the same way.
    entries = [asdict(record) for record in found]
    assert [entry["count"] for entry in joined([*entries, *entries])] == [4, 2, 2]


def test_what_was_noted_before_a_refusal_is_forgotten(context: OpContext) -> None:
    note(context, "k")
    known = len(context.convolutions)
    note(context, "k")
    passed_over(context, known, "block", "other code", NotImplementedError("too wide"))
    assert context.convolutions == [
        ConvolutionRecord(call="convolution", implementation="k"),
        ConvolutionRecord(call="block", implementation="other code", reason="too wide"),
    ]


def entry(implementation: str, reason: str, count: int) -> dict[str, Any]:
    return asdict(
        ConvolutionRecord(
            call="convolution",
            implementation=implementation,
            reason=reason,
            count=count,
        )
    )


def test_a_run_s_report_has_all_of_them() -> None:
    ran = (entry("k", "", 40), entry("XLA", "too wide", 1))
    stage = StageReport(
        stage="decode", backend="tpuport", unit="chunk", total_seconds=1.0,
        convolutions=ran,
    )  # fmt: skip
    report = RunReport(
        model="m", variant="v", weights="w", platform="tpu", mesh="dp=1", devices=1,
        dtype="float32", blocks="native", stages=(stage,), total_seconds=1.0,
        peak_host_bytes=0, peak_device_bytes=None,
    )  # fmt: skip
    assert report.as_dict()["stages"][0]["convolutions"] == ran
    assert words(ran[0]) == "40 convolutions by k"
