"""Files are written whole or not at all; every refusal is one line with the name."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.files.runs import NO_ROOM, failing, refusal
from tpuport.core.files.atomic import (
    atomic_write_bytes,
    atomic_write_json,
    cannot_write,
    remove_leftovers,
    replacing,
    temporary_beside,
)
from tpuport.errors import UsageError


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "a.json"
    atomic_write_json(path, {"a": 1})
    monkeypatch.setattr(os, step, failing)
    message = refusal(atomic_write_json, path, {"a": 2})
    assert message == f"{path}: {NO_ROOM}"
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError("-28 (No space left on device)"),  # ffmpeg's
        RuntimeError("I/O error: No space left on device (os error 28)"),  # Rust's
        RuntimeError("RESOURCE_EXHAUSTED: p/vm.pb; No space left on device"),  # jax's
    ],
)
def test_a_full_disk_has_one_line_and_one_exit_code(error: Exception) -> None:
    found = cannot_write(Path("f"), error)
    assert (str(found), found.exit_code) == (f"f: {NO_ROOM}", 1)
    other = cannot_write(Path("f"), OSError(errno.EFBIG, "File too large"))
    assert str(other) == "f: cannot be written: File too large"


def test_an_interrupt_removes_the_temporary_file(tmp_path: Path) -> None:
    def interrupted() -> None:
        with replacing(tmp_path / "a") as file:
            file.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


def test_file_and_folder_are_flushed_and_the_rename_comes_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def spy_fsync(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        steps.append("folder" if target.is_dir() else "file")
        fsync(descriptor)

    def spy_replace(source: Path, target: Path) -> None:
        assert source.parent == target.parent
        steps.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    atomic_write_bytes(tmp_path / "a", b"content")
    assert steps == ["file", "rename", "folder"]


def test_files_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    atomic_write_bytes(tmp_path / "bytes", b"")
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_what_is_not_json_is_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a\.json: cannot be written as JSON"):
        atomic_write_json(tmp_path / "a.json", {"a": float("nan")})
    assert os.listdir(tmp_path) == []


def test_what_dead_processes_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file and a folder; what lives, was named by others or by hand stays."""
    code = """
import os, pathlib, sys
from tpuport.core.files.atomic import replacing, temporary_beside
folder = pathlib.Path(sys.argv[1])
(temporary_beside(folder / "frames") / "deep").mkdir(parents=True)
with replacing(folder / "a.mp4"):
    os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    assert len(os.listdir(tmp_path)) == 2
    (tmp_path / ".tpuport-mine").touch()
    living = temporary_beside(tmp_path / "a.mp4")  # which removes what the dead left
    living.touch()
    assert sorted(os.listdir(tmp_path)) == sorted([living.name, ".tpuport-mine"])
    # A later process of that number is another one; one of another host is not known.
    _, host, pid, began, token = living.name.split("-")
    reused = tmp_path / f".tpuport-{host}-{pid}-{'0' * len(began)}-{token}"
    elsewhere = tmp_path / f".tpuport-{'0' * len(host)}-{2**30}-{began}-{token}"
    for file in (reused, elsewhere):
        file.touch()
    remove_leftovers(tmp_path)
    assert reused.exists() is (not began)
    assert elsewhere.exists()
    assert living.exists()

    def of_another_user(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", of_another_user)
    remove_leftovers(tmp_path)
    assert living.exists()


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    """As /dev/null and /dev/stdout do, which a rename would replace by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    atomic_write_json(pipe, [1])
    assert json.loads(os.read(reader, 100)) == [1]
    os.close(reader)
    assert pipe.is_fifo()
