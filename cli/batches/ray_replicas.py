"""Replicas that are actors of Ray, each with a slice of its own.

Ray is imported where it is used: it is the extra ``ray``. In place of an actor that is
gone another one starts.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.cli.asked.environment import import_libraries, prepare
from tpuport.cli.batches.local import Ended
from tpuport.cli.batches.packs import Pack, run_dir
from tpuport.cli.shown import signals
from tpuport.cli.shown.errors import may_pass
from tpuport.cli.shown.output import told
from tpuport.core.files.atomic import one_line
from tpuport.core.mesh.slices import Topology, parse_topology
from tpuport.core.reports import Reporter
from tpuport.core.run.progress import Display
from tpuport.errors import TpuportError, UsageError, in_one_line

if TYPE_CHECKING:
    from tpuport.cli.asked.settings import Settings

#: In place of an address: a cluster of this machine, for this command.
LOCAL = "local"

#: Starts of replicas that may fail one after the other.
_STARTS = 3
#: Seconds between two looks at signals, and until a line says what is waited for; a
#: host answers in less.
_LOOK, LONG = 0.5, 60.0
#: Chips of the largest host, by the number of axes of the interconnect.
_CHIPS = {2: 8, 3: 4}
#: Bytes for objects in a cluster of this machine: requests are small.
_STORE = 80 << 20
#: What Ray calls a chip, where that is another name.
_NAMES = {"v5e": "v5litepod"}


class _Remarks(Reporter):
    """Keeps each remark once, until they are taken."""

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


class Replica:
    """What runs in an actor's process: one pack of requests after the other."""

    def start(self, folder: str, debug: bool) -> None:
        """Import the libraries; ``folder`` is the driver's, if this host has it."""
        with contextlib.suppress(OSError):
            os.chdir(folder)
        prepare(debug=debug)
        import_libraries(Reporter())
        from tpuport.cli.runs.many import Engine

        self._remarks = _Remarks()
        self._engine = Engine(self._remarks)

    def make(
        self, requests: Sequence[tuple[Settings, str]], run_dir: Path
    ) -> tuple[str, bool, tuple[str, ...]]:
        """Make the videos of requests in one call.

        Returns:
            the error, empty for none; whether a new replica may succeed; remarks.
        """
        error, again = "", False
        try:
            with told(self._remarks.say):
                self._engine.make_pack(requests, run_dir)
        except Exception as raised:
            error = in_one_line(raised) or type(raised).__name__
            again = may_pass(raised)
        return error, again, self._remarks.take()


class RayReplicas:
    """:class:`~tpuport.cli.batches.local.Replicas` on a cluster that is joined.

    Args:
        places: what each replica is placed by.
    """

    def __init__(
        self, ray: Any, places: list[dict[str, Any]], debug: bool, show: Display
    ) -> None:
        self._ray, self._debug, self._show = ray, debug, show
        self._places = places
        self._actors: dict[int, Any] = {}
        self._idle: list[int] = []
        #: What is under way: the replica, and the requests that it has.
        self._calls: dict[Any, tuple[int, Pack | None]] = {}
        self._failed_starts = 0
        self._since, self._told = time.monotonic(), False
        for number in range(len(places)):
            self._start(number)

    def _start(self, number: int) -> None:
        made = self._ray.remote(Replica).options(
            max_restarts=0, max_task_retries=0, **self._places[number]
        )
        self._actors[number] = actor = made.remote()
        self._calls[actor.start.remote(os.getcwd(), self._debug)] = (number, None)

    def idle(self) -> list[int]:
        """The replicas that have started and have no requests."""
        return list(self._idle)

    def begin(self, replica: int, pack: Pack) -> None:
        """Send requests to an actor."""
        self._idle.remove(replica)
        given = [(one.settings, one.digest) for one in pack]
        call = self._actors[replica].make.remote(given, run_dir(pack))
        self._calls[call] = (replica, pack)

    def wait(self) -> list[Ended]:
        """What ended within half a second.

        Raises:
            TpuportError: replicas do not start.
        """
        done, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=_LOOK)
        found = [self._ended(call) for call in done]
        if not self._told and time.monotonic() > self._since + LONG:
            self._told = True
            self._show.say("no replica has started yet: the cluster has no room so far")
        return [ended for ended in found if ended is not None]

    def _ended(self, call: Any) -> Ended | None:
        number, pack = self._calls.pop(call)
        try:
            result = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            return self._gone(number, pack, error)
        self._failed_starts, self._told = 0, True
        if pack is None:
            self._idle.append(number)
            return None
        failed, again, remarks = result
        if again:
            self._ray.kill(self._actors[number])
            self._start(number)
        else:
            self._idle.append(number)
        return Ended(
            replica=number, pack=pack, error=failed, lost=again, remarks=remarks
        )

    def _gone(self, number: int, pack: Pack | None, error: Exception) -> Ended | None:
        """An actor is gone, or could not start: another one takes its place."""
        if pack is None:
            self._failed_starts += 1
            if self._failed_starts >= _STARTS:
                raise TpuportError(f"replicas do not start: {why_of(error)}") from error
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actors[number])  # one that failed in its start
        self._start(number)
        if pack is None:
            return None
        why = f"its replica is gone ({type(error).__name__})"
        return Ended(replica=number, pack=pack, error=why, lost=True)


def _options(topology: Topology | None) -> dict[str, Any]:
    """What one actor is placed by."""
    if topology is None:
        return {"num_cpus": 1}
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    from ray.util.tpu import SlicePlacementGroup

    held = {"CPU": 1.0, "TPU": float(topology.chips), _head(topology): 1.0}
    group = SlicePlacementGroup(
        topology="x".join(map(str, topology.dims)),
        accelerator_version=_NAMES.get(topology.chip, topology.chip),
        resources_per_bundle=held,
        chips_per_vm=topology.chips,
    )
    held_by: Any = group.placement_group
    strategy = PlacementGroupSchedulingStrategy(placement_group=held_by)
    cpus = held.pop("CPU")
    return {"num_cpus": cpus, "resources": held, "scheduling_strategy": strategy}


def _head(topology: Topology) -> str:
    """The resource that Ray gives the first host of a slice."""
    chip = _NAMES.get(topology.chip, topology.chip)
    return f"TPU-{chip}-{topology.name.partition('-')[2]}-head"


def why_of(error: Exception) -> str:
    """Why something of tpuport did not run on a host, in words."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{one_line(lines[-1])}; is tpuport installed on every host of the cluster?"


def slice_of(
    ray: str | None, replicas: int | None, topology: str | None
) -> Topology | None:
    """The slice of a replica that flags name.

    Raises:
        UsageError: the flags need ``--ray``, or there is no such slice of one host.
    """
    for name, value in (("replicas", replicas), ("topology", topology)):
        if ray is None and value is not None:
            raise UsageError(
                f"--{name} {value}: replicas are of a Ray cluster; name it by --ray "
                f"ADDRESS, or give --ray {LOCAL}"
            )
    found = None if topology is None else parse_topology(topology)
    check_slice(found)
    return found


def check_slice(topology: Topology | None) -> None:
    """Refuse a slice of several hosts."""
    most = _CHIPS[len(topology.dims)] if topology else 0
    if topology and topology.chips > most:
        hosts = math.ceil(topology.chips / most)
        raise UsageError(
            f"--topology {topology.name}: has at least {hosts} hosts, and a replica is "
            "one host; name a slice of one host, such as v6e-8"
        )


@contextlib.contextmanager
def ray_replicas(
    address: str,
    count: int | None,
    topology: Topology | None,
    display: Display,
    *,
    debug: bool,
) -> Iterator[tuple[RayReplicas, int]]:
    """Replicas on a cluster, and how many; as :func:`joined`."""
    with joined(address, count, topology, display, debug=debug) as (ray, places):
        yield RayReplicas(ray, places, debug, display), len(places)


@contextlib.contextmanager
def joined(
    address: str,
    count: int | None,
    topology: Topology | None,
    display: Display,
    *,
    debug: bool,
) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Ray, once a cluster is started or joined, and what each actor is placed by.

    Args:
        address: such as ``"10.0.0.2:6379"``, or :data:`LOCAL`.
        count: of actors; ``None`` for all slices of the cluster, or one CPU.
        topology: the slice of each; ``None`` for a CPU.

    Raises:
        UsageError: there is no Ray, no such cluster, or no such slice in the cluster.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray needs Ray: pip install 'tpuport[ray]'") from error
    given: dict[str, Any] = {"address": address}
    if address == LOCAL:
        given |= {"num_cpus": count or 1, "object_store_memory": _STORE}
        given |= {"include_dashboard": False}
    try:
        with display.timed(f"joining Ray at {address}"):
            ray.init(
                logging_level=logging.DEBUG if debug else logging.CRITICAL,
                log_to_driver=debug,
                **given,
            )
        signals.check()  # Ray has taken SIGTERM
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"--ray {address}: there is no cluster ({one_line(error)}); start one with "
            "`ray start --head`, or give --ray local"
        ) from error
    try:
        there = ray.cluster_resources()  # type: ignore[no-untyped-call]
        if topology is None and there.get("TPU"):
            raise UsageError("--topology is missing: name the slice of a replica")
        if topology is not None:
            slices = int(there.get(_head(topology), 0))
            if not slices:
                raise UsageError(
                    f"--topology {topology.name}: the cluster has none, as no host has "
                    f"the resource {_head(topology)}"
                )
            count = count or slices
        yield ray, [_options(topology) for _ in range(count or 1)]
    finally:
        ray.shutdown()
