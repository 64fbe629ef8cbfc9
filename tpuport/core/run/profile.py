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

from tpuport.core.files.atomic import one_line
from tpuport.errors import OutputError, UsageError


class SteadyTrace:
    """One recording of a few steady calls of a stage.

    Args:
        stage: its name.
        root: the recording is in a folder of the stage's name in this one.
        limit: how many calls are recorded at most; of 0 there is no recording.

    Attributes:
        recording: whether the recording is under way.
        calls: how many calls it has.
    """

    def __init__(self, stage: str, root: Path | None = None, limit: int = 0) -> None:
        self.recording = False
        self.calls = 0
        self._stage = stage
        self._root = root
        self._limit = 0 if root is None else limit

    @property
    def folder(self) -> Path:
        """Where the recording is."""
        return (self._root or Path()) / self._stage

    def turns(self, steady: bool) -> bool:
        """Whether the recording begins or ends before the next call.

        Args:
            steady: whether its program is ready and has run before.
        """
        if self.recording:
            return not steady or self.calls >= self._limit
        return steady and not self.calls and self._limit > 0

    def turn(self) -> None:
        """Begin or end the recording; what was dispatched before has ended.

        Raises:
            UsageError: another profile is being recorded in this process.
            OutputError: the folder cannot be made, or the files cannot be written.
        """
        if self.recording:
            self.stop()
            return
        options = jax.profiler.ProfileOptions()
        # Every Python call would be in it, hundreds of thousands of them.
        options.python_tracer_level = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(
                self.folder, create_perfetto_trace=True, profiler_options=options
            )
        except OSError as error:
            raise self._unwritten(error) from error
        except RuntimeError as error:
            raise UsageError(f"no profile can be recorded: {one_line(error)}") from None
        self.recording = True

    @contextmanager
    def call(self, program: str, number: int) -> Iterator[None]:
        """The dispatch of a call, which is named in a recording that is under way."""
        if not self.recording:
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
        if not self.recording:
            return
        self.recording = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: Exception) -> OutputError:
        reason = getattr(error, "strerror", None) or error
        return OutputError(
            f"{self.folder}: no profile can be written: {one_line(reason)}"
        )

    def result(self) -> dict[str, Any] | None:
        """``folder`` and ``calls``; ``None`` where nothing was recorded."""
        return {"folder": str(self.folder), "calls": self.calls} if self.calls else None

    def line(self, unit: str) -> str:
        """What was recorded, for people; empty where no recording was asked for."""
        if not self._limit:
            return ""
        if not self.calls:
            return (
                f"{self._stage}: not profiled: every {unit} was the first of its "
                "program, so that none was steady"
            )
        return (
            f"{self._stage}: profiled {self.calls} steady call{'s' * (self.calls > 1)} "
            f"in {self.folder}; open with `xprof --logdir {self._root}`, or its "
            "*.trace.json.gz at https://ui.perfetto.dev"
        )
