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

from tpuport.cli.shown import signals
from tpuport.cli.shown.output import say
from tpuport.core.files.atomic import began, machine
from tpuport.core.files.run_lock import LOCK_FILE
from tpuport.core.files.stores import StorePath
from tpuport.core.files.typed import checked
from tpuport.errors import AtWorkError, StoreError, TpuportError

#: Seconds between two signs of life, and until a driver without any counts as dead.
RENEW, EXPIRES = 10.0, 60.0
#: Seconds in which two that take the place of a dead driver meet.
_SETTLE = 2.0
#: A clock that goes on while the machine is suspended, where there is one.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _now() -> float:
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What the object says: JSON.

    Attributes:
        name, process: of the host and the driver, for people.
        host, began: tell whether the process lives, on the same host.
        token: of this hold alone.
        signs: of life so far.
    """

    name: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)
    host: str = field(default_factory=machine)
    began: str = field(default_factory=lambda: began(os.getpid()) or "")
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    signs: int = 0

    @property
    def who(self) -> str:
        return f"process {self.process} on {self.name}"

    @property
    def here(self) -> bool:
        """Whether it is a process of this host."""
        return self.host == machine()

    @property
    def dead(self) -> bool:
        """Whether it was a process of this host, and lives no more."""
        return self.here and began(self.process) not in ("", self.began)

    def data(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class Lease:
    """The hold of a folder. Use :func:`leased`.

    A process of this host that is dead holds nothing. One of another host holds the
    folder until the object has not changed for :data:`EXPIRES` seconds of this host's
    own clock.
    """

    def __init__(self, folder: StorePath) -> None:
        self._folder, self._file = folder, folder / LOCK_FILE
        self._own = _Held()
        self._lost = ""
        self._seen = _now()
        self._over, self._lock = threading.Event(), threading.Lock()

    def check(self) -> None:
        """End where another driver has taken the folder over.

        Raises:
            AtWorkError: this process gave no sign of life for too long.
            StoreError: the same, and the store does not answer now.
        """
        if _now() > self._seen + EXPIRES / 2:
            self._renew()
        if self._lost:
            raise AtWorkError(
                f"{self._folder}: {self._lost} has taken over this folder, because "
                f"this process gave no sign of life for {EXPIRES:.0f} s; let the other "
                "one go on"
            )

    def take(self) -> None:
        """Take the hold; waits for signs of life of another driver, if there is one.

        Raises:
            AtWorkError: another driver has it.
            StoreError: the store does not answer.
        """
        other = self._read()  # some stores replace an object whatever they are told
        if other is None:
            try:
                self._file.write_bytes(self._own.data(), replace=False)
                return
            except (FileExistsError, StoreError) as error:
                # Of two at a time a store refuses one, or the answer was lost.
                other = self._read()
                if other is None and isinstance(error, StoreError):
                    raise
        if other is None:  # what is there says nothing
            self._file.write_bytes(self._own.data())
            return
        if other.token == self._own.token:
            return
        if not other.dead and self._lives(other):
            raise self._at_work(other)
        what = "is dead" if other.dead else "gives no sign of life"
        say(f"{self._folder}: {other.who} {what}; taking its place")
        self._file.write_bytes(self._own.data())
        time.sleep(_SETTLE)
        now = self._read()
        if now is not None and now.token != self._own.token:
            raise self._at_work(now)

    def _lives(self, other: _Held) -> bool:
        """Whether a driver gives a sign of life."""
        if other.here:
            return True
        say(
            f"{self._folder}: waiting for a sign of life of {other.who}, "
            f"{EXPIRES:.0f} s at most"
        )
        until = _now() + EXPIRES
        while _now() < until:
            time.sleep(RENEW / 2)
            signals.check()
            now = self._read()
            if now != other:
                return now is not None
        return False

    def _at_work(self, other: _Held) -> AtWorkError:
        return AtWorkError(
            f"{self._folder}: {other.who} is at work in this folder; wait until it has "
            "ended, or name another folder"
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
            began, now = _now(), self._read()
            if now is None and began > self._seen + EXPIRES:
                self._lost = "another driver"  # and has ended
            elif now is not None and now.token != self._own.token:
                self._lost = now.who
            if not self._lost:
                self._own = replace(self._own, signs=self._own.signs + 1)
                self._file.write_bytes(self._own.data())
                self._seen = began

    def _go_on(self) -> None:
        while not self._lost and not self._over.wait(RENEW):
            with contextlib.suppress(TpuportError):  # check() tells of what stays
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
        with contextlib.suppress(TpuportError):  # the next driver waits
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
