"""What is shown while a run runs."""

from __future__ import annotations

import io
import sys

import pytest

from tpuport.cli.shown import progress as _progress
from tpuport.cli.shown.progress import BarDisplay, Display, PlainDisplay, make_display
from tpuport.core.reports import CompileReport, StageReport


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run_through(display: Display) -> None:
    """The events of a small denoise stage."""
    compiled = CompileReport(
        stage="denoise",
        program="step",
        trace_seconds=1.0,
        compile_seconds=2.0,
        cached=True,
    )
    with display:
        display.say("a [bold]line[/bold]")
        with display.timed("tracing [bold]denoise[/bold]"):
            display.began("reading a schedule")
            display.ended("reading a schedule", 83.26)
        display.stage_started("denoise", 7, "step")
        display.loading("transformer")
        display.compiling("denoise", "step")
        display.compiled(compiled)
        display.advanced("denoise", 1, 7)
        for done in (1, 2, 3):
            display.advanced("denoise", done, 3)
            display.delivered("denoise", 4 * done, 12)
        display.stage_finished(
            StageReport(
                stage="denoise",
                backend="tpuport",
                unit="step",
                total_seconds=4.0,
                compiles=(compiled,),
                compile_seconds=3.0,
                steady_calls=2,
                steady_seconds=1.0,
            )
        )


def test_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "LINE_EVERY", 0.0)
    display = make_display()
    assert isinstance(display, PlainDisplay)
    run_through(display)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "a [bold]line[/bold]",
        "tracing [bold]denoise[/bold] ...",
        "reading a schedule ...",
        "reading a schedule took 83.3 s",
        "tracing [bold]denoise[/bold] took 0.0 s",
        "denoise: started, 7 steps",
        "loading transformer",
        "compiling denoise/step ...",
        "compiled denoise/step in 3.0 s (from the compile cache)",
        "denoise: 1 of 7 steps",
        "denoise: 1 of 3 steps",
        "denoise: 4 of 12 frames",
        "denoise: 2 of 3 steps",
        "denoise: 8 of 12 frames",
        "denoise: 12 of 12 frames",
        "denoise: finished in 4.0 s, 0.500 s/step",
    ]


def test_bars_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    display = make_display()
    assert isinstance(display, BarDisplay)
    run_through(display)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "a [bold]line[/bold]" in shown
    # What began again counts to its own total, in the same bar.
    assert "1/7" in shown or "0/7" in shown
    assert "3/3" in shown
    assert "3/7" not in shown
    assert "12 of 12 frames" in shown
    assert "compile 3.0 s, cached, 0.500 s/step" in shown
    assert "tracing [bold]denoise[/bold] took 0.0 s" in shown
    assert "reading a schedule took 83.3 s" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # the cursor is back
    assert capsys.readouterr().out == ""


def test_work_is_shown_with_its_time_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    with BarDisplay() as display:
        with display.timed("compiling denoise/step"):
            display._bars().refresh()
            running = display._bars().tasks
            assert [task.description for task in running] == ["compiling denoise/step"]
        assert display._bars().tasks == []
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    timed = [line for line in shown.splitlines() if "0:00:00" in line]
    assert timed
    assert all("compiling denoise/step" in line for line in timed)
    # There is nothing to count.
    assert "/?" not in shown


def test_work_that_fails_is_no_longer_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="no"), PlainDisplay().timed("compiling"):
        raise ValueError("no")
    assert capsys.readouterr().err == "compiling ...\ncompiling took 0.0 s\n"
