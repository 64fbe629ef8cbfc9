"""Compiling the programs of a run into a folder, for devices here or elsewhere."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax

from tpuport.core.mesh.device_memory import plan_of, planned_bytes, refused_bytes
from tpuport.core.plan.abstract_programs import AbstractProgram
from tpuport.core.programs import jax_cache as compiling
from tpuport.core.programs.components import Components
from tpuport.core.programs.executable_files import (
    Entry,
    ExecutableStore,
    NotSerialisable,
    serialise,
)
from tpuport.core.programs.lowering import Traced
from tpuport.core.programs.program_key import ProgramKey, program_key
from tpuport.core.reports import Reporter
from tpuport.core.spec.request import Request
from tpuport.core.spec.tiling import TilingDecision
from tpuport.errors import ArtifactError, TpuportError

ProgramsOf = Callable[[Callable[[TilingDecision], None]], Iterable[AbstractProgram]]
"""The programs of a run, given who is told how a stage runs that may run in tiles."""


class CompileError(TpuportError):
    """A program did not compile, or its executable cannot be kept."""


class Compilable(Protocol):
    """A program of a run."""

    @property
    def calls(self) -> int:
        """How often the run calls it."""

    def lowered(self) -> jax.stages.Lowered:
        """What is compiled."""


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
        """JSON-ready."""
        return {
            "stage": self.entry.key.stage,
            "program": self.entry.key.program,
            "file": self.entry.path.name,
            "bytes": self.entry.size,
            "calls": self.calls,
            "trace_seconds": self.trace_seconds,
            "compile_seconds": self.compile_seconds,
            "memory": dict(self.memory),
            "reused": self.reused,
        }


def build(
    programs: ProgramsOf,
    components: Components,
    request: Request,
    folder: Path,
    *,
    attached: bool,
    reporter: Reporter,
) -> tuple[list[Built], list[TilingDecision]]:
    """Compile every program and write its executable.

    Args:
        programs: of a run, made lazily: tracing them is part of the work.
        components: with the settings of the run.
        folder: made when it is missing; executables of the same keys stay.
        attached: whether the devices are here. If not, the entries of jax's own cache
            are written too.
        reporter: told about progress.

    Returns:
        What was compiled, and how each stage with a choice of tiles runs.

    Raises:
        CompileError: a program does not compile, or cannot be serialised; or a stage
            fits in no form.
        ArtifactError: the folder cannot be written.
    """
    store = ExecutableStore(folder)
    made: list[Built] = []
    decided: list[TilingDecision] = []

    def decide(tiling: TilingDecision) -> None:
        if tiling.room is not None and not tiling.fits:
            _remove(made, tiling.stage)
            raise CompileError(tiling.reason())
        decided.append(tiling)

    tiled: set[str] = set()
    with caching(folder, attached):
        iterator = iter(programs(decide))
        while True:
            started = time.perf_counter()
            program = next(iterator, None)
            if program is None:
                return made, decided
            tiling = program.tiling
            if tiling is not None and tiling.tiled and program.asked.stage not in tiled:
                # Of the whole picture, which was too large.
                _remove(made, program.asked.stage)
                tiled.add(program.asked.stage)
            program.lowered()
            seconds = time.perf_counter() - started
            told = Traced.of(program.loaded.ported.runtime)
            key = program_key(components, program.asked, request)
            try:
                built = build_one(program, store, key, seconds, told, reporter)
            except CompileError as error:
                room = None if tiling is None else tiling.room
                program.needed = refused_bytes(str(error))
                if room is None or (program.needed or 0) <= room:
                    raise
                continue
            made.append(built)
            program.needed = built.entry.needed
            program.forget()
            reporter.say(built.line())


def _remove(made: list[Built], stage: str) -> None:
    """Take the programs of a stage back."""
    for built in [b for b in made if b.entry.key.stage == stage]:
        made.remove(built)
        if not built.reused:  # what was there before is the manifest's
            built.entry.path.unlink(missing_ok=True)


def build_one(
    program: Compilable,
    store: ExecutableStore,
    key: ProgramKey,
    seconds: float,
    told: Traced,
    reporter: Reporter,
) -> Built:
    """The executable of a program, compiled unless it is there.

    Args:
        seconds: what tracing took.
        told: what tracing told.

    Raises:
        CompileError: the program does not compile, or cannot be serialised.
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
            entry = store.write(
                key,
                serialise(compiled, key.platform),
                told,
                seconds=seconds + took,
                needed=planned_bytes(compiled),
            )
        except TpuportError:
            raise
        except NotSerialisable as error:
            raise CompileError(f"{key.name} cannot be kept: {error}") from error
        except Exception as error:
            # What the compiler raises: too much memory, a kernel that does not lower.
            raise CompileError(f"{key.name} does not compile: {error}") from error
    return Built(
        entry=entry,
        calls=program.calls,
        trace_seconds=seconds,
        compile_seconds=took,
        memory=memory,
        reused=reused,
    )


@contextlib.contextmanager
def caching(folder: Path, attached: bool) -> Iterator[None]:
    """jax's own cache, as a folder of executables needs it; see :func:`build`."""
    with warnings.catch_warnings():
        # A compile without the chip cannot load what an earlier one wrote.
        warnings.filterwarnings("ignore", message="Error reading persistent")
        # What jax reads from a cache of its own cannot be written again on a CPU.
        with (
            compiling.uncached()
            if attached
            else compiling.persistent_cache(folder / compiling.XLA_FOLDER)
        ):
            yield
