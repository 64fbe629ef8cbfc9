"""The processes of one run, a host each: who is there, what they agree on, who is lost.

Process 0 listens at the address of the coordinator, and every other process connects
before jax is asked for a device. What they say is JSON, with bytes after it. A process
that dies closes its connection; one whose host is gone falls silent. Either way every
other process knows within :data:`SILENCE` seconds, and ends with one line.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tpuport.errors import TpuportError, UsageError, in_one_line

#: Seconds between two signs of life, until a process without any counts as lost, and
#: that the main thread has to end by itself once another process is lost.
BEAT, SILENCE, PATIENCE = 5.0, 30.0, 12.0
#: Seconds that processes wait for each other at the start.
WAIT = 50.0
#: What mends a process that did not come.
_REMEDY = "start the same command on every host, with a --coordinator that all reach"
#: Seconds in which the end of a process is known after a program of many failed.
_TOLD = 5.0
#: Length of a message's JSON, and of the bytes after it.
_HEAD = struct.Struct("!QQ")
#: Bytes of a long message that are sent at a time.
_PIECE = 1 << 20


class HostError(TpuportError):
    """A process of the run is lost, never came, or differs from the others."""


@dataclass(frozen=True)
class Address:
    """Where a process is in a run.

    Attributes:
        coordinator: host and port of process 0.
        count: of the processes.
        number: of this one.
    """

    coordinator: tuple[str, int]
    count: int
    number: int


@dataclass(eq=False)
class _Line:
    """A connection to another process; several threads may send.

    Attributes:
        over: the process is done.
        left: seconds that the process still waits at the start.
    """

    number: int
    socket: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)
    given: queue.SimpleQueue[tuple[Any, bytes]] = field(
        default_factory=queue.SimpleQueue
    )
    over: bool = False
    left: float = math.inf

    def send(self, said: Mapping[str, Any], data: bytes = b"") -> None:
        text = json.dumps(said).encode()
        with self.lock:
            try:
                self.socket.sendall(_HEAD.pack(len(text), len(data)) + text)
                for start in range(0, len(data), _PIECE):  # each has its own time
                    self.socket.sendall(data[start : start + _PIECE])
            except OSError:  # half a message: who reads, on both sides, sees the end
                with contextlib.suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)

    def read(self) -> tuple[Any, bytes]:
        """The next message.

        Raises:
            OSError, EOFError: the process is lost.
        """
        first, second = _HEAD.unpack(self._bytes(_HEAD.size))
        return json.loads(self._bytes(first)), self._bytes(second)

    def _bytes(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            part = self.socket.recv(min(count - len(found), 1 << 20))
            if not part:
                raise EOFError
            found += part
        return bytes(found)


_here: Hosts | None = None


def here() -> Hosts:
    """The processes of this run; this one alone if nobody joined others."""
    global _here
    if _here is None:
        _here = Hosts()
    return _here


def meet(
    at: Address, about: Mapping[str, str], wait: float = WAIT, remedy: str = _REMEDY
) -> Hosts:
    """Find the other processes of this run; as of :class:`Hosts`."""
    global _here
    _here = Hosts(at, about, wait, remedy)
    return _here


def leave() -> None:
    """This process is alone again: a run with others is over."""
    global _here
    _here = None


class Hosts:
    """The processes of a run; of one process alone without an address.

    Args:
        at: where this process is.
        about: what all must have alike, in words by name.
        wait: seconds.
        remedy: what mends a process that did not come.

    Attributes:
        names: of the hosts, by process.
        lost: why the run is over on all processes; empty while it goes on.
        scratch: a folder that goes with this process.

    Raises:
        HostError: a process did not come, or differs.
    """

    def __init__(
        self,
        at: Address | None = None,
        about: Mapping[str, str] = MappingProxyType({}),
        wait: float = WAIT,
        remedy: str = _REMEDY,
    ) -> None:
        self.at = at or Address(("", 0), 1, 0)
        self.names = {self.at.number: socket.gethostname()}
        self.lost, self._remedy = "", remedy
        self.scratch: Path | None = None
        self._lines: dict[int, _Line] = {}
        self._known, self._over = threading.Event(), threading.Event()
        self._ending = threading.Lock()
        if at is not None and at.count > 1:
            until = time.monotonic() + wait
            try:
                if self.first:
                    self._listen(until)
                else:
                    self._connect(until, wait)
                for line in self._lines.values():
                    hear = threading.Thread(target=self._hear, args=(line,))
                    hear.daemon = True
                    hear.start()
                threading.Thread(target=self._beat, daemon=True).start()
                self.same(about)
            except BaseException:
                self.close()
                raise

    @property
    def first(self) -> bool:
        """Whether this process writes files and tells of the run."""
        return self.at.number == 0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return bool(self._lines)

    def who(self, number: int) -> str:
        """A process, for people."""
        name = self.names.get(number)
        return f"process {number}" + (f" ({name})" if name else "")

    # The start.

    def _listen(self, until: float) -> None:
        host, port = self.at.coordinator
        try:
            server = socket.create_server(("", port), backlog=self.at.count)
        except OSError as error:
            raise UsageError(
                f"--coordinator {host}:{port}: process 0 cannot listen there: "
                f"{error.strerror}; name a free port, and give --process-id 0 once"
            ) from error
        why, began = "", time.monotonic()
        with server:
            while len(self._lines) < self.at.count - 1:
                server.settimeout(max(until - time.monotonic(), 0.01))
                try:
                    line = _Line(-1, server.accept()[0])
                    wrong = self._take(line)
                    until = min(until, time.monotonic() + line.left)
                    if wrong and not why:  # the others are to hear of it too
                        why, until = wrong, min(until, time.monotonic() + _TOLD)
                except TimeoutError:
                    if why:
                        break
                    missing = (n for n in range(self.at.count) if n not in self.names)
                    which = ", ".join(f"process {n}" for n in missing)
                    self._refuse(
                        f"{which} of {self.at.count} did not come within "
                        f"{time.monotonic() - began:.0f} s "
                        f"(TPUPORT_HOSTS_WAIT); {self._remedy}"
                    )
        if why:
            self._refuse(why)
        for line in self._lines.values():
            line.send({"names": list(self.names.items())})

    def _take(self, line: _Line) -> str:
        """Take a process that connects, if it is one; returns what is wrong with it."""
        line.socket.settimeout(_TOLD)
        try:
            said, _ = line.read()
            line.number, name = int(said["number"]), str(said["name"])
            line.left = float(said["left"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, struct.error):
            line.socket.close()
            return ""
        if line.number in self.names:
            why = (
                f"two processes are number {line.number}: on "
                f"{self.names[line.number]} and on {name}; give each its own "
                "--process-id"
            )
            line.send({"ended": why})
            return why
        self._lines[line.number] = line
        self.names[line.number] = name
        if said["count"] != self.at.count:
            return (
                f"{self.who(line.number)}: --num-processes is {said['count']}, and "
                f"{self.at.count} on {self.who(0)}; say the same on every host"
            )
        return ""

    def _connect(self, until: float, wait: float) -> None:
        host, port = self.at.coordinator
        while True:
            try:
                left = max(until - time.monotonic(), 0.1)
                found = socket.create_connection((host, port), timeout=left)
                break
            except OSError as error:
                if time.monotonic() > until:
                    raise HostError(
                        f"process 0 at {host}:{port} did not come within {wait:.0f} s "
                        f"({error.strerror or error}); {self._remedy}"
                    ) from error
                time.sleep(0.1)
        line = self._lines[0] = _Line(0, found)
        # Process 0 may have begun later, and waits no longer than this one would.
        found.settimeout(wait + SILENCE)
        name = self.names[self.at.number]
        at = {"number": self.at.number, "count": self.at.count, "name": name}
        line.send({**at, "left": until - time.monotonic()})
        try:
            said, _ = line.read()
        except (OSError, EOFError) as error:
            raise HostError(f"{self.who(0)} ended") from error
        if "ended" in said:
            raise HostError(said["ended"])
        self.names = {int(n): str(name) for n, name in said["names"]}

    def _refuse(self, why: str) -> None:
        for line in self._lines.values():
            line.send({"ended": why})
        raise HostError(why)

    # What all agree on.

    def same(self, values: Mapping[str, str]) -> None:
        """Refuse on every process what differs between two; all wait for all.

        Raises:
            HostError: the first difference, and where.
        """
        if not self.first:
            self._lines[0].send({"values": dict(values)})
            self._next(self._lines[0])
            return
        for number, line in sorted(self._lines.items()):
            theirs = self._next(line)[0]["values"]
            for name in sorted(values.keys() | theirs.keys()):
                ours, other = (one.get(name, "not set") for one in (values, theirs))
                if ours != other:
                    self._refuse(
                        f"{self.who(number)}: {name} is {other}, and {ours} on "
                        f"{self.who(0)}; all processes of a run need the same"
                    )
        for line in self._lines.values():
            line.send({"values": {}})

    def told(self, make: Callable[[], bytes]) -> bytes:
        """What process 0 makes, on every process."""
        if not self.first:
            return self._next(self._lines[0])[1]
        data = make()
        for line in self._lines.values():
            line.send({"told": True}, data)
        return data

    def _next(self, line: _Line) -> tuple[Any, bytes]:
        """The next message that is for the main thread."""
        while True:
            with contextlib.suppress(queue.Empty):
                return line.given.get(timeout=0.2)
            self.check()

    # Who is lost.

    def check(self) -> None:
        """Raise HostError if another process is lost."""
        if self.lost:
            raise HostError(self.lost)

    def lost_by(self, error: BaseException) -> str:
        """Why another process ended the run, if one did; else empty.

        A program over several processes fails at once where one of them is lost, and
        its error may come first.
        """
        first = error
        while first.__cause__ is not None:
            first = first.__cause__
        if self.several and not isinstance(first, TpuportError | KeyboardInterrupt):
            self._known.wait(_TOLD)
        return self.lost

    def _hear(self, line: _Line) -> None:
        line.socket.settimeout(SILENCE)
        while not self._over.is_set():
            try:
                said, data = line.read()
            except TimeoutError:
                self._lose(f"{self.who(line.number)} was silent for {SILENCE:.0f} s")
                return
            except (OSError, EOFError, ValueError, struct.error):
                if not line.over:
                    self._lose(f"{self.who(line.number)} died")
                return
            if "ended" in said:
                self._lose(said["ended"])
                return
            line.over |= "over" in said
            if "beat" not in said:
                line.given.put((said, data))

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            for line in self._lines.values():
                line.send({"beat": True})

    def _lose(self, why: str) -> None:
        """The run is over: the main thread ends by itself, or is ended."""
        if self._known.is_set() or self._over.is_set():
            return
        self.lost = why
        self._known.set()
        self._tell(why)
        if not self._over.wait(PATIENCE):
            self._end()

    def _end(self) -> None:
        self._ending.acquire()  # one thread says why, and others wait for the end
        line = in_one_line(f"error: {self.lost}") + "\n"
        # Process 0 may be in the middle of a line.
        os.write(2, (f"\n{line}" if self.first else line).encode())
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
        os._exit(1)

    def aborted(self) -> None:
        """Say why a library aborts this process; returns only if nobody knows."""
        if self._known.wait(_TOLD):
            if not self._over.wait(PATIENCE):
                self._end()
            time.sleep(PATIENCE)  # the main thread says why, and ends the process
            os._exit(1)

    def _tell(self, why: str) -> None:
        for line in self._lines.values():
            line.send({"ended": why})

    # The end.

    def failed(self, line: str) -> None:
        """Tell the others that this process ends with an error."""
        if self.several and not self._over.is_set():
            if not self.lost:
                self._tell(f"{self.who(self.at.number)} ended: {line}")
            self._over.set()

    def over(self) -> None:
        """Wait until every process is done, process 0 last."""
        if not self.several:
            return
        if self.first:
            for line in self._lines.values():
                self._next(line)
        for line in self._lines.values():
            line.send({"over": True})
        if not self.first:
            self._next(self._lines[0])

    def close(self) -> None:
        """Let the others go."""
        self._over.set()
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.socket.close()
        self._lines = {}
