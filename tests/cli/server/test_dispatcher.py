"""Jobs on several engines; the engines make nothing."""

from __future__ import annotations

import errno
import sqlite3
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.cli.server.conftest import Server
from tests.cli.server.running import until
from tpuport.cli.server import dispatcher
from tpuport.cli.server.dispatcher import TRIES
from tpuport.cli.server.jobs import COMPLETED, FAILED, QUEUED, RUNNING
from tpuport.cli.server.messages import Gone, Stop, Told
from tpuport.cli.server.work import READY, Work, sizes_up_to


def test_engines_make_jobs_at_the_same_time(serve: Callable[..., Server]) -> None:
    server = serve(2)
    server.add("fox")
    server.add("cat")
    server.warm(1)
    until(lambda: server.made.status == READY)
    server.runs("fox", number=1)  # an engine takes jobs once it has the first shape
    assert (server.made.engines_ready, server.status("cat")) == (1, QUEUED)
    server.warm(0)
    server.runs("cat", number=0)
    assert server.jobs.count(RUNNING) == server.made.engines_ready == 2
    server.engine(1).hear(
        Told(job="fox", what="denoise", call=0, done=3, total=9),
    )
    until(lambda: cast("Work", server.made.work_of("fox")).done_of(1) == 3)
    assert cast("Work", server.made.work_of("cat")).done_of(1) == 0
    server.engine(1).end()
    until(lambda: server.status("fox") == COMPLETED)
    assert server.status("cat") == RUNNING


def test_the_steps_of_a_job_are_told_until_it_has_ended(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(1)
    server.warm()
    server.add("fox")
    server.made.wake()
    server.runs("fox")
    end, works = server.jobs.ended, []

    def ended(name: str, *args: Any, **how: Any) -> None:
        works.append(server.made.work_of(name))
        end(name, *args, **how)

    monkeypatch.setattr(server.jobs, "ended", ended)
    server.engine().end()
    until(lambda: server.status("fox") == COMPLETED)
    assert [work.jobs for work in works if work] == [("fox",)]
    until(lambda: server.made.work_of("fox") is None)


def test_a_lost_engine_gives_back_its_own_job(serve: Callable[..., Server]) -> None:
    server = serve(2)
    for number, name in enumerate(("fox", "cat")):
        server.warm(number)
        server.add(name)
        server.made.wake()
        server.runs(name, number=number)
    lost = server.engine(0)
    lost.hear(Gone())
    until(lambda: server.engine(0) is not lost)
    server.runs("fox", number=0)  # the new engine goes on with the job
    fox, cat = (server.jobs.get(name) for name in ("fox", "cat"))
    assert fox is not None
    assert cat is not None
    assert (fox.status, fox.tries, cat.status, cat.tries) == (RUNNING, 1, RUNNING, 0)
    assert len(server.engines[1]) == 1
    for _ in range(TRIES - 1):
        (old := server.engine(0)).hear(Gone())
        until(lambda old=old: server.engine(0) is not old)
    until(lambda: server.status("fox") == "failed")
    assert (server.status("cat"), server.made.status) == (RUNNING, READY)


def test_a_server_of_which_an_engine_never_starts_goes_on(
    serve: Callable[..., Server],
) -> None:
    server = serve(2)
    server.warm(0)
    for _ in range(TRIES):
        until(lambda: server.made.slots[1].work)
        (old := server.engine(1)).hear(Gone())
        until(
            lambda old=old: server.engine(1) is not old or server.made.slots[1].failed
        )
    assert (server.made.status, server.made.engines_ready) == (READY, 1)
    for _ in range(TRIES):
        until(lambda: server.made.slots[0].opened)
        (old := server.engine(0)).hear(Gone())
        until(lambda old=old: server.engine(0) is not old or server.made.error)
    assert (server.made.status, server.made.error) == (
        *("failed", "no engine can be started"),
    )


def test_a_delete_stops_the_right_engine(serve: Callable[..., Server]) -> None:
    server = serve(2)
    for number, name in enumerate(("fox", "cat")):
        server.warm(number)
        server.add(name)
        server.made.wake()
        server.runs(name, number=number)
    server.delete("cat")
    until(lambda: Stop("cat") in server.engine(1).sent)
    assert Stop("cat") not in server.engine(0).sent
    place = server.made.files.place("cat")
    assert place.exists()  # until the engine has let go
    server.engine(1).end(stopped=True)
    until(lambda: not place.exists())
    assert server.status("fox") == RUNNING


def test_an_idle_engine_may_be_lost_again_and_again(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not soon after its start; as in the test above."""
    monkeypatch.setattr(dispatcher, "_LIVES", 0.0)
    server = serve()
    server.warm()
    for _ in range(TRIES + 1):
        server.lose()
    assert (server.made.status, server.made.error) == (READY, "")


def test_a_first_shape_whose_error_passes_is_tried_again(
    serve: Callable[..., Server],
) -> None:
    server = serve()
    for tries in range(1, TRIES):
        until(lambda: server.made.slots[0].work)
        server.engine().end(error="no memory", passes=True)
        until(lambda tries=tries: server.engine().asked == tries + 1)
    server.warm()
    until(lambda: server.made.status == READY)
    other = serve()
    for tries in range(1, TRIES + 1):
        until(lambda tries=tries: other.engine().asked == tries)
        other.engine().end(error="no memory", passes=True)
    until(lambda: other.made.error)
    assert (other.made.status, other.made.error) == ("failed", "no memory")


def test_an_engine_that_ends_is_named(
    serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(2)
    server.warm(0)
    for _ in range(TRIES):
        until(lambda: server.made.slots[1].work)
        server.lose(1)
    until(lambda: not server.made.slots[1].opened)
    said = capsys.readouterr().err
    assert said.count("engine 2 has ended; another one is started") == TRIES - 1
    assert said.count("engine 2 has ended; no other one is started") == 1
    assert "engine 1" not in said


def test_the_time_left_is_that_of_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    work = Work("fox", cast("Any", ((1, 2), (3,))), ("fox",), steps=10)
    for done in (1, 2, 3):
        now += 4.0
        work.heard(Told(job="fox", what="denoise", call=0, done=done, total=10))
        work.heard(Told(job="hen", what="denoise", call=0, done=9, total=10))
    # Seven steps of two videos, and ten of one, half as long.
    assert (work.done_of(3), work.seconds_left) == (6, 7 * 4.0 + 10 * 2.0)
    now += 4.0
    work.heard(Told(job="fox", what="denoise", call=1, done=1, total=10))
    assert (work.done_of(3), work.seconds_left) == (21, None)


def test_the_sizes_of_calls_that_are_tried() -> None:
    assert [sizes_up_to(n) for n in (1, 2, 5, 8)] == [[], [2], [2, 4, 5], [2, 4, 8]]


class Full:
    """A file of jobs on a disk without room."""

    def __init__(self, base: sqlite3.Connection) -> None:
        self._base = base

    def execute(self, text: str, *values: Any) -> sqlite3.Cursor:
        if not text.startswith("SELECT"):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self._base.execute(text, *values)

    def close(self) -> None:
        self._base.close()


def test_jobs_wait_while_the_disk_is_full(serve: Callable[..., Server]) -> None:
    server = serve()
    base = server.jobs._base
    server.add("fox")
    server.add("hen")
    server.jobs._base = full = cast("Any", Full(base))
    server.warm()
    until(lambda: "disk is full" in server.made.error)
    assert (server.status("fox"), server.made.status) == (QUEUED, READY)
    server.jobs._base = base
    server.runs("fox")
    assert server.made.error == ""
    run = server.made.files.place("fox") / "run-0"
    run.mkdir()
    server.jobs._base = full
    server.engine().end(error="no frames")
    until(lambda: server.made.error)
    assert (server.status("fox"), server.status("hen")) == (RUNNING, QUEUED)
    server.jobs._base = base
    server.runs("hen")
    assert server.status("fox") == FAILED
    assert not run.exists()


def test_an_engine_that_does_not_stop_is_told_of(
    serve: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dispatcher, "_PATIENCE", 0.1)
    server = serve()
    server.warm()
    server.add("fox")
    server.made.wake()
    server.runs("fox")
    server.made.close()
    assert "engine 1 has not stopped within 0 s; its jobs go on" in (
        capsys.readouterr().err
    )


def test_a_job_that_cannot_be_read_ends_and_the_next_one_runs(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    real = server.made.files.requests

    def requests(name: str, *given: Any) -> Any:
        if name == "fox":
            raise PermissionError(errno.EACCES, "Permission denied", "image.png")
        return real(name, *given)

    server.warm()
    server.add("fox")
    server.add("hen")
    monkeypatch.setattr(server.made.files, "requests", requests)
    server.made.wake()
    server.runs("hen")
    assert server.status("fox") == FAILED
