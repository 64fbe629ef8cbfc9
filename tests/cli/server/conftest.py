"""Servers whose engines make nothing: a test says what the engines tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.cli.server.running import until
from tpuport.cli.asked.settings import Settings
from tpuport.cli.server.dispatcher import Dispatcher
from tpuport.cli.server.jobs import Job, Jobs
from tpuport.cli.server.messages import (
    Check,
    Checked,
    Ended,
    Gone,
    Make,
    Opened,
)
from tpuport.cli.server.metrics import Metrics

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
    def asked(self) -> int:
        """How often it was asked to make something."""
        return sum(isinstance(one, Make) for one in self.sent)

    @property
    def make(self) -> Make:
        """What it makes now."""
        (*_, last) = (one for one in self.sent if isinstance(one, Make))
        return last

    def end(self, **more: Any) -> None:
        self.hear(Ended(job=self.make.job, **more))


class Checks:
    """Knows one shape; no pipeline starts from an image."""

    def check(self, settings: Settings, patience: float | None) -> Checked:
        assert patience is None  # a server that starts waits for its libraries
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
        assert self.engine(number).make.plain  # frames of one colour will do
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

    def lose(self, number: int = 0) -> None:
        """Let an engine end, and the dispatcher hear of it."""
        (old := self.engine(number)).hear(Gone())
        until(lambda: self.engine(number) is not old or self.made.slots[number].failed)

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
        made = self.engine(number).make
        assert not made.plain
        return made


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
