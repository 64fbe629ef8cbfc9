"""The file of jobs: order, owners, limits, and what a killed server leaves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tpuport.cli.runs.many import Stopped
from tpuport.cli.server.child import _Events
from tpuport.cli.server.jobs import COMPLETED, QUEUED, RUNNING, Job, Jobs, new_id
from tpuport.errors import ArtifactError


def add(jobs: Jobs, name: str, owner: str = "", limit: int = 9) -> bool:
    return jobs.add(Job(id=name, owner=owner, asked={}), limit)


def test_jobs_run_in_order_and_one_that_ran_is_first_again(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs")
    assert [add(jobs, name, limit=2) for name in "abc"] == [True, True, False]
    jobs.begin(["a"])
    first = jobs.get("a")
    assert first is not None
    assert first.status == RUNNING
    assert add(jobs, "c", limit=2)
    jobs.close()  # as a kill leaves the file
    jobs = Jobs(tmp_path / "jobs")
    jobs.recover(60.0)
    found = jobs.oldest()
    assert found is not None
    assert (found.id, found.tries, jobs.position(found)) == ("a", 0, 1)
    jobs.begin(["a", "b"])
    jobs.again("a", lost=True)  # and no other
    found = jobs.get("a")
    assert found is not None
    assert (found.status, found.tries, jobs.count(RUNNING)) == (QUEUED, 1, 1)
    assert [one.id for one in jobs.queued("")] == ["a", "c"]
    jobs.begin(["a"])
    jobs.again("a", anew=True)
    assert [one.tries for one in jobs.queued("")] == [0, 0]


def test_a_key_is_of_one_job_of_an_owner_until_the_job_is_gone(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs")

    def asked(name: str, owner: str, once: str | None) -> bool:
        own = Job(id=name, owner=owner, asked={}, once=once, body=name)
        return jobs.add(own, 9)

    assert asked("a", "", "k")
    assert not asked("b", "", "k")
    assert asked("c", "other", "k")
    assert asked("d", "", "l")
    assert asked("e", "", None)
    assert asked("f", "", None)
    found = jobs.once("", "k")
    assert found is not None
    assert (found.id, found.body) == ("a", "a")
    assert jobs.once("nobody", "k") is None
    jobs.delete("a")
    assert asked("b", "", "k")


def test_an_owner_sees_only_its_own_jobs(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs")
    for name in "abcd":
        add(jobs, name, owner=f"key {name in 'bd'}")
    page = jobs.page("key True", None, 9, up=False)
    assert [job.id for job in page] == ["d", "b"]
    assert [job.id for job in jobs.page("key True", page[1], 9, up=True)] == ["d"]
    assert jobs.get("a", "key True") is None
    assert jobs.get("a", "key False") is not None


def test_what_ended_expires_and_a_job_that_is_gone_stays_gone(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path / "jobs")
    for name in "ab":
        add(jobs, name)
    jobs.ended("a", keep=-1, result={"total_seconds": 1})
    jobs.delete("b")
    jobs.ended("b", keep=-1)
    assert (jobs.expired(), jobs.count(COMPLETED)) == (["a"], 1)
    found = jobs.get("a")
    assert found is not None
    assert found.result == {"total_seconds": 1}
    jobs.recover(keep=60)
    assert jobs.expired() == []
    assert abs((found.ended or 0) - time.time()) < 60


def test_a_job_that_is_stopped_ends_at_its_next_step() -> None:
    class Line:
        stopped: ClassVar[set[str]] = set()
        sent: ClassVar[list[Any]] = []

        def send(self, message: Any) -> None:
            self.sent.append(message)

    line: Any = Line()
    events = _Events(line)
    events.job = "a"
    events.advanced("denoise", 1, 9)
    line.stopped.add("b")
    events.advanced("denoise", 2, 9)
    assert [told.done for told in line.sent] == [1, 2]
    line.stopped.add("a")
    with pytest.raises(Stopped):
        events.advanced("denoise", 3, 9)
    assert len(line.sent) == 2


def test_ids_are_not_guessed() -> None:
    names = {new_id() for _ in range(100)}
    assert len(names) == 100
    assert all(len(name) == len("video_") + 32 for name in names)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "jobs"
    file.write_text("x" * 4096)
    with pytest.raises(ArtifactError, match="is no file of jobs"):
        Jobs(file)
