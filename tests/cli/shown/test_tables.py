"""Tables for people: aligned, whole and without colours, wherever they go."""

from __future__ import annotations

import pytest

from tpuport.cli.shown.tables import columns


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
