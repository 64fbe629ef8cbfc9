"""Compiling the programs of a run into a folder, for devices here or elsewhere."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tpuport.core.mesh.device_memory import refused_bytes
from tpuport.core.plan.abstract_programs import AbstractProgram
from tpuport.core.programs import jax_cache as compiling
from tpuport.core.programs.components import Components
from tpuport.core.programs.executable_files import (
    ELSEWHERE,
    HERE,
    Entry,
    ExecutableStore,
    NotSerialisable,
    Traced,
    lowered_hash,
)
from tpuport.core.programs.program_key import program_key
from tpuport.core.programs.program_store import patches_of
from tpuport.core.reports import Reporter
from tpuport.core.spec.request import Request
from tpuport.core.spec.tiling import TilingDecision, gibibytes
from tpuport.errors import ArtifactError, TpuportError

ProgramsOf = Callable[
    [Sequence[str], str, Callable[[TilingDecision], None]], Iterable["AbstractProgram"]
]
"""The programs of some stages with a setting of tiling, and who is told of it."""


class CompileError(TpuportError):
    """A program did not compile, or its executable cannot be kept."""


class TooLargeError(CompileError):
    """A program takes more of a device than its stage has.

    Attributes:
        stage: whose program it is.
        needed: bytes of a device that it takes.
        made: what was compiled before it, of other stages.
    """

    def __init__(self, stage: str, needed: int, made: Sequence[Built]) -> None:
        super().__init__(f"{stage} takes {gibibytes(needed)} a device")
        self.stage, self.needed, self.made = stage, needed, tuple(made)


@dataclass(frozen=True, kw_only=True)
class Built:
    """One program of the folder.

    Attributes:
        entry: its executable.
        calls: how often the run calls it.
        trace_seconds, compile_seconds: what it took; 0 where it was there already.
        memory: bytes per device: arguments, outputs, temporaries, code.
        reused: whether it was there already.
    """

    entry: Entry
    calls: int
    trace_seconds: float
    compile_seconds: float
    memory: Mapping[str, int]
    reused: bool

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
    programs: Iterable[AbstractProgram],
    components: Components,
    request: Request,
    folder: Path,
    *,
    attached: bool,
    reporter: Reporter,
    room: Callable[[str], int | None] = lambda stage: None,
) -> list[Built]:
    """Compile every program and write its executable.

    Args:
        programs: of a run, made lazily: tracing them is part of the work.
        components: with the settings of the run.
        folder: made when it is missing; executables of the same keys stay.
        attached: whether the devices are here. Where they are not, the entries of
            jax's own cache are written too.
        reporter: told about progress.
        room: bytes of a device that the programs of a stage may take.

    Raises:
        TooLargeError: a program takes more; what was written of its stage is gone.
        CompileError: a program does not compile, or cannot be serialised.
        ArtifactError: the folder cannot be written.
    """
    store = ExecutableStore(folder)
    made: list[Built] = []
    with _caching(folder, attached):
        iterator = iter(programs)
        while True:
            started = time.perf_counter()
            program = next(iterator, None)
            if program is None:
                return made
            program.lowered()
            seconds = time.perf_counter() - started
            limit, needed = room(program.stage), None
            try:
                built = _one(
                    program,
                    store,
                    components,
                    request,
                    seconds,
                    attached=attached,
                    reporter=reporter,
                )
                made.append(built)
                needed = built.entry.needed
            except CompileError as error:
                needed = refused_bytes(str(error))
                if limit is None or needed is None:
                    raise
            if limit is not None and needed is not None and needed > limit:
                gone = [b for b in made if b.entry.key.stage == program.stage]
                for one in gone:
                    if not one.reused:  # what was there before is the manifest's
                        one.entry.path.unlink(missing_ok=True)
                raise TooLargeError(
                    program.stage, needed, [b for b in made if b not in gone]
                )
            program.forget()
            what = "was there already" if built.reused else "compiled"
            reporter.say(
                f"{built.entry.key.name}: {what}, {built.entry.size / 2**20:.1f} MiB, "
                f"trace {seconds:.1f} s, compile {built.compile_seconds:.1f} s"
            )


def build_weighed(
    programs: ProgramsOf,
    components: Components,
    request: Request,
    folder: Path,
    *,
    stages: Sequence[str],
    vae_tiling: str,
    attached: bool,
    reporter: Reporter,
) -> tuple[list[Built], list[TilingDecision]]:
    """:func:`build`, in tiles where what was compiled does not fit without, or so.

    As a run decides it: by an estimate, then by the compiler's figure, as long as
    ``vae_tiling`` is ``"auto"``.

    Returns:
        What was compiled, and how each stage with a choice runs.

    Raises:
        CompileError, ArtifactError: as :func:`build`; no form of a stage fits.
    """
    left, setting = list(stages), vae_tiling
    made: list[Built] = []
    decided: dict[str, TilingDecision] = {}
    instead: dict[str, TilingDecision] = {}

    def note(tiling: TilingDecision) -> None:
        decided[tiling.stage] = instead.get(tiling.stage, tiling)

    def room(stage: str) -> int | None:
        return decided[stage].room if stage in decided else None

    while left:
        try:
            made += build(
                programs(left, setting, note),
                components,
                request,
                folder,
                attached=attached,
                reporter=reporter,
                room=room,
            )
            left = []
        except TooLargeError as error:
            made += error.made
            now = decided[error.stage]
            other = now.instead(error.needed)
            if other is None:
                raise CompileError(str(now.refusal(now.stage, error.needed))) from error
            reporter.say(
                f"{now.stage} {now.chosen.manner} takes {gibibytes(error.needed)}: "
                f"compiling it {other.chosen.manner}"
            )
            instead[now.stage] = other
            left = left[left.index(now.stage) :]
            setting = other.setting
    for name, tiling in decided.items():
        sizes = [b.entry.needed for b in made if b.entry.key.stage == name]
        known = [size for size in sizes if size is not None]
        decided[name] = tiling.weighed(max(known, default=None))
    return made, list(decided.values())


def _one(
    program: AbstractProgram,
    store: ExecutableStore,
    components: Components,
    request: Request,
    seconds: float,
    *,
    attached: bool,
    reporter: Reporter,
) -> Built:
    key = program_key(
        components,
        program.stage,
        program.program,
        program.spec,
        program.loaded,
        program.args,
        request,
    )
    lowered = program.lowered()
    try:
        entry = store.find(key)
    except ArtifactError:
        entry = None  # damaged: written again below
    if entry is not None and entry.lowered == lowered_hash(lowered):
        return Built(
            entry=entry,
            calls=program.calls,
            trace_seconds=seconds,
            compile_seconds=0.0,
            memory={},
            reused=True,
        )
    started = time.perf_counter()
    try:
        with reporter.timed(f"compiling {key.name}"):
            compiled = lowered.compile()
        took = time.perf_counter() - started
        entry = store.write(
            key,
            compiled,
            Traced(
                attention=tuple(record.as_dict() for record in program.records()),
                patches=patches_of(program.loaded.ported.runtime),
                convolutions=tuple(r.as_dict() for r in program.convolutions()),
            ),
            lowered=lowered_hash(lowered),
            seconds=seconds + took,
            built_for=HERE if attached else ELSEWHERE,
        )
    except NotSerialisable as error:
        raise CompileError(f"{key.name} cannot be kept: {error}") from error
    except Exception as error:
        if isinstance(error, TpuportError):
            raise
        # Whatever the compiler raises: too much memory, a kernel that does not lower.
        raise CompileError(f"{key.name} does not compile: {error}") from error
    return Built(
        entry=entry,
        calls=program.calls,
        trace_seconds=seconds,
        compile_seconds=took,
        memory=_memory(compiled),
        reused=False,
    )


def _caching(folder: Path, attached: bool) -> AbstractContextManager[None]:
    if attached:
        # What jax reads from a cache of its own cannot be written again on a CPU.
        return compiling.uncached()
    return _WithoutWarnings(folder / compiling.XLA_FOLDER)


class _WithoutWarnings(AbstractContextManager[None]):
    """jax's cache in ``folder``, without a word on entries it cannot read here."""

    def __init__(self, folder: Path) -> None:
        self._cache = compiling.persistent_cache(folder)
        self._warnings = warnings.catch_warnings()

    def __enter__(self) -> None:
        self._warnings.__enter__()
        # A compile without the chip cannot load what an earlier one wrote.
        warnings.filterwarnings("ignore", message="Error reading persistent")
        self._cache.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._cache.__exit__(*error)
        self._warnings.__exit__(*error)


def _memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes per device, as the compiler counts them; empty where it does not."""
    stats = compiled.memory_analysis()
    names = {
        "arguments": "argument_size_in_bytes",
        "outputs": "output_size_in_bytes",
        "temporaries": "temp_size_in_bytes",
        "code": "generated_code_size_in_bytes",
    }
    found = {name: getattr(stats, attribute, None) for name, attribute in names.items()}
    return {name: int(value) for name, value in found.items() if value is not None}
