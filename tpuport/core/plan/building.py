"""Compiling the programs of a run into a folder, for devices here or elsewhere."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuport.core.drive.rehearsal import Rehearsal, Rehearsed
from tpuport.core.mesh.device_memory import plan_of, refused_bytes
from tpuport.core.programs import jax_cache
from tpuport.core.programs.executable_files import (
    Entry,
    ExecutableStore,
    NotSerialisable,
    serialise,
)
from tpuport.core.programs.program_key import ProgramKey
from tpuport.core.reports import Reporter
from tpuport.errors import ArtifactError, TpuportError


class CompileError(TpuportError):
    """A program did not compile, or its executable cannot be kept."""


class TooLargeError(CompileError):
    """A program that does not fit a device's memory.

    Attributes:
        component: whose program.
    """

    def __init__(self, component: str, message: str) -> None:
        super().__init__(message)
        self.component = component


@dataclass(frozen=True, kw_only=True)
class Built:
    """One program of the folder.

    Attributes:
        entry: its executable.
        calls: how often the run calls it.
        trace_seconds, compile_seconds: what it took; 0 where it was there already.
        memory: bytes per device; see :func:`plan_of`.
        reused: whether it was there already.
    """

    entry: Entry
    calls: int
    trace_seconds: float
    compile_seconds: float
    memory: Mapping[str, int]
    reused: bool

    def line(self) -> str:
        """For people."""
        what = "was there already" if self.reused else "compiled"
        return (
            f"{self.entry.key.name}: {what}, {self.entry.size / 2**20:.1f} MiB, trace "
            f"{self.trace_seconds:.1f} s, compile {self.compile_seconds:.1f} s"
        )

    def as_dict(self) -> dict[str, Any]:
        told = {**self.entry.as_dict(), **vars(self)}
        del told["entry"]
        return told


def build_pipeline(
    found: Rehearsal,
    stages: Sequence[str],
    folder: Path,
    *,
    attached: bool,
    reporter: Reporter,
) -> list[Built]:
    """Compile every program of a rehearsed run into a folder.

    Args:
        stages: those whose programs are compiled.
        attached: whether the devices are here; if not, the entries of
            jax's own cache are written too.

    Raises:
        CompileError: a program does not compile, or cannot be serialised.
        ArtifactError: the folder cannot be written.
    """
    store, made = ExecutableStore(folder), []
    with _caching(folder, attached):
        for program in found.in_stages(stages):
            started = time.perf_counter()
            key = program.key()
            seconds = time.perf_counter() - started
            built = _build(program, store, key, seconds, reporter)
            program.forget()
            made.append(built)
            reporter.say(built.line())
    return made


def _build(
    program: Rehearsed,
    store: ExecutableStore,
    key: ProgramKey,
    seconds: float,
    reporter: Reporter,
) -> Built:
    """The executable of a program, compiled unless it is there.

    Args:
        seconds: what tracing took.
    """
    entry, took, memory = None, 0.0, {}
    with contextlib.suppress(ArtifactError):  # one that is damaged is written again
        entry = store.find(key)
    reused = entry is not None
    if entry is None:
        started = time.perf_counter()
        try:
            with reporter.timed(f"compiling {key.name}"):
                compiled = program.lowered().compile()
            took = time.perf_counter() - started
            memory = plan_of(compiled)
            payload = serialise(compiled, key.platform)
            entry = store.write(key, payload, seconds=seconds + took)
        except TpuportError:
            raise
        except NotSerialisable as error:
            raise CompileError(f"{key.name} cannot be kept: {error}") from error
        except Exception as error:
            # What the compiler raises: too much memory, a kernel that does not lower.
            told = f"{key.name} does not compile: {error}"
            if refused_bytes(str(error)) is not None:
                raise TooLargeError(program.component, told) from error
            raise CompileError(told) from error
    return Built(
        entry=entry,
        calls=program.calls,
        trace_seconds=seconds,
        compile_seconds=took,
        memory=memory,
        reused=reused,
    )


@contextlib.contextmanager
def _caching(folder: Path, attached: bool) -> Iterator[None]:
    """jax's own cache as a folder of executables needs it."""
    with warnings.catch_warnings():
        # A compile without the chip cannot load what an earlier one wrote.
        warnings.filterwarnings("ignore", message="Error reading persistent")
        # What jax reads from a cache of its own cannot be written again on a CPU.
        with (
            jax_cache.uncached()
            if attached
            else jax_cache.persistent_cache(folder / jax_cache.XLA_FOLDER)
        ):
            yield
