"""Which failures can pass when the same run is tried again."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from tpuport.cli.shown.errors import explain, may_pass, reported
from tpuport.core.files.atomic import cannot_write
from tpuport.errors import (
    ArtifactError,
    AtWorkError,
    HubError,
    OutputError,
    TpuportError,
    UsageError,
    VideoError,
    WeightsError,
)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


FULL = OSError(errno.ENOSPC, "No space left on device")
IN_THE_WAY = NotADirectoryError(errno.ENOTDIR, "Not a directory")


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        MemoryError(),
        AtWorkError("runs/fox: process 3 is at work in this run directory"),
        FULL,
        OutputError("v.mp4: cannot be written: No space left on device"),
        caused(cannot_write(Path("f"), FULL), FULL),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes."),
        RuntimeError("UNAVAILABLE: TPU worker may have crashed"),
    ],
)
def test_these_can(error: BaseException) -> None:
    assert may_pass(error)


@pytest.mark.parametrize(
    "error",
    [
        *(
            kind("what")
            for kind in (
                ArtifactError,
                HubError,
                OutputError,
                TpuportError,
                UsageError,
                VideoError,
            )
        ),
        caused(cannot_write(Path("f"), IN_THE_WAY), IN_THE_WAY),
        caused(WeightsError("cut short"), ValueError("header")),
        OSError(errno.EACCES, "Permission denied"),
        RuntimeError("INVALID_ARGUMENT: shapes"),
        TypeError("a fault of the program"),
    ],
)
def test_these_come_again(error: BaseException) -> None:
    assert not may_pass(error)


def test_a_full_disk_is_a_line_whoever_met_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert explain(OSError(errno.ENOSPC, "No space", "dump/a.json"), debug=False) == 1
    said = "error: dump/a.json: cannot be written: no room is left on the disk"
    assert capsys.readouterr().err.startswith(said)


def test_only_a_closed_stdout_is_no_failure(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def code_of(run: Callable[[], None]) -> int:
        with pytest.raises(typer.Exit) as caught, reported():
            run()
        return caught.value.exit_code

    def another() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    assert code_of(another) == 1
    assert "Broken pipe" in capfd.readouterr().err
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert code_of(lambda: print("x" * (1 << 20))) == 0
    assert capfd.readouterr().err == ""


def test_a_name_that_is_too_long_is_said_to_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(OSError, match="too long") as caught:
        Path("x" * 300).stat()
    assert explain(caught.value, debug=False) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: 'xxx")
    assert line.endswith("xxx' is too long for the name of a file or folder")
