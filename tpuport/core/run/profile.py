"""A profiler trace of calls in steady state: nothing is compiled or run first in it.

The files are those of ``jax.profiler``: XProf reads the folder, Perfetto the
``*.trace.json.gz`` in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from tpuport.core.files.atomic import one_line
from tpuport.errors import OutputError, UsageError


class SteadyTrace:
    """Records a few calls of each stage, one recording a stage.

    Args:
        folder: where to; each stage gets a folder in it.
        calls: how many calls of a stage, at most.
        say: tells people where the trace is.
    """

    def __init__(self, folder: Path, calls: int, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.calls = calls
        self._say = say
        self._stage: str | None = None
        self._count = 0
        self._done: dict[str, dict[str, Any]] = {}

    @property
    def recording(self) -> bool:
        """Whether a recording is under way."""
        return self._stage is not None

    def turns(self, stage: str, steady: bool) -> bool:
        """Whether a recording begins or ends before the next call.

        Args:
            steady: whether its program is ready and has run before.
        """
        if self.recording:
            return not steady or self._count >= self.calls
        return steady and stage not in self._done

    def turn(self, stage: str) -> None:
        """Begin or end a recording; what was dispatched before has ended.

        Raises:
            UsageError: another profile is being recorded in this process.
            OutputError: the folder cannot be made.
        """
        if self.recording:
            self.stop()
        else:
            self._start(stage)

    @contextlib.contextmanager
    def call(self, stage: str, program: str, number: int) -> Iterator[None]:
        """The dispatch of a call, named in the trace."""

        name = f"{stage}_{program}"
        with jax.profiler.StepTraceAnnotation(name, step_num=number):
            yield
        self._count += 1

    def stop(self) -> None:
        """End the recording, if there is one; what it has was dispatched and ended.

        Raises:
            OutputError: it cannot be written.
        """

        if self._stage is None:
            return
        stage, self._stage = self._stage, None
        folder = self.folder / stage
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            raise OutputError(
                f"{folder}: no profile can be written: {one_line(error)}"
            ) from error
        self._done[stage] = {"folder": str(folder), "calls": self._count}

    def stage_ended(self, stage: str, unit: str) -> dict[str, Any] | None:
        """Say what was recorded of a stage; another run of it is recorded anew.

        Returns:
            ``folder`` and ``calls``, or ``None`` where no call was steady.
        """
        self.stop()
        made = self._done.pop(stage, None)
        if made is None:
            self._say(
                f"{stage}: not profiled: every {unit} was the first of its program, "
                "so that none was steady"
            )
            return None
        count = made["calls"]
        self._say(
            f"{stage}: profiled {count} steady call{'s' * (count > 1)} in "
            f"{made['folder']}; open with `xprof --logdir {self.folder}`, or its "
            "*.trace.json.gz at https://ui.perfetto.dev"
        )
        return made

    def _start(self, stage: str) -> None:

        folder = self.folder / stage
        options = jax.profiler.ProfileOptions()
        # Every Python call would be in it, hundreds of thousands of them.
        options.python_tracer_level = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"{folder}: no profile can be written: {error.strerror}"
            ) from error
        try:
            jax.profiler.start_trace(
                folder, create_perfetto_trace=True, profiler_options=options
            )
        except RuntimeError as error:
            raise UsageError(f"no profile can be recorded: {one_line(error)}") from None
        self._stage, self._count = stage, 0
