"""Replicas that are actors of Ray, one on each host of a slice of their own.

In place of a replica that has lost an actor another one starts, in another slice where
the slice is lost.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.cli.asked.environment import import_libraries, prepare
from tpuport.cli.asked.many_hosts import about, hosts_wait
from tpuport.cli.batches.cluster import (
    LONG,
    Reserved,
    Slice,
    joined,
    reserved_again,
    why_not,
    why_of,
)
from tpuport.cli.batches.local import Ended
from tpuport.cli.batches.packs import Pack, kept_in, run_dir
from tpuport.cli.shown.errors import may_pass
from tpuport.cli.shown.output import told
from tpuport.core.files.stores import StorePath
from tpuport.core.mesh import coordinator
from tpuport.core.mesh.hosts import Address, here, meet
from tpuport.core.reports import Reporter
from tpuport.core.run.progress import Display
from tpuport.errors import TpuportError, in_one_line

if TYPE_CHECKING:
    from tpuport.cli.asked.settings import Settings

#: Starts of replicas that may fail one after the other.
_STARTS = 3
#: Seconds between two looks at signals.
_LOOK = 0.5
#: What mends a host that does not come.
_REMEDY = "open all ports between the hosts of a slice"


class _Remarks(Reporter):
    """Keeps each remark once, until they are taken; ends where a host is lost."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._new: list[str] = []

    def say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._new.append(text)

    def take(self) -> tuple[str, ...]:
        taken, self._new = tuple(self._new), []
        return taken

    def stage_started(self, stage: str, total: int, unit: str) -> None:
        here().check()

    def advanced(self, stage: str, done: int, total: int) -> None:
        here().check()


@dataclass(frozen=True, kw_only=True)
class Said:
    """What an actor says of a call.

    Attributes:
        error: in one line; empty for none.
        passes: a new replica may succeed.
        remarks: lines for people, of the first host alone.
    """

    error: str = ""
    passes: bool = False
    remarks: tuple[str, ...] = ()


class Replica:
    """What runs in an actor's process: one pack of requests after the other."""

    def address(self) -> tuple[str, int]:
        """Where this process will listen for those of the other hosts."""
        import ray

        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return host, coordinator.free_port()

    def start(
        self, folder: str, debug: bool, at: tuple[str, int], wait: float, *which: int
    ) -> None:
        """Find the other hosts, and import the libraries.

        Args:
            folder: the driver's, if this host has it.
            at: the address of the first host; empty without others.
            wait: seconds for the other hosts.
            which: the number of this host, and how many there are.
        """
        with contextlib.suppress(OSError):
            os.chdir(folder)
        prepare(debug=debug)
        number, count = which
        if count > 1:
            from tpuport.cli.asked.settings import Settings

            meet(Address(at, count, number), about(Settings()), wait, _REMEDY)
        import_libraries(Reporter())
        if here().several:
            coordinator.join(here())
        from tpuport.cli.runs.many import Engine

        self._remarks = _Remarks()
        self._engine = Engine(self._remarks)

    def make(
        self,
        requests: Sequence[tuple[Settings, str]],
        run_dir: Path,
        kept_in: StorePath | None,
    ) -> Said:
        """Make the videos of requests in one call, with the other hosts."""
        if not here().first:  # which writes nothing
            requests = [(replace(asked, out=None), key) for asked, key in requests]
        error, passes = "", False
        try:
            with told(self._remarks.say):
                self._engine.make_pack(requests, run_dir, kept_in=kept_in)
        except Exception as raised:
            error = in_one_line(raised) or type(raised).__name__
            passes = may_pass(raised)
            here().failed(error)
        remarks = self._remarks.take() if here().first else ()
        return Said(error=error, passes=passes, remarks=remarks)


@dataclass
class _Call:
    """What all actors of a replica do at once.

    Attributes:
        pack: ``None`` for their start.
        said: by the actors that are done; the error of one that is gone.
    """

    replica: int
    pack: Pack | None
    said: dict[int, Said | Exception | None] = field(default_factory=dict)


@dataclass
class _Start:
    """A start that is under way.

    Attributes:
        there: an answer of each actor, once its process is there.
        looked: when the start began, or was looked at.
        told: that it takes long.
    """

    there: list[Any]
    looked: float = field(default_factory=time.monotonic)
    told: bool = False


class RayReplicas:
    """:class:`~tpuport.cli.batches.local.Replicas` on a cluster that is joined.

    Args:
        where: the slice of each replica.
        held: what each replica has of the cluster.
        wait: seconds that hosts of a replica wait for each other.
    """

    def __init__(
        self,
        ray: Any,
        where: Slice,
        held: list[Reserved],
        wait: float,
        show: Display,
        *,
        debug: bool,
    ) -> None:
        self._ray, self._debug, self._show = ray, debug, show
        self._where, self._held, self._wait = where, held, wait
        self._actors: dict[int, list[Any]] = {}
        self._idle: list[int] = []
        #: What is under way, and the number of the actor.
        self._calls: dict[Any, tuple[_Call, int]] = {}
        #: Tasks that find another slice for a replica.
        self._searches: dict[Any, int] = {}
        self._starting: dict[int, _Start] = {}
        self._failed_starts = 0
        for number in range(len(held)):
            self._start(number)

    def _start(self, number: int) -> None:
        made = self._ray.remote(Replica)
        actors = self._actors[number] = [
            made.options(max_restarts=0, max_task_retries=0, **place).remote()
            for place in self._held[number].places
        ]
        there = [actor.address.remote() for actor in actors]
        self._starting[number] = _Start(there)
        at = there[0] if len(actors) > 1 else ()
        given = os.getcwd(), self._debug, at, self._wait
        call = _Call(number, None)
        for host, actor in enumerate(actors):
            self._calls[actor.start.remote(*given, host, len(actors))] = call, host

    def idle(self) -> list[int]:
        """The replicas that have started and have no requests."""
        return list(self._idle)

    def begin(self, replica: int, pack: Pack) -> None:
        """Send requests to all actors of a replica."""
        self._idle.remove(replica)
        requests = [(one.settings, one.digest) for one in pack]
        given = requests, run_dir(pack), kept_in(pack)
        call = _Call(replica, pack)
        for host, actor in enumerate(self._actors[replica]):
            self._calls[actor.make.remote(*given)] = call, host

    def wait(self) -> list[Ended]:
        """What ended within half a second.

        Raises:
            TpuportError: replicas do not start.
        """
        under_way = [*self._calls, *self._searches]
        done, _ = self._ray.wait(under_way, num_returns=1, timeout=_LOOK)
        found = []
        for one in done:
            if one in self._searches:
                self._found(one)
            else:
                found.append(self._ended(one))
        self._look_at_starts()
        return [ended for ended in found if ended is not None]

    def _look_at_starts(self) -> None:
        """Tell of starts that take long; one whose slice is lost begins in another."""
        late: dict[str, list[str]] = {}
        for number, start in list(self._starting.items()):
            if time.monotonic() < start.looked + LONG:
                continue
            start.looked = time.monotonic()
            count = len(start.there)
            answered, _ = self._ray.wait(start.there, num_returns=count, timeout=0)
            begun = len(answered) == count
            if not begun and self._held[number].lost:
                self._start_again(number)
            elif not start.told:
                start.told = True
                late.setdefault(why_not(begun), []).append(str(number + 1))
        for why, which in late.items():
            many = "s" * (len(which) > 1)
            self._show.say(f"replica{many} {', '.join(which)}: not started yet: {why}")

    def _ended(self, one: Any) -> Ended | None:
        call, host = self._calls.pop(one)
        try:
            call.said[host] = self._ray.get(one)
        except self._ray.exceptions.RayError as error:
            call.said[host] = error
        if len(call.said) < len(self._actors[call.replica]):
            return None  # hosts end by themselves where another one is lost
        gone = [said for said in call.said.values() if isinstance(said, Exception)]
        if call.pack is None:
            self._started(call.replica, gone)
            return None
        self._failed_starts = 0
        said = [call.said[host] for host in sorted(call.said)]
        return self._made(call.replica, call.pack, said, gone)

    def _started(self, number: int, gone: list[Exception]) -> None:
        del self._starting[number]
        if gone:
            self._check_starts(gone[0])
            self._start_again(number)
        else:
            self._failed_starts = 0
            self._idle.append(number)

    def _check_starts(self, error: Exception) -> None:
        """Count a start that failed, and end after some in a row."""
        self._failed_starts += 1
        if self._failed_starts >= _STARTS:
            why = f"replicas do not start: {why_of(error)}"
            raise TpuportError(why) from error

    def _made(
        self, number: int, pack: Pack, said: list[Any], gone: list[Exception]
    ) -> Ended:
        """What became of requests; a replica that is no use any more starts again."""
        told = [one for one in said if isinstance(one, Said)]
        remarks = tuple(text for one in told for text in one.remarks)
        failed = [one for one in told if one.error]
        own = [one for one in failed if not one.passes]
        several, lost = len(said) > 1, bool(gone or failed) and not own
        if gone or lost or (several and failed):
            self._start_again(number)
        else:
            self._idle.append(number)
        error = next((one.error for one in own or failed), "")
        if gone and not own:
            error = f"its replica is gone ({type(gone[0]).__name__})"
        return Ended(replica=number, pack=pack, error=error, lost=lost, remarks=remarks)

    def _start_again(self, number: int) -> None:
        for actor in self._actors[number]:
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.kill(actor)
        calls = self._calls.items()
        self._calls = {one: call for one, call in calls if call[0].replica != number}
        if not self._held[number].lost:
            self._start(number)
            return
        self._starting.pop(number, None)
        self._show.say(f"replica {number + 1}: its slice is gone; waiting for another")
        self._held[number].free()
        self._search(number)

    def _search(self, number: int) -> None:
        search = self._ray.remote(num_cpus=0, max_retries=0)(reserved_again)
        self._searches[search.remote(self._where)] = number

    def _found(self, one: Any) -> None:
        """Start a replica in a slice that was found, or go on with the search."""
        number = self._searches.pop(one)
        try:
            held = self._ray.get(one)
        except self._ray.exceptions.RayError as error:
            self._check_starts(error)
            held = None
        if held is None:
            self._search(number)
            return
        self._held[number] = held
        self._start(number)


@contextlib.contextmanager
def ray_replicas(
    address: str,
    count: int | None,
    where: Slice,
    display: Display,
    *,
    debug: bool,
) -> Iterator[tuple[RayReplicas, int]]:
    """Replicas on a cluster, and how many; as :func:`~.cluster.joined`."""
    wait = hosts_wait()
    with joined(address, count, where, display, debug=debug) as (ray, held):
        yield RayReplicas(ray, where, held, wait, display, debug=debug), len(held)
