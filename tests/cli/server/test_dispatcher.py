"""Jobs on several engines, and several jobs in one call; the engines make nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.cli.server.running import until
from tpuport.cli.asked.settings import Settings
from tpuport.cli.batches.packs import run_dir
from tpuport.cli.server.dispatcher import TRIES, Dispatcher
from tpuport.cli.server.jobs import COMPLETED, QUEUED, RUNNING, Job, Jobs
from tpuport.cli.server.messages import (
    Check,
    Checked,
    Ended,
    Gone,
    Make,
    Opened,
    Stop,
    Told,
)
from tpuport.cli.server.metrics import Metrics
from tpuport.cli.server.work import READY, Work, sizes_up_to

FACTS = {"width": 32, "height": 16, "num_frames": 5, "fps": 8.0, "steps": 9}


class Engine:
    """Makes nothing: a test says what it tells."""

    def __init__(self, hear: Callable[[Any], None]) -> None:
        self.hear, self.sent = hear, cast("list[Any]", [])

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self) -> None:
        """Nothing runs."""

    @property
    def make(self) -> Make:
        """What it makes now."""
        (*_, last) = (one for one in self.sent if isinstance(one, Make))
        return last

    def end(self, **more: Any) -> None:
        self.hear(Ended(job=self.make.job, **more))


class Checks:
    """Knows one shape; no pipeline starts from an image."""

    def check(self, settings: Settings) -> Checked:
        number = Check(0, settings).number
        if settings.image:
            return Checked(number=number, error="no image")
        return Checked(number=number, facts=FACTS)

    def close(self) -> None:
        """Nothing runs."""


class Server:
    """A dispatcher, its engines by place, and jobs."""

    def __init__(self, place: Path, count: int, batch_size: int | None) -> None:
        self.engines: list[list[Engine]] = [[] for _ in range(count)]
        self.jobs = Jobs(place / "jobs.sqlite3")

        def starts(number: int) -> Callable[[Callable[[Any], None]], Engine]:
            def start(hear: Callable[[Any], None]) -> Engine:
                self.engines[number].append(Engine(hear))
                hear(Opened())
                return self.engines[number][-1]

            return start

        self.made = Dispatcher(
            *(self.jobs, place, Settings(batch_size=batch_size), []),
            engines=[starts(number) for number in range(count)],
            keep=60.0,
            checks=cast("Any", Checks()),
            metrics=Metrics(),
        )

    def engine(self, number: int = 0) -> Engine:
        return self.engines[number][-1]

    def warm(self, number: int = 0) -> None:
        """Let an engine have made the first shape."""
        until(lambda: [m for m in self.engine(number).sent if isinstance(m, Make)])
        self.engine(number).end(denoise=(1.0,))
        until(lambda: self.made.slots[number].warm)

    def measured(self, *, alone: float, together: float) -> None:
        """Let the engine have measured two videos in one call."""
        until(lambda: len(self.engine().make.packs) == 4)
        assert [len(pack) for pack in self.engine().make.packs] == [1, 2, 1, 2]
        self.engine().end(denoise=(99.0, 99.0, 3 * alone, 3 * together))
        until(lambda: self.made.shapes[0].batches)

    def add(
        self, name: str, owner: str = "", seeds: tuple[int, ...] = (0,), **more: Any
    ) -> None:
        """Put a job into the queue."""
        values = {"prompt": f"a {name}", "size": "32x16", "num_frames": 5, **more}
        requests = self.made.files.requests(name, values, seeds)
        asked = {
            "values": values,
            "seeds": list(seeds),
            "digests": [one.digest for one in requests],
            "steps": 9,
            "size": "32x16",
            "num_frames": 5,
        }
        assert self.jobs.add(Job(id=name, owner=owner, asked=asked), 99)

    def status(self, name: str) -> str:
        found = self.jobs.get(name)
        return found.status if found else "gone"

    def delete(self, name: str) -> None:
        self.jobs.delete(name)
        self.made.deleted(name)

    def runs(self, *names: str, number: int = 0) -> Make:
        """What an engine makes, once it makes these jobs and no others."""

        def there() -> bool:
            work = self.made.slots[number].work
            return work is not None and work.jobs == names

        until(there, 10)
        return self.engine(number).make


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def start(count: int = 1, batch_size: int | None = None) -> Server:
        server = Server(tmp_path, count, batch_size)
        made.append(server)
        server.made.start()
        return server

    yield start
    for server in made:
        for slot in server.made.slots:
            slot.work = None  # nobody answers Stop
        server.made.close()
        server.jobs.close()


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


def packing(serve: Callable[..., Server], **took: float) -> Server:
    """A server that has measured two videos in one call, and makes a job."""
    server = serve(batch_size=2)
    server.warm()
    server.measured(**took)
    server.add("first")
    server.made.wake()
    server.runs("first")
    return server


def test_jobs_of_one_owner_share_a_call_where_that_pays(
    serve: Callable[..., Server],
) -> None:
    server = packing(serve, alone=1.0, together=1.5)
    assert server.made.shapes[0].as_dict()["batches"] == [
        {"videos": 2, "step_seconds": 1.5, "step_seconds_alone": 1.0, "used": True}
    ]
    server.add("fox", "one")
    server.add("cat", "two")
    server.add("cow", "one", num_inference_steps=3)
    server.add("hen", "one")
    server.add("dog", "one")
    server.engine().end()
    make = server.runs("fox", "hen")
    (pack,) = make.packs
    prompts = [one.settings.prompt for one in pack]
    assert prompts == [("a fox",), ("a hen",)]
    places = [Path(str(one.settings.out)).parent.name for one in pack]
    assert places == ["fox", "hen"]
    server.engine().hear(Told(job="fox", what="denoise", call=0, done=3, total=9))
    until(lambda: cast("Work", server.made.work_of("hen")).done_of(1) == 3)
    server.engine().end()
    server.runs("cat")
    assert [server.status(name) for name in ("fox", "hen")] == [COMPLETED] * 2
    server.engine().end()
    server.runs("cow")
    server.engine().end()
    server.runs("dog")
    # The videos of a job too, as many as there are programs for; of no image.
    server.add("bee", seeds=(1, 2, 3))
    server.add("ant", seeds=(1, 2), image="x.png")
    server.engine().end()
    assert [len(pack) for pack in server.runs("bee").packs] == [2, 1]
    server.engine().end()
    assert [len(pack) for pack in server.runs("ant").packs] == [1, 1]


def test_nothing_is_shared_where_that_does_not_pay(
    serve: Callable[..., Server],
) -> None:
    server = packing(serve, alone=1.0, together=2.0)
    server.add("fox")
    server.add("hen", seeds=(1, 2))
    server.engine().end()
    server.runs("fox")
    server.engine().end()
    assert [len(pack) for pack in server.runs("hen").packs] == [1, 1]
    # What was begun together goes on, as after a kill of the server.
    server.add("cat")
    server.add("dog")
    requests = [
        one
        for name in ("cat", "dog")
        for one in server.made.files.requests(
            name, {"prompt": f"a {name}", "size": "32x16", "num_frames": 5}, (0,)
        )
    ]
    run_dir(tuple(requests)).mkdir(parents=True)
    server.engine().end()
    server.runs("cat", "dog")


def test_a_delete_of_a_partner_stops_the_call(serve: Callable[..., Server]) -> None:
    server = packing(serve, alone=1.0, together=1.5)
    server.add("fox")
    server.add("hen")
    server.engine().end()
    (pack,) = server.runs("fox", "hen").packs
    run_dir(pack).mkdir()
    server.delete("hen")
    until(lambda: Stop("fox") in server.engine().sent)
    assert server.status("fox") == RUNNING
    server.engine().end(stopped=True)
    (alone,) = server.runs("fox").packs
    assert [one.settings.prompt for one in alone] == [("a fox",)]
    found = server.jobs.get("fox")
    assert found is not None
    assert found.tries == 0
    assert not server.made.files.place("hen").exists()
    assert not run_dir(pack).exists()


@pytest.mark.parametrize("lost", [False, True])
def test_a_call_that_fails_is_made_one_by_one(
    serve: Callable[..., Server], lost: bool
) -> None:
    """At once after an error; engines may be lost with it before, but for one."""
    server = packing(serve, alone=1.0, together=1.5)
    server.add("fox")
    server.add("hen")
    server.engine().end()
    (pack,) = server.runs("fox", "hen").packs
    run_dir(pack).mkdir()
    for _ in range(TRIES - 1 if lost else 0):
        until(lambda: server.runs("fox", "hen"))
        (old := server.engine()).hear(Gone())
        until(lambda old=old: server.engine() is not old)
    if not lost:
        server.engine().end(error="no memory", passes=True)
    server.runs("fox")
    assert not run_dir(pack).exists()
    server.engine().end(error="a NaN")
    server.runs("hen")
    server.engine().end()
    until(lambda: server.status("hen") == COMPLETED)
    assert server.status("fox") == "failed"


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
