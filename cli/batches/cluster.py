"""A cluster of Ray, and the slices of it that actors are placed on.

Ray is imported where it is used: it is the extra ``ray``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tpuport.cli.shown import signals
from tpuport.core.files.atomic import one_line
from tpuport.core.mesh.slices import Topology, parse_topology
from tpuport.core.run.progress import Display
from tpuport.core.spec.run_settings import read_value
from tpuport.errors import TpuportError, UsageError

#: In place of an address: a cluster of this machine, for this command.
LOCAL = "local"
#: Seconds until a line says what is waited for, and in which a host answers.
LONG = 60.0
#: Seconds in which a cluster answers at all.
_ANSWERS = 5.0
#: Seconds in which another process imports Ray, from a cold disk too, and hears from a
#: cluster.
_KNOWN = 90.0
#: Chips of the largest machine by the number of axes of the interconnect, and of each
#: host of a larger slice.
_CHIPS, _CHIPS_OF_SEVERAL = {2: 8, 3: 4}, 4
#: Bytes for objects in a cluster of this machine: requests are small.
_STORE = 80 << 20
#: What Ray calls a chip, where that is another name.
_NAMES = {"v5e": "v5litepod"}
#: Hosts without chips, to try what several do.
_CPUS = re.compile(r"cpu-hosts-([1-9]\d?)")

Place = dict[str, Any]
"""What Ray places an actor by."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What a replica runs on.

    Attributes:
        topology: ``None`` for CPUs.
        hosts: each has a process.
    """

    topology: Topology | None = None
    hosts: int = 1

    @property
    def resource(self) -> str:
        """What the first host of such a slice has, as Ray calls it."""
        return "CPU" if self.topology is None else _head(self.topology)


def slice_of(ray: str | None, replicas: int | None, topology: str | None) -> Slice:
    """The slice of a replica that flags name.

    Raises:
        UsageError: the flags need ``--ray``, or there is no such slice.
    """
    for name, value in (("replicas", replicas), ("topology", topology)):
        if ray is None and value is not None:
            raise UsageError(
                f"--{name} {value}: replicas are of a Ray cluster; name it by --ray "
                f"ADDRESS, or give --ray {LOCAL}"
            )
    if topology is None:
        return Slice()
    if cpus := _CPUS.fullmatch(topology):
        return Slice(hosts=int(cpus[1]))
    found = read_value(parse_topology, topology, "--topology")
    return Slice(topology=found, hosts=hosts_of(found))


def hosts_of(topology: Topology) -> int:
    """How many hosts a slice has."""
    if topology.chips <= _CHIPS[len(topology.dims)]:
        return 1
    return topology.chips // _CHIPS_OF_SEVERAL


def why_of(error: Exception) -> str:
    """Why something of tpuport did not run on a host, in words."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(cause := getattr(error, "cause", None), TpuportError):
        return one_line(cause)
    return f"{one_line(lines[-1])}; is tpuport installed on every host of the cluster?"


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """What a cluster keeps for a replica.

    Attributes:
        places: one for each host; all are there together or not at all.
        group: Ray's placement group of the places; ``None`` for one CPU.
        hold: Ray's hold of a slice; ``None`` for CPUs.
        several: the slice has several hosts.
    """

    places: list[Place]
    group: Any = None
    hold: Any = None
    several: bool = False

    @property
    def lost(self) -> bool:
        """Whether hosts of the slice are not there.

        Ray waits for hosts of this very slice, which a new slice in its place has not.
        """
        from ray.util import placement_group_table

        if not self.several:
            return False
        return bool(placement_group_table(self.group).get("state") != "CREATED")

    def free(self) -> None:
        """Let others have the slice."""
        if self.hold is not None:
            self.hold.shutdown()


def why_not(begun: bool) -> str:
    """Why a replica has not started yet, in words.

    Args:
        begun: its processes are there.
    """
    if begun:
        return "the processes still import torch and jax"
    return "the cluster has no room so far"


@contextlib.contextmanager
def joined(
    address: str,
    count: int | None,
    where: Slice,
    display: Display,
    *,
    debug: bool,
) -> Iterator[tuple[Any, list[Reserved]]]:
    """Ray, once a cluster is started or joined, and what each replica has of it.

    Args:
        address: such as ``"10.0.0.2:6379"``, or :data:`LOCAL`.
        count: of replicas; ``None`` for all slices of the cluster, or one of CPUs.
        where: the slice of each.

    Raises:
        UsageError: there is no Ray, no such cluster, or no such slice in the cluster.
    """
    cpus = (count or 1) * where.hosts
    with _connected(address, cpus, display, debug=debug) as ray:
        there = ray.cluster_resources()
        if where == Slice() and there.get("TPU"):
            raise UsageError("--topology is missing: name the slice of a replica")
        if (topology := where.topology) is not None:
            slices = int(there.get(_head(topology), 0))
            if not slices:
                raise UsageError(
                    f"--topology {topology.name}: the cluster has none, as no host has "
                    f"the resource {_head(topology)}"
                )
            count = count or slices
        yield ray, [reserved(where) for _ in range(count or 1)]


@contextlib.contextmanager
def _connected(
    address: str, cpus: int, display: Display, *, debug: bool
) -> Iterator[Any]:
    """Ray, on a cluster of this machine with ``cpus``, or on another one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UsageError("--ray needs Ray: pip install 'tpuport[ray]'") from error
    given: dict[str, Any] = {"address": address}
    named = "//" not in address and address.rpartition(":")[2].isdecimal()
    if named:
        _check_listens(address)
    if address == LOCAL:
        given |= {"num_cpus": cpus, "object_store_memory": _STORE}
        given |= {"include_dashboard": False}

    def told(data: dict[str, Any], ignore_prefix: bool) -> None:
        if debug:
            print(*data["lines"], sep="\n", file=sys.stderr)

    # Ray tells of actors that are gone on stdout, whatever it is told.
    with mock.patch("ray._private.worker.print_to_stdstream", told):
        try:
            with display.timed(f"joining Ray at {address}"):
                if named:
                    _check_answers(address)
                ray.init(
                    logging_level=logging.DEBUG if debug else logging.CRITICAL,
                    log_to_driver=debug,
                    **given,
                )
            signals.check()  # Ray has taken SIGTERM
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_cluster(address, error) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _check_listens(address: str) -> None:
    """Refuse an address where nobody listens, which Ray tries for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWERS).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def _check_answers(address: str) -> None:
    """Refuse an address where something else than Ray listens.

    Another process asks: Ray tries for two minutes, and its C++ code writes a line to
    the terminal every few seconds.
    """
    command = (sys.executable, "-m", "ray.scripts.scripts", "health-check")
    more = ("--skip-version-check", "--address", address)
    try:
        asked = subprocess.run(
            (*command, *more), capture_output=True, timeout=_KNOWN, check=False
        )
    except subprocess.TimeoutExpired as error:
        why = f"what listens there does not answer as Ray within {_KNOWN:.0f} s"
        raise _no_cluster(address, TimeoutError(why)) from error
    if asked.returncode:
        said = asked.stderr.decode(errors="replace").strip().splitlines()
        why = said[-1] if said else "it is not healthy"
        raise _no_cluster(address, ConnectionError(why))


def _no_cluster(address: str, error: Exception) -> UsageError:
    return UsageError(
        f"--ray {address}: there is no cluster ({one_line(error)}); start one with "
        f"`ray start --head`, or give --ray {LOCAL}"
    )


def _head(topology: Topology) -> str:
    """The resource that Ray gives the first host of a slice."""
    chip = _NAMES.get(topology.chip, topology.chip)
    return f"TPU-{chip}-{topology.name.partition('-')[2]}-head"


def reserved(where: Slice) -> Reserved:
    """Places for a new replica; waits a minute for a slice of several hosts.

    Raises:
        UsageError: no slice is free, or Ray knows no such slice.
    """
    topology, hosts = where.topology, where.hosts
    if topology is None:
        return Reserved(places=_places_on_cpus(hosts))
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    from ray.util.tpu import SlicePlacementGroup

    held = {"CPU": 1.0, "TPU": float(topology.chips // hosts)}
    order: Any = None
    if hosts == 1:
        held[_head(topology)] = 1.0
    else:  # process N is on worker N of the slice, as libtpu counts
        order = [{"ray.io/tpu-worker-id": str(number)} for number in range(hosts)]
    try:
        group = SlicePlacementGroup(
            topology="x".join(map(str, topology.dims)),
            accelerator_version=_NAMES.get(topology.chip, topology.chip),
            resources_per_bundle=held,
            chips_per_vm=topology.chips // hosts,
            bundle_label_selector=order,
            head_reservation_timeout_s=LONG,
        )
    except TimeoutError as error:
        raise UsageError(
            f"--topology {topology.name}: no slice is free; wait, or give fewer "
            "--replicas"
        ) from error
    except (RayError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"--topology {topology.name}: Ray reserves no such slice "
            f"({one_line(str(error).strip())}); look at the labels that `ray list "
            "nodes --detail` shows"
        ) from error
    held_by: Any = group.placement_group
    cpus = held.pop("CPU")
    places: list[Place] = [
        {
            "num_cpus": cpus,
            "resources": held,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=held_by, placement_group_bundle_index=number
            ),
        }
        for number in range(hosts)
    ]
    return Reserved(places=places, group=held_by, hold=group, several=hosts > 1)


def reserved_again(where: Slice) -> Reserved | None:
    """Places in another slice, by a task of Ray; ``None`` where no slice is free."""
    try:
        return reserved(where)
    except UsageError as error:
        if isinstance(error.__cause__, TimeoutError):
            return None
        raise


def _places_on_cpus(hosts: int) -> list[Place]:
    """Places that are there together or not at all."""
    if hosts == 1:
        return [{"num_cpus": 1}]
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1.0}] * hosts)
    strategy = PlacementGroupSchedulingStrategy(placement_group=group)
    return [{"num_cpus": 1, "scheduling_strategy": strategy}] * hosts
