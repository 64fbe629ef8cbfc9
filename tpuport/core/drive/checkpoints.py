"""Writes a tape to disk now and then, beside the steps that follow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from tpuport.core.drive.tape import Recorded, Tape, TapeError
from tpuport.core.drive.tape_folder import TapeFolder
from tpuport.core.files.run_record import CheckpointEvery
from tpuport.core.reports import Reporter

#: Writes a tape beside the run.
THREAD = "tpuport-checkpoint"


class Checkpoints:
    """Keeps the tape of one video in a folder while the block lasts.

    A full disk does not end the run: the checkpoint before stays, and a line says so.
    When the block ends, also by an error, what was recorded last is written.

    Args:
        tape: of the run under way.
        folder: where the tape is kept.
        every: how often.
        reporter: told of what cannot be written.
        put: takes each checkpoint elsewhere, beside the steps too. The last one is
            taken there if the block ends by an error.
    """

    def __init__(
        self,
        tape: Tape,
        folder: TapeFolder,
        every: CheckpointEvery,
        reporter: Reporter,
        put: Callable[[], None] = lambda: None,
    ) -> None:
        self._tape, self._folder = tape, folder
        self._every, self._reporter, self._put = every, reporter, put
        self._written = tape.before
        self._at = time.monotonic()
        self._thread: threading.Thread | None = None
        self._failed: Exception | None = None
        self._told = False
        self._lock = threading.Lock()
        tape.on_recorded = self._recorded

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._wait()
        if self._tape.recorded is not self._written:
            self._write(self._tape.recorded, put=error is not None)
        if error is not self._failed:
            self._tell(error)

    def finish(self) -> None:
        """Write what a stage ended with.

        Raises:
            WriteError: the tape cannot be written.
        """
        self._wait()
        self._failed = None
        self._write(self._tape.recorded)
        if self._failed is not None:
            raise self._failed
        if self._tape.unkept:
            raise TapeError(f"the stage cannot be kept: {self._tape.unkept}")

    def _recorded(self) -> None:
        if self._tape.unkept:
            self._tell(None)
            return
        busy = self._thread is not None and self._thread.is_alive()
        recorded = self._tape.recorded
        steps = recorded.stepped - self._written.stepped
        if busy or not steps or not self._every.due(steps, time.monotonic() - self._at):
            return
        self._tell(None)
        self._at = time.monotonic()
        # What is recorded is never written to: the next step is recorded beside it.
        thread = threading.Thread(target=self._write, args=(recorded,), name=THREAD)
        thread.start()
        self._thread = thread

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(self, recorded: Recorded, *, put: bool = True) -> None:
        with self._lock:  # an interrupt may come before the thread is known
            try:
                self._folder.write(recorded)
                self._written, self._failed = recorded, None
                if put:
                    self._put()
            except Exception as error:
                self._failed = error

    def _tell(self, error: BaseException | None) -> None:
        """Say once that a checkpoint could not be written, or that none can be."""
        why = self._failed or self._tape.unkept
        if not why or self._told:
            return
        self._told = True
        text = f"no checkpoint: {why}"
        if error is not None:
            error.add_note(text)
        else:
            self._reporter.say(f"{text}; the run goes on without")
