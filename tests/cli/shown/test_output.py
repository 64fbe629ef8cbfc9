"""The end of a run, and tables: whole, aligned and without colours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpuport.cli.shown.output import show_results
from tpuport.cli.shown.tables import columns
from tpuport.core.reports import RunReport
from tpuport.errors import WriteError


def test_the_result_is_told_before_the_report_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = RunReport(
        model="toy",
        weights="demo",
        platform="cpu",
        mesh="dp=1",
        devices=1,
        dtype="float32",
        blocks="native",
        stages=(),
        total_seconds=1.5,
        peak_host_bytes=None,
        peak_device_bytes=None,
    )
    (tmp_path / "file").touch()
    file = tmp_path / "file" / "report.json"
    with pytest.raises(WriteError):
        show_results({"a": 1}, report, [Path("v.gif")], as_json=True, file=file)
    said = capsys.readouterr()
    assert "1.5 s" in said.err
    assert said.err.endswith("wrote v.gif\n")
    assert said.out == '{\n  "a": 1\n}\n'


def test_columns_are_aligned_and_lines_end_with_their_text() -> None:
    rows = [("name", "bytes", "note"), ("a", "12", ""), ("longer", "3", "x y")]
    assert columns(rows, indent="  ", right=(1,)) == [
        "  name    bytes  note",
        "  a          12",
        "  longer      3  x y",
    ]
    assert columns([]) == []


def test_nothing_is_cut_coloured_or_read_as_markup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    long = "blocks.0." * 40
    assert columns([(long, "[bold]b[/bold]", ":smile: 1")]) == [
        f"{long}  [bold]b[/bold]  :smile: 1"
    ]
