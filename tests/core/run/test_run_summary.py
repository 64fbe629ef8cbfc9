"""The rows that a run ends with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tpuport.core.reports import CompileReport, RunReport, StageReport


def run_report(*stages: StageReport, **changes: Any) -> RunReport:
    fields: dict[str, Any] = {
        "model": "a",
        "weights": "demo",
        "platform": "cpu",
        "mesh": "dp=1,sp=1,tp=1",
        "devices": 1,
        "dtype": "float32",
        "blocks": "native",
        "total_seconds": 9.0,
        "peak_host_bytes": 1,
        "peak_device_bytes": None,
    }
    return RunReport(stages=stages, **{**fields, **changes})


def stage(**changes: Any) -> StageReport:
    fields: dict[str, Any] = {
        "stage": "denoise",
        "backend": "tpuport",
        "unit": "step",
        "total_seconds": 2.0,
    }
    return StageReport(**{**fields, **changes})


def test_what_people_look_for_comes_last() -> None:
    made = CompileReport(
        stage="denoise", program="step", trace_seconds=1.0, compile_seconds=0.5,
        cached=False,
    )  # fmt: skip
    denoise = stage(
        compiles=(made,), compile_seconds=1.5, steady_calls=4, steady_seconds=2.0
    )
    other = stage(
        stage="decode", unit="chunk", total_seconds=3.5, steady_calls=1,
        steady_seconds=3.0,
    )  # fmt: skip
    assert run_report(other, denoise).summary() == [
        ("compiled", "1 program in 1.5 s"),
        ("a step", "0.5 s, after the first"),
        ("in all", "9.0 s: start-up 3.5, decode 3.5, denoise 2.0"),
    ]


def test_what_was_loaded_is_not_called_compiled() -> None:
    loaded = CompileReport(
        stage="denoise", program="step", trace_seconds=0.0, compile_seconds=0.0,
        cached=True, loaded=True,
    )  # fmt: skip
    compiled = replace(loaded, cached=False, loaded=False)
    warm = run_report(stage(compiles=(loaded,) * 2)).summary()
    assert warm[0] == ("compiled", "nothing: 2 programs loaded")
    cached = replace(loaded, loaded=False)
    warm = run_report(stage(compiles=(loaded, cached))).summary()
    assert warm[0] == ("compiled", "nothing: 2 programs from the cache")
    half = run_report(stage(compiles=(loaded, compiled), compile_seconds=2.0)).summary()
    assert half[0] == ("compiled", "1 program in 2.0 s, and 1 loaded")
