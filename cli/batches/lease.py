"""One driver at a time works in a folder of a store: an object says which."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

from tpuport.cli.shown.output import say
from tpuport.core.files.atomic import began, machine
from tpuport.core.files.run_lock import LOCK_FILE
from tpuport.core.files.stores import StorePath
from tpuport.core.files.typed import checked
from tpuport.errors import AtWorkError, StoreError

#: Seconds between two signs of life, and until a driver without any counts as dead.
RENEW, EXPIRES = 10.0, 60.0
#: Seconds in which two that take the place of a dead driver meet.
_SETTLE = 2.0


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What the object says: JSON.

    Attributes:
        name, process: of the host and the driver, for people.
        host, began: tell whether the process lives, on the same host.
        token: of this hold alone.
        seen: the last sign of life, in seconds since the epoch.
    """

    name: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)
    host: str = field(default_factory=machine)
    began: str = field(default_factory=lambda: began(os.getpid()) or "")
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    seen: float = field(default_factory=time.time)

    @property
    def who(self) -> str:
        return f"process {self.process} on {self.name}"

    @property
    def dead(self) -> bool:
        """Whether it was a process of this host, and lives no more."""
        return self.host == machine() and began(self.process) not in ("", self.began)

    def data(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class Lease:
    """The hold of a folder. Use :func:`leased`.

    A process of this host that is dead holds nothing. One of another host holds the
    folder for :data:`EXPIRES` seconds after its last sign of life.
    """

    def __init__(self, folder: StorePath) -> None:
        self._folder, self._file = folder, folder / LOCK_FILE
        self._own = _Held()
        self._lost: _Held | None = None
        self._seen = time.monotonic()
        self._over, self._lock = threading.Event(), threading.Lock()

    def check(self) -> None:
        """End where another driver has taken the folder over.

        Raises:
            AtWorkError: this process gave no sign of life for too long.
            StoreError: the same, and the store does not answer now.
        """
        if time.monotonic() > self._seen + EXPIRES / 2:
            self._renew()
        if self._lost is not None:
            raise AtWorkError(
                f"{self._folder}: {self._lost.who} has taken over this folder, because "
                f"this process gave no sign of life for {EXPIRES:.0f} s; let the other "
                "one go on"
            )

    def take(self) -> None:
        """Take the hold.

        Raises:
            AtWorkError: another driver has it.
            StoreError: the store does not answer.
        """
        other = self._read()  # some stores replace an object whatever they are told
        if other is None:
            with contextlib.suppress(FileExistsError):
                self._file.write_bytes(self._own.data(), replace=False)
                return
            other = self._read()
        if other is not None and not other.dead:
            silent = max(0.0, time.time() - other.seen)
            # Clocks differ: what is renewed meanwhile is alive.
            if silent < EXPIRES or self._renewed(other):
                raise self._at_work(other, silent)
        if other is not None:
            what = "is dead" if other.dead else "gives no sign of life"
            say(f"{self._folder}: {other.who} {what}; taking its place")
        self._file.write_bytes(self._own.data())
        time.sleep(_SETTLE)
        now = self._read()
        if now is not None and now.token != self._own.token:
            raise self._at_work(now, 0.0)

    def _renewed(self, other: _Held) -> bool:
        time.sleep(1.5 * RENEW)
        return self._read() not in (None, other)

    def _at_work(self, other: _Held, silent: float) -> AtWorkError:
        return AtWorkError(
            f"{self._folder}: {other.who} is at work in this folder (last sign of life "
            f"{silent:.0f} s ago); wait until it has ended, or name another folder. If "
            f"it is dead, the same command takes its place in {EXPIRES - silent:.0f} s"
        )

    def _read(self) -> _Held | None:
        try:
            data = self._file.read_bytes()
        except FileNotFoundError:
            return None
        with contextlib.suppress(ValueError):
            return checked(_Held, json.loads(data), self._file, "remove the object")
        return None

    def _renew(self) -> None:
        """Give a sign of life, unless the hold is lost."""
        with self._lock:
            now = self._read()
            if now is not None and now.token != self._own.token:
                self._lost = now
            else:
                self._file.write_bytes(replace(self._own, seen=time.time()).data())
                self._seen = time.monotonic()

    def _go_on(self) -> None:
        while self._lost is None and not self._over.wait(RENEW):
            with contextlib.suppress(StoreError):  # it may answer the next time
                self._renew()

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Give signs of life while the block lasts; then let others have the folder."""
        thread = threading.Thread(target=self._go_on, name="tpuport-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(StoreError):  # the next driver waits until it expires
            now = self._read()
            if now is not None and now.token == self._own.token:
                self._file.remove()


@contextlib.contextmanager
def leased(folder: StorePath) -> Iterator[Lease]:
    """Hold a folder of a store while the block lasts.

    Raises:
        AtWorkError: another driver has it.
        StoreError: the store does not answer.
    """
    lease = Lease(folder)
    lease.take()
    with lease.renewed():
        yield lease
