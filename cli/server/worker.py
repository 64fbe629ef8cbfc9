"""A process beside the server, and who asks the one that checks."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

from tpuport.cli.asked.settings import Settings
from tpuport.cli.server.child import CHECKS, run
from tpuport.cli.server.messages import Check, Checked, Gone, Refused

#: Seconds of a check, at most; the first one waits for imports.
CHECK = 300.0
#: Seconds in which a process ends by itself.
_END = 10.0


class Worker:
    """A process that does what it is asked; see :func:`~tpuport.cli.server.child.run`.

    Args:
        hear: told each message, by a thread; :class:`Gone` is the last.
    """

    def __init__(self, role: str, hear: Callable[[Any], None], *, debug: bool) -> None:
        _start_tracker()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=run, args=(theirs, role, debug), daemon=True
        )
        # Ctrl-C reaches the new process too, before the process can ignore it, so the
        # process inherits the mask. _start_tracker must run before: it unblocks SIGINT.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._hear = hear
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int | None:
        """The number of the process."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Ask; a process that is gone is told of by :class:`Gone`."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._hear(self._connection.recv())
        self._hear(Gone())

    def kill(self) -> None:
        """End a process that does not answer; :class:`Gone` follows."""
        self._process.kill()

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.terminate()
        self._process.join(_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _start_tracker() -> None:
    """Start Python's process that tracks semaphores; it is not to warn of tqdm's.

    A process beside the server ends at once with the server, and leaves one.
    """
    name = "PYTHONWARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "ignore"
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Checks:
    """Asks a process of its own whether videos can be made; threads may share it."""

    def __init__(self, *, debug: bool) -> None:
        self._debug = debug
        self._numbers = itertools.count(1)
        self._answers: dict[int, Checked] = {}
        self._changed = threading.Condition()
        self._gone = self._closed = False
        self._worker = self._started()

    def _started(self) -> Worker:
        self._gone = False
        return Worker(CHECKS, self._heard, debug=self._debug)

    def _heard(self, message: Any) -> None:
        with self._changed:
            if isinstance(message, Checked):
                self._answers[message.number] = message
            self._gone = self._gone or isinstance(message, Gone)
            self._changed.notify_all()

    def check(self, settings: Settings, patience: float | None = CHECK) -> Checked:
        """Whether a video can be made.

        Args:
            patience: seconds to wait; ``None`` for as long as the process lives, such
                as for the first check, before which it imports its libraries.

        Raises:
            Refused: the process was lost, or is too slow.
        """
        with self._changed:
            if self._closed:
                raise Refused(503, "the server ends")
            if self._gone:
                self._worker = self._started()
            number, worker = next(self._numbers), self._worker
            worker.send(Check(number, settings))
            there = self._changed.wait_for(
                lambda: number in self._answers or self._gone, timeout=patience
            )
            found = self._answers.pop(number, None)
        if not there:
            worker.kill()
        if found is None:
            raise Refused(503, "the request could not be checked; try again")
        return found

    def close(self) -> None:
        """End the process; who waits for a check is refused."""
        self._closed = True
        self._worker.close()
