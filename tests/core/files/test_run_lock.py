"""One process at a time works in a run directory."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.core.files.runs import failing
from tpuport.core.files.run_lock import LOCK_FILE, holder, working_in
from tpuport.core.files.run_record import RUN_FILE
from tpuport.errors import ArtifactError, AtWorkError, WriteError

HOLD = """
import pathlib, sys, time
from tpuport.core.files.run_lock import working_in
with working_in(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_another_process_is_named_and_a_dead_one_locks_nothing(tmp_path: Path) -> None:
    (tmp_path / RUN_FILE).touch()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert holder(tmp_path) == process.pid
        with (
            pytest.raises(AtWorkError, match=f"process {process.pid} is at work"),
            working_in(tmp_path),
        ):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert holder(tmp_path) is None
    with working_in(tmp_path):
        assert holder(tmp_path) == os.getpid()
    assert holder(tmp_path) is None


def test_a_folder_in_which_no_run_began_is_as_it_was(tmp_path: Path) -> None:
    with working_in(tmp_path / "new" / "deep"):
        assert (tmp_path / "new" / "deep" / LOCK_FILE).exists()
    assert list(tmp_path.iterdir()) == []
    with working_in(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ArtifactError, match="cannot be written"),
        working_in(tmp_path / "file" / "run"),
    ):
        pass


def test_a_full_disk_is_one_line_with_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpuport.core.files.run_lock.os.write", failing)
    folder = tmp_path / "new"
    with pytest.raises(WriteError, match="no room is left on the disk") as caught:
        working_in(folder).__enter__()
    assert str(caught.value).startswith(f"{folder / LOCK_FILE}: cannot be written")
    assert list(tmp_path.iterdir()) == []


def test_who_waited_for_a_file_that_is_removed_locks_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leaves and removes its lock between B's open and B's lock; C comes then."""
    folder = tmp_path / "run"
    real, left = fcntl.flock, []

    def flock(file: Any, how: int) -> None:
        if not left:
            left.append((folder / LOCK_FILE).unlink())
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with working_in(folder):
        assert holder(folder) == os.getpid()


@pytest.mark.parametrize("content", ["", "\0\0\0", "x" * 100])
def test_a_lock_without_a_number_is_one_of_another_process(
    tmp_path: Path, content: str
) -> None:
    with working_in(tmp_path):
        (tmp_path / LOCK_FILE).write_text(content)
        assert holder(tmp_path) == 0
        with (
            pytest.raises(ArtifactError, match=": another process is at work"),
            working_in(tmp_path),
        ):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def without_locks(*_: Any) -> None:
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with working_in(tmp_path / "run"):
        assert holder(tmp_path / "run") is None
    assert list(tmp_path.iterdir()) == []
