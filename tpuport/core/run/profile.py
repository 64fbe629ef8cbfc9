"""A profiler trace of calls in steady state: nothing is compiled or run first in it.

The files are those of ``jax.profiler``: XProf reads the folder, Perfetto the
``*.trace.json.gz`` in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from tpuport.core.files.atomic import cannot_write, missing, one_line, remove_empty
from tpuport.errors import UsageError


class SteadyTrace:
    """One recording of a few steady calls of a stage.

    Args:
        stage: its name.
        root: the recording is in a folder of the stage's name in this one.
        limit: how many calls are recorded at most.

    Attributes:
        calls: how many calls the recording has.
    """

    def __init__(self, stage: str, root: Path | None, limit: int) -> None:
        self.calls = 0
        self._recording = False
        self._stage = stage
        self._root = root
        self._folder = (root or Path()) / stage
        self._limit = 0 if root is None else limit
        # What was there before the recording: a recording that fails leaves no more.
        self._before: set[Path] = set()
        self._missing: list[Path] = []

    def turn(self, steady: bool) -> None:
        """Begin or end the recording where the next call asks for it.

        Args:
            steady: whether its program has run before.

        Raises:
            UsageError: another profile is being recorded in this process.
            OutputError: the folder cannot be made, or the files cannot be written.
        """
        record = steady and self.calls < self._limit
        if self._recording and not record:
            self.stop()
        elif record and not self.calls:
            self._start()

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        # Every Python call would be in it, hundreds of thousands of them.
        options.python_tracer_level = 0
        self._before = set(self._folder.rglob("*"))
        self._missing = missing(self._folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(
                self._folder, create_perfetto_trace=True, profiler_options=options
            )
        except (OSError, RuntimeError) as error:
            self._remove()
            if isinstance(error, OSError):
                raise cannot_write(self._folder, error) from error
            raise UsageError(f"no profile can be recorded: {one_line(error)}") from None
        self._recording = True

    @contextmanager
    def call(self, program: str, number: int) -> Iterator[None]:
        """The dispatch of a call, which is named in a recording that is under way."""
        if not self._recording:
            yield
            return
        name = f"{self._stage}_{program}"
        with jax.profiler.StepTraceAnnotation(name, step_num=number):
            yield
        self.calls += 1

    def stop(self) -> None:
        """End the recording, if there is one; what it has was dispatched and ended.

        Raises:
            OutputError: it cannot be written.
        """
        if not self._recording:
            return
        self._recording = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            self._remove()
            raise cannot_write(self._folder, error) from error

    def _remove(self) -> None:
        """Remove what the recording has written so far, such as files cut short."""
        for path in sorted(set(self._folder.rglob("*")) - self._before, reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        remove_empty(self._missing)

    def result(self) -> dict[str, Any] | None:
        """``folder`` and ``calls``; ``None`` where nothing was recorded."""
        return (
            {"folder": str(self._folder), "calls": self.calls} if self.calls else None
        )

    def line(self) -> str:
        """What was recorded, for people; empty where no recording was asked for."""
        if not self._limit:
            return ""
        if not self.calls:
            return (
                f"{self._stage}: not profiled: every call of a module was the first of "
                "its program, so that none was steady"
            )
        return (
            f"{self._stage}: profiled {self.calls} steady call{'s' * (self.calls > 1)} "
            f"in {self._folder}; open with `xprof --logdir {self._root}`, or its "
            "*.trace.json.gz at https://ui.perfetto.dev"
        )
