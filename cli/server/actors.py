"""Engines that are actors of Ray, one a slice, placed as replicas of a batch are."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tpuport.cli.batches.cluster import (
    LONG,
    Place,
    Slice,
    joined,
    why_not,
    why_of,
)
from tpuport.cli.server.child import Line, make_videos
from tpuport.cli.server.messages import Gone, Remark
from tpuport.core.run.progress import Display
from tpuport.errors import UsageError

#: Seconds in which an actor ends.
_END = 10.0


class _Actor(Line):
    """What runs in an actor's process; three of its calls are under way at once."""

    def __init__(self, folder: str, debug: bool) -> None:
        super().__init__()
        with contextlib.suppress(OSError):  # the server's, if this host has it
            os.chdir(folder)
        self._debug = debug
        self._said: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def there(self) -> None:
        """Answer once the process is."""

    def run(self) -> None:
        make_videos(self, debug=self._debug)

    def send(self, message: Any) -> None:
        self._said.put(message)

    def said(self) -> list[Any]:
        """What was said since the last call, once there is something."""
        found = [self._said.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._said.get_nowait())
        return found


class RayEngine:
    """Makes videos in an actor; see :func:`~tpuport.cli.server.child.make_videos`.

    Args:
        ray: the module, once a cluster is joined.
        name: for people.
        place: what the actor is placed by.
        hear: told each message, by a thread; :class:`Gone` is the last.
    """

    def __init__(
        self,
        ray: Any,
        name: str,
        place: Place,
        hear: Callable[[Any], None],
        *,
        debug: bool,
    ) -> None:
        self._ray, self._name, self._hear = ray, name, hear
        made = ray.remote(_Actor).options(
            max_concurrency=3, max_restarts=0, max_task_retries=0, **place
        )
        self._actor = made.remote(os.getcwd(), debug)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        """Ask; an actor that is gone is told of by :class:`Gone`."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._actor.take.remote(message)

    def _listen(self) -> None:
        try:
            there = self._actor.there.remote()
            run, said = self._actor.run.remote(), self._actor.said.remote()
            if not self._ray.wait([run, said], timeout=LONG)[0]:
                begun = bool(self._ray.wait([there], timeout=0)[0])
                self._hear(Remark(self._name, f"has not started yet: {why_not(begun)}"))
            while True:
                (done, *_), _ = self._ray.wait([run, said])
                for message in self._ray.get(done):
                    self._hear(message)
                said = self._actor.said.remote()
        except self._ray.exceptions.RayActorError:  # its process or its host ended
            pass
        except self._ray.exceptions.RayError as error:
            self._hear(Remark(self._name, why_of(error)))
        finally:
            self._kill()
            self._hear(Gone())

    def _kill(self) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor)

    def close(self) -> None:
        """End the actor."""
        self._kill()
        self._thread.join(_END)


@contextlib.contextmanager
def ray_engines(
    address: str,
    count: int | None,
    where: Slice,
    folder: Path,
    display: Display,
    *,
    debug: bool,
) -> Iterator[list[Callable[[Callable[[Any], None]], RayEngine]]]:
    """What starts each engine on a cluster; as :func:`~.cluster.joined`.

    Args:
        where: a slice of one host.
        folder: of the jobs.

    Raises:
        UsageError: as joined; or a host does not see the folder.
    """
    with joined(address, count, where, display, debug=debug) as (ray, found):
        with (
            display.timed("looking for --folder on all hosts"),
            tempfile.NamedTemporaryFile(dir=folder) as file,
        ):
            _check_shared(ray, Path(file.name), where.resource)
        yield [
            functools.partial(RayEngine, ray, f"engine {n}", place, debug=debug)
            for n, (place,) in enumerate((one.places for one in found), 1)
        ]


def _check_shared(ray: Any, file: Path, resource: str) -> None:
    """Refuse the folder of a file that a host does not see which may have an engine.

    Args:
        resource: what such hosts have.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    hosts = [
        node
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get(resource)
    ]
    look = ray.remote(num_cpus=0, max_retries=0)(_sees)
    calls = []
    for host in hosts:
        there = NodeAffinitySchedulingStrategy(host["NodeID"], soft=False)
        made = look.options(scheduling_strategy=there)
        calls.append((host["NodeManagerHostname"], made.remote(str(file))))
    for name, call in calls:
        try:
            sees = ray.get(call, timeout=LONG)
        except ray.exceptions.RayError as error:
            raise UsageError(f"--ray: {name}: {why_of(error)}") from error
        if not sees:
            raise UsageError(
                f"--folder {file.parent}: {name} of the cluster does not see it; name "
                "a folder that all hosts share"
            )


def _sees(file: str) -> bool:
    return os.path.exists(file)
