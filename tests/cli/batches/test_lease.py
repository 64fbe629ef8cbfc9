"""The hold of a folder in a store, in fsspec's own memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.cli.batches.test_driver import Fake
from tpuport.cli.asked.settings import Settings
from tpuport.cli.batches import lease
from tpuport.cli.batches.driver import Batch
from tpuport.cli.batches.folder import BatchFolder
from tpuport.cli.batches.lease import _Held, leased
from tpuport.core.files import stores
from tpuport.core.files.stores import StorePath
from tpuport.core.run.progress import Display
from tpuport.errors import AtWorkError, StoreError

FOLDER = StorePath("memory", "bucket/videos")
LOCK = FOLDER / ".lock"


@pytest.fixture(autouse=True)
def _memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(stores.SCHEMES, "memory", ("fsspec", "none"))
    monkeypatch.setattr(lease, "RENEW", 0.02)
    monkeypatch.setattr(lease, "EXPIRES", 0.3)
    monkeypatch.setattr(lease, "_SETTLE", 0.05)
    yield
    fsspec.filesystem("memory").store.clear()


def held_by(**about: Any) -> None:
    """A hold of another driver, on another host if not told else."""
    given = {"name": "far", "process": 7, "host": "other", **about}
    LOCK.write_bytes(_Held(**given).data())


def until_true(found: Any) -> None:
    until = time.monotonic() + 20
    while not found():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_second_driver_is_told_who_holds_the_folder() -> None:
    with leased(FOLDER):
        first = json.loads(LOCK.read_bytes())
        with pytest.raises(AtWorkError) as caught, leased(FOLDER):
            pass
        assert str(caught.value) == (
            f"{FOLDER}: process {os.getpid()} on {socket.gethostname()} is at work in "
            "this folder; wait until it has ended, or name another folder"
        )
        until_true(lambda: json.loads(LOCK.read_bytes())["signs"] > first["signs"])
    assert not LOCK.exists()
    with leased(FOLDER):
        pass


def test_a_dead_process_of_this_host_holds_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on a disk."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    held_by(host=lease.machine(), process=gone.pid)
    with leased(FOLDER) as mine:
        mine.check()
    said = capsys.readouterr().err
    assert f"process {gone.pid} on far is dead; taking its place" in said
    held_by(host=lease.machine(), process=os.getpid())
    with pytest.raises(AtWorkError), leased(FOLDER):
        pass


def test_a_driver_of_another_host_that_gives_no_sign_of_life_loses_the_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    held_by()
    began = time.monotonic()
    with leased(FOLDER):
        assert time.monotonic() - began >= lease.EXPIRES
        said = capsys.readouterr().err
    assert "waiting for a sign of life of process 7 on far" in said
    assert "process 7 on far gives no sign of life; taking its place" in said


@pytest.mark.parametrize("how", ["lives", "ends"])
def test_a_driver_of_another_host_is_watched(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_by()
    sleep = time.sleep

    def something_happens(seconds: float) -> None:
        if seconds == lease.RENEW / 2:
            held_by(signs=1) if how == "lives" else LOCK.remove()
        sleep(seconds)

    monkeypatch.setattr(lease.time, "sleep", something_happens)
    if how == "ends":
        lease.Lease(FOLDER).take()
        assert json.loads(LOCK.read_bytes())["process"] == os.getpid()
        return
    with pytest.raises(AtWorkError, match="7 on far is at work"):
        lease.Lease(FOLDER).take()


def test_of_two_that_take_a_dead_drivers_place_one_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_by()
    one = lease.Lease(FOLDER)
    sleep = time.sleep

    def other_comes(seconds: float) -> None:
        if seconds == lease._SETTLE:
            held_by(name="near")
        sleep(seconds)

    monkeypatch.setattr(lease.time, "sleep", other_comes)
    with pytest.raises(AtWorkError, match="7 on near is at work"):
        one.take()
    assert json.loads(LOCK.read_bytes())["name"] == "near"


@pytest.mark.parametrize("error", [FileExistsError, StoreError])
def test_a_driver_whose_first_put_was_answered_late_has_the_folder(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StorePath.write_bytes

    def answered_late(self: StorePath, data: bytes, **how: Any) -> None:
        write(self, data)
        if not how.get("replace", True):
            raise error

    monkeypatch.setattr(StorePath, "write_bytes", answered_late)
    with leased(FOLDER) as mine:
        mine.check()


def test_a_driver_that_slept_while_another_came_and_went_ends() -> None:
    mine = lease.Lease(FOLDER)
    mine.take()
    mine._seen -= 2 * lease.EXPIRES
    LOCK.remove()
    with pytest.raises(AtWorkError, match="another driver has taken over"):
        mine.check()
    assert not LOCK.exists()


def test_a_driver_that_stood_still_ends_and_leaves_the_hold_of_the_other() -> None:
    with leased(FOLDER) as mine:
        held_by()
        until_true(lambda: mine._lost)
        with pytest.raises(AtWorkError, match="7 on far has taken over this folder"):
            mine.check()
    assert json.loads(LOCK.read_bytes())["name"] == "far"


def test_a_driver_that_goes_on_before_its_next_sign_of_life_is_stopped_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease, "RENEW", 0.5)
    with leased(FOLDER) as mine:
        held_by()
        mine.check()
        mine._seen -= 0.2
        with pytest.raises(AtWorkError, match="has taken over"):
            mine.check()


def lose(folder: BatchFolder) -> None:
    """Another driver takes the folder while this one stands still."""
    assert folder._lease is not None
    held_by()
    folder._lease._seen -= lease.EXPIRES


def test_a_driver_that_lost_the_folder_begins_no_video(tmp_path: Path) -> None:
    folder = BatchFolder(FOLDER, tmp_path)

    class Slow(Fake):
        def idle(self) -> list[int]:
            lose(folder)
            return super().idle()

    replicas = Slow(1)

    def run() -> None:
        with folder.held():
            asked = Batch.read('{"prompt": "a fox"}', "a file", folder, Settings())
            asked.run(replicas, Display())

    with pytest.raises(AtWorkError, match="7 on far has taken over"):
        run()
    assert not replicas.order


def test_a_driver_that_lost_the_folder_removes_nothing_of_the_other(
    tmp_path: Path,
) -> None:
    folder, run = BatchFolder(FOLDER, tmp_path), FOLDER / "runs/+1/video-0/tape.json"

    def end() -> None:
        with folder.held():
            run.write_bytes(b"{}")
            lose(folder)

    with pytest.raises(AtWorkError, match="7 on far has taken over"):
        end()
    assert run.exists()


def test_a_store_that_replaces_whatever_it_is_told_shows_the_other_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = StorePath.write_bytes

    def replaces(self: StorePath, data: bytes, **how: Any) -> None:
        write(self, data)

    monkeypatch.setattr(StorePath, "write_bytes", replaces)
    held_by(host=lease.machine(), process=os.getpid())
    with pytest.raises(AtWorkError, match="on far is at work"):
        lease.Lease(FOLDER).take()
