"""jax's own service for the processes of a run, beside process 0.

Where that service ends, jax aborts every process. So the service is a process by
itself, which outlives process 0 by :data:`LINGER` seconds: long enough for the others
to end with a line of tpuport's. A process that stood still meanwhile says the line as
it is aborted.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys
import time
from typing import Any
from unittest import mock

from tpuport.core.mesh.hosts import HostError, Hosts

LINGER = 15.0
#: Called when the process is aborted; C has no reference.
_on_abort: Any = None
#: Seconds that the service takes to start, at most, and without a sign of life until
#: jax gives a process up, which :class:`Hosts` does sooner.
_STARTS, _SILENCE = 60, 100


class _Service:
    """The service; with the method that jax calls at the end."""

    def __init__(self, address: str, count: int) -> None:
        command = (sys.executable, "-P", "-m", __name__, address, str(count))
        pipe = subprocess.PIPE
        # A session of its own: a signal to the terminal's group is for the processes.
        self._process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            # The service outlives process 0, and holds no pipe that somebody reads.
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise HostError(f"jax's service cannot listen at {address}")

    def shutdown(self) -> None:
        """End it, once nobody needs it."""
        self._process.communicate("over\n")


def join(hosts: Hosts) -> None:
    """Let jax see the devices of all processes; called before it is asked for one."""
    import jax
    from jax._src.lib import _jax

    host, _ = hosts.at.coordinator
    port = int(hosts.told(lambda: str(free_port()).encode()))
    address, service = f"{host}:{port}", None
    if hosts.first:
        service = _Service(f"[::]:{port}", hosts.at.count)
    hosts.told(bytes)  # the service is there
    jax.config.update("jax_cpu_collectives_implementation", "gloo")

    def started(*about: Any, **how: Any) -> Any:
        return service

    _mind_aborts(hosts)
    with mock.patch.object(_jax, "get_distributed_runtime_service", started):
        jax.distributed.initialize(
            address,
            hosts.at.count,
            hosts.at.number,
            cluster_detection_method="deactivate",
            initialization_timeout=_STARTS,
            heartbeat_timeout_seconds=_SILENCE,
        )


def _mind_aborts(hosts: Hosts) -> None:
    """Have a line said before the process is aborted.

    jax does so from a thread of its own. Python's handlers of signals would run too
    late, and jaxlib's ``missed_heartbeat_callback`` ends by bad_cast before Python is
    called.
    """
    global _on_abort
    _on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: hosts.aborted())
    ctypes.CDLL(None).signal(signal.SIGABRT, _on_abort)


def free_port() -> int:
    """A port where nobody listens."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _serve(address: str, count: int) -> None:
    from jaxlib import _jax  # type: ignore[attr-defined]  # jax takes a second

    service = _jax.get_distributed_runtime_service(
        address, count, heartbeat_timeout=_SILENCE
    )
    print("ready", flush=True)
    if not sys.stdin.read():  # process 0 died
        time.sleep(LINGER)
    service.shutdown()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
