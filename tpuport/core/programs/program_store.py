"""The programs of a session: loaded where they were kept, compiled where not."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tpuport.core.files.atomic import one_line
from tpuport.core.mesh.device_memory import planned_bytes, refused_bytes
from tpuport.core.programs import executable_files as files
from tpuport.core.programs import jax_cache as compiling
from tpuport.core.programs.built_folder import BuiltFolder
from tpuport.core.programs.components import Components
from tpuport.core.programs.executable_files import (
    Entry,
    ExecutableStore,
    NotSerialisable,
)
from tpuport.core.programs.lowering import Traceable, Traced
from tpuport.core.programs.program_key import ProgramKey, program_key
from tpuport.core.reports import CompileReport, Reporter
from tpuport.core.spec.request import Request
from tpuport.core.spec.tiling import DoesNotFitError
from tpuport.errors import ArtifactError

#: Of executables, in the folder of the compile cache.
FOLDER = "executables"


@dataclass(kw_only=True, eq=False)
class Ready:
    """A program that can be called.

    Attributes:
        call: ``call(weights, carry, constants, inputs)``.
        traced: what tracing it told, now or when it was compiled; of a program that
            runs op by op, what its last call told.
    """

    call: Any
    traced: Traced


class Programs:
    """Makes programs ready, once each.

    Args:
        components: whose weights they take.
        cache: the folder where executables are kept between processes, and jax's own
            cache beside them.
        built: executables to use in place of compiling.
        reporter: told what happens.
    """

    def __init__(
        self,
        components: Components,
        *,
        cache: Path | None = None,
        built: BuiltFolder | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self.components = components
        self.store = ExecutableStore(cache / FOLDER) if cache else None
        self.jax_folder = cache / compiling.XLA_FOLDER if cache else None
        self.built = built
        self.reporter = reporter or Reporter()
        self._ready: dict[Any, Ready] = {}
        # Bytes of a device, of programs that had no room.
        self._too_large: dict[Any, int] = {}
        # Labels of programs whose executable jax would not load.
        self._not_loaded: set[str] = set()

    def clear(self) -> None:
        """Let go of every program."""
        self._ready.clear()

    def __contains__(self, signature: Any) -> bool:
        """Whether :meth:`get` has the program of a signature at hand."""
        return signature in self._ready

    def get(
        self, asked: Traceable, request: Request
    ) -> tuple[Ready, CompileReport | None]:
        """The program for these shapes; with a report when it was made ready just now.

        Raises:
            ArtifactError: ``built`` has the stage for another run.
        """
        if asked.signature in self._ready:
            return self._ready[asked.signature], None
        key = None
        if self.store is not None or self.built is not None:
            key = program_key(self.components, asked, request)
        found = self._load(key, asked) if key is not None else None
        ready, report = found or self._compile(key, asked)
        self._ready[asked.signature] = ready
        self.reporter.compiled(report)
        return ready, report

    def get_within(
        self, room: int, asked: Traceable, request: Request
    ) -> tuple[Ready, CompileReport | None]:
        """:meth:`get`, of a program that may take ``room`` bytes of a device at most.

        The size of a larger program is remembered, and kept with the executables for
        other processes: the compiler is asked once.

        Raises:
            DoesNotFitError: it takes more, by the compiler's figure or its refusal.
            ArtifactError: as :meth:`get`.
        """
        key, size = None, self._too_large.get(asked.signature)
        if size is None and self.store is not None:
            key = program_key(self.components, asked, request)
            size = self.store.size(key)
        if size is not None and size > room:
            raise DoesNotFitError(asked.label, size, room)
        try:
            ready, report = self.get(asked, request)
        except Exception as error:  # jaxlib raises one class for everything
            refused = refused_bytes(str(error))
            if refused is None:
                raise
            # The compiler may count on less than the device has now.
            needed = max(refused, room + 1)
        else:
            needed = planned_bytes(ready.call) or 0
            if needed <= room:
                return ready, report
            self._ready.pop(asked.signature, None)
        self._too_large[asked.signature] = needed
        if key is not None and self.store is not None:
            self.store.keep_size(key, needed)
        raise DoesNotFitError(asked.label, needed, room)

    # ------------------------------------------------------------------- load

    def _load(
        self, key: ProgramKey, asked: Traceable
    ) -> tuple[Ready, CompileReport] | None:
        """The kept program of a key, where there is one that can be loaded.

        The built folder comes first, then the programs of earlier processes.
        """
        started = time.perf_counter()
        devices = list(asked.loaded.replicated.mesh.devices.flat)
        arguments = (asked.loaded.weights, *asked.args)
        for holder in (self.built, self.store):
            if holder is None:
                continue
            try:
                entry = holder.find(key)
                if entry is not None:
                    call = files.load(entry, arguments, devices)
            except ArtifactError as error:
                if holder is self.built:
                    raise
                self.reporter.say(f"{error}; compiling {key.name} again")
                continue
            except Exception as error:
                # Whatever jax raises for an executable that the backend does not take.
                assert entry is not None
                self._not_loaded.add(key.name)
                self.reporter.say(
                    f"{entry.path}: jax cannot load it ({type(error).__name__}: "
                    f"{one_line(error)}); going on with jax's own cache"
                )
                continue
            if entry is None:
                if holder is self.built:
                    words = f"{key.stage} was not compiled into it"
                    self.reporter.say(f"{holder.folder}: {words}")
                continue
            report = CompileReport(
                stage=key.stage,
                program=key.program,
                trace_seconds=0.0,
                compile_seconds=0.0,
                cached=True,
                loaded=True,
                load_seconds=time.perf_counter() - started,
                executable=str(entry.path),
                executable_bytes=entry.size,
                compiler_flags=asked.flags.texts,
            )
            return Ready(call=call, traced=entry.traced), report
        return None

    # ---------------------------------------------------------------- compile

    def _compile(
        self, key: ProgramKey | None, asked: Traceable
    ) -> tuple[Ready, CompileReport]:
        reasons: tuple[str, ...] = ()
        if key is not None and self.store is not None:
            reasons = self.store.nearest_difference(key)
        self.reporter.compiling(asked.stage, asked.name)
        with self._jax_cache_for(asked.label):
            hits = compiling.cache_hits()
            started = time.perf_counter()
            lowered = asked.trace().lower()
            lowered_at = time.perf_counter()
            call = lowered.compile()
            cached = compiling.cache_hits() > hits
            ended = time.perf_counter()
        traced = Traced.of(asked.loaded.ported.runtime)
        entry = None
        if key is not None and not cached:
            entry = self._keep(key, call, traced, ended - started)
        report = CompileReport(
            stage=asked.stage,
            program=asked.name,
            trace_seconds=lowered_at - started,
            compile_seconds=ended - lowered_at,
            cached=cached,
            reasons=reasons,
            executable=str(entry.path) if entry else "",
            executable_bytes=entry.size if entry else 0,
            compiler_flags=asked.flags.texts,
        )
        return Ready(call=call, traced=traced), report

    def _jax_cache_for(self, label: str) -> AbstractContextManager[None]:
        """jax's own cache, only for a program that is not kept as an executable.

        On a CPU a program that jax read from its own cache cannot be kept: see
        :func:`tpuport.core.programs.executable_files.serialise`.
        """
        if label not in self._not_loaded:
            return compiling.uncached() if self.store is not None else nullcontext()
        if self.built is None:
            return nullcontext()
        return compiling.persistent_cache(self.built.folder / compiling.XLA_FOLDER)

    def _keep(
        self,
        key: ProgramKey,
        compiled: jax.stages.Compiled,
        traced: Traced,
        seconds: float,
    ) -> Entry | None:
        """Keep an executable for other processes, where there is a store."""
        if self.store is None:
            return None
        try:
            entry = self.store.write(
                key,
                files.serialise(compiled, key.platform),
                traced,
                seconds=seconds,
                needed=planned_bytes(compiled),
            )
        except (ArtifactError, NotSerialisable) as error:
            self.reporter.say(
                f"{key.name} is not kept: {error}; every process compiles it"
            )
            return None
        folder = self.store.folder.parent
        if removed := files.prune(folder):
            self.reporter.say(f"{folder}: {len(removed)} old programs removed")
        return entry
