"""What is shown while a run runs."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable

import pytest
import torch

from tpuport import api
from tpuport.core.reports import CompileReport, Reporter, StageReport
from tpuport.core.run import progress
from tpuport.core.run.progress import Display

COMPILED = CompileReport(
    stage="denoise",
    program="step",
    trace_seconds=1.0,
    compile_seconds=2.0,
    cached=False,
)


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that displays read, and no beat by itself; the entry may be changed."""
    now = [100.0]
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: now[0])
    monkeypatch.setattr(progress._Growing, "_grow", lambda self, stop: None)
    return now


def stage(display: Display, clock: list[float], **changes: object) -> None:
    """The events of a denoise stage of three steps, 10 s each after the first."""
    beat = getattr(display._line, "_beat", lambda: None)  # a terminal has none
    display.stage_started("denoise", 3, "step")
    display.loading("transformer")
    display.compiling("denoise", "step")
    clock[0] += 7
    beat()
    display.compiled(COMPILED)
    for done in (1, 2, 3):
        display.advanced("denoise", done, 3)
        clock[0] += 10
        beat()
    given = {"compiles": (COMPILED,), "compile_seconds": 3.0, **changes}
    display.stage_finished(
        StageReport(
            stage="denoise",
            backend="tpuport",
            unit="step",
            total_seconds=37.0,
            steady_calls=2,
            steady_seconds=20.0,
            **given,  # type: ignore[arg-type]
        )
    )


def test_a_stage_is_one_line_that_grows_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    with Display() as display:
        display.say("a [bold]line[/bold]")
        stage(display, clock)
    captured = capsys.readouterr()
    assert captured.out == ""
    # Words each time the seconds have doubled, else a dot.
    assert captured.err.splitlines() == [
        "a [bold]line[/bold]",
        "denoise ... compiling step 7 s 1/3 2/3, 10.0 s a step. 3 steps in 37.0 s, "
        "compiling 3.0 s, 10.0 s a step",
    ]


def test_steps_are_timed_after_the_first_and_the_rest_is_foretold(
    clock: list[float],
) -> None:
    display = Display()
    display.stage_started("denoise", 50, "step")
    clock[0] += 600  # the first step waits for its compile
    display.advanced("denoise", 1, 50)
    clock[0] += 60
    display.advanced("denoise", 3, 50)
    assert display._status() == ("denoise", "3/50, 30.0 s a step, 24 min left")
    display.compiling("denoise", "step")
    clock[0] += 12
    assert display._status()[1] == "3/50, 30.0 s a step, compiling step 12 s"
    display.idle()
    assert display._status() == ("", "")


@pytest.mark.usefixtures("clock")
def test_work_that_ends_soon_has_no_line_but_for_the_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Display() as display:
        for what in ("importing", "reading"):
            with display.timed(what):
                pass
    assert capsys.readouterr().err == "importing ... 0.0 s\n"


def heard(
    capsys: pytest.CaptureFixture[str], words: str, work: Callable[[], None]
) -> str:
    """What is said until these words, while a work is done again and again."""
    until, said = time.monotonic() + 60, ""
    while words not in said and time.monotonic() < until:
        work()
        said += capsys.readouterr().err
    return said


def test_silence_ends_after_a_beat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "BEAT", 0.02)
    with Display() as display:
        display.say("first")
        with display.timed("compiling"):
            said = heard(capsys, "compiling ... ", lambda: time.sleep(0.01))
        assert said.startswith("first\ncompiling ... ")
    assert capsys.readouterr().err.endswith(" s\n")


def test_short_works_in_a_row_are_not_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "BEAT", 0.1)
    with Display() as display:
        display.say("first")

        def short() -> None:
            with display.timed("run"):
                time.sleep(0.03)

        assert "run ... " in heard(capsys, "run ... ", short)


def test_work_that_fails_is_no_longer_shown() -> None:
    with Display() as display:
        with pytest.raises(ValueError, match="no"), display.timed("compiling"):
            raise ValueError("no")
        assert display._status() == ("", "")


def test_one_line_moves_on_a_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    clock: list[float],
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120")):
        monkeypatch.setenv(name, value)
    with Display() as display:
        with display.timed("planning"), display.timed("compiling [bold]a[/bold]"):
            display.say("a [bold]line[/bold]")
            display._line._live.refresh()  # type: ignore[union-attr]
        stage(display, clock)
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "a [bold]line[/bold]\n" in shown
    assert "planning: compiling [bold]a[/bold] 0 s" in shown
    assert "denoise: 3 steps in 37.0 s, compiling 3.0 s" in shown
    # The line is empty at its end, for pages on which the cursor cannot go up.
    assert ": \n" not in shown
    assert (
        shown.count("\x1b[?25l") == shown.count("\x1b[?25h") > 0
    )  # the cursor is back
    assert capsys.readouterr().out == ""


def test_a_picture_stays_above_the_line_that_moves(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of the one before, until a line was said between."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Display() as display:
        display.picture("early", 3)
        display.stage_started("denoise", 3, "step")
        for drawn in ("first", "second"):
            display.picture(drawn, 3)
        display.say("a line")
        display.picture("third", 3)
        display.picture("larger", 4)
    found = terminal.getvalue()
    assert "early" not in found
    up = "\x1b7\x1b[{}A\r{}\x1b8"
    first, second = up.format(3, "first"), up.format(3, "second")
    assert "\n\n\n" + first in found
    assert second in found
    assert "\n" + second not in found
    assert found.index(second) < found.index("a line")
    assert "\n\n\n" + up.format(3, "third") in found
    assert "\n\n\n\n" + up.format(4, "larger") in found


def test_a_stage_that_is_loaded_does_not_speak_of_compiling(
    capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    with Display() as display:
        stage(display, clock, compiles=())
    assert "compiling 3.0 s" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "kind"), [({}, Display), ({"progress": False}, Reporter)]
)
def test_python_sees_progress_unless_told_not_to(
    given: dict[str, bool],
    kind: type,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told: list[Reporter] = []

    def ported(module: object, target: object, reporter: Reporter) -> None:
        told.append(reporter)

    monkeypatch.setattr("tpuport.core.seam.ported.port_module", ported)
    api.port(torch.nn.Linear(1, 1), **given)
    assert type(told[0]) is kind
    capsys.readouterr()  # upstream's words at the first import
    told[0].say("a line")
    assert capsys.readouterr().err == ("a line\n" if kind is Display else "")


@pytest.mark.parametrize("stderr", [None, io.StringIO()])
def test_a_run_goes_on_where_nobody_reads(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO | None
) -> None:
    if stderr is not None:
        stderr.close()
        monkeypatch.setattr(stderr, "isatty", lambda: False)
    monkeypatch.setattr(sys, "stderr", stderr)
    ended = []
    with Display() as display, display.timed("compiling"):
        display.say("a line")
        ended.append(display._status()[0])
    assert ended == ["compiling"]


@pytest.mark.usefixtures("clock")
def test_a_terminal_that_cannot_move_gets_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    with Display() as display, display.timed("compiling"):
        pass
    assert sys.stderr.getvalue() == "compiling ... 0.0 s\n"  # type: ignore[attr-defined]
