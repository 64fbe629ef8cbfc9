"""The rows that a run ends with."""

from __future__ import annotations

from typing import Any

import pytest

from tpuport.core.reports import RunReport, StageReport


def run_report(*stages: StageReport, **changes: Any) -> RunReport:
    fields: dict[str, Any] = {
        "model": "a",
        "variant": "b",
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


def stage(attention: dict[str, Any] | None = None, **changes: Any) -> StageReport:
    fields: dict[str, Any] = {
        "stage": "denoise",
        "backend": "tpuport",
        "unit": "step",
        "total_seconds": 2.0,
        "attention": (attention,) if attention else (),
    }
    return StageReport(**{**fields, **changes})


@pytest.mark.parametrize("order", [("block_q", "block_kv"), ("block_kv", "block_q")])
def test_blocks_are_told_alike_however_their_record_is_ordered(
    order: tuple[str, str],
) -> None:
    sizes = {"block_q": 257, "block_kv": 514}
    blocks = {name: sizes[name] for name in order}
    record = {"implementation": "blockwise", "blocks": blocks}
    rows = dict(run_report(stage(record)).summary())
    assert rows["attention"] == "denoise blockwise (q 257, kv 514)"
    narrow = {**record, "window": (3, 4), "k_smooth": True}
    rows = dict(run_report(stage(narrow)).summary())
    told = "denoise blockwise (q 257, kv 514, window 3,4, k_smooth)"
    assert rows["attention"] == told


def test_what_became_of_a_choice_that_does_not_run_is_told() -> None:
    notice = "jax passed over (why); blockwise runs, without block_q=128"
    record = {"implementation": "blockwise", "blocks": {}, "notice": notice}
    rows = run_report(stage(record)).summary()
    assert ("attention", f"denoise: {notice}") in rows
    kept = {"implementation": "blockwise", "blocks": {}}
    assert len(run_report(stage(kept)).summary()) == len(rows) - 1


def test_the_rows_above_the_total_add_up_to_it() -> None:
    done = stage(load_seconds=0.5, compile_seconds=1.0)
    rows = run_report(done, stage(stage="decode", total_seconds=3.5)).summary()
    labels = [label for label, _ in rows]
    assert labels[:4] == ["start-up", "denoise", "decode", "total"]
    seconds = [float(text.split()[0]) for _, text in rows[:4]]
    assert seconds == [3.5, 2.0, 3.5, 9.0]
    assert dict(rows)["of that load"] == "0.50 s"
