"""The programs of a session: loaded where they were kept, compiled where not."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tpuport.core.files.atomic import one_line
from tpuport.core.mesh.compiler_flags import flags_for
from tpuport.core.mesh.device_memory import planned_bytes, refused_bytes
from tpuport.core.programs import executable_files as files
from tpuport.core.programs import jax_cache as compiling
from tpuport.core.programs.built_folder import BuiltFolder
from tpuport.core.programs.components import Components, Loaded
from tpuport.core.programs.executable_files import (
    Entry,
    ExecutableStore,
    NotSerialisable,
    Traced,
)
from tpuport.core.programs.lowering import lower
from tpuport.core.programs.program_key import ProgramKey, program_key
from tpuport.core.reports import CompileReport, Reporter
from tpuport.core.spec.request import Request
from tpuport.core.spec.stage import Program
from tpuport.core.spec.tiling import DoesNotFitError, TilingDecision
from tpuport.core.tracing.convolution_notes import counted
from tpuport.core.tracing.runtime import Runtime
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
        store: where executables are kept between processes.
        jax_folder: of jax's own cache.
        built: executables to use in place of compiling.
        reporter: told what happens.
    """

    def __init__(
        self,
        components: Components,
        *,
        store: ExecutableStore | None = None,
        jax_folder: Path | None = None,
        built: BuiltFolder | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self.components = components
        self.store = store
        self.jax_folder = jax_folder
        self.built = built
        self.reporter = reporter or Reporter()
        self._ready: dict[Any, Ready] = {}
        # Bytes of a device, of programs that had no room.
        self._too_large: dict[Any, int] = {}
        # Names of programs whose executable jax would not load.
        self._refused: set[str] = set()

    @classmethod
    def of(
        cls,
        components: Components,
        compile_cache: Path | None,
        executables: Path | None,
        reporter: Reporter,
    ) -> Programs:
        """Those of a session, kept in its compile cache and read from a built folder.

        Raises:
            ArtifactError: ``executables`` is damaged.
        """
        for remark in flags_for(components.mesh.devices.flat[0]).remarks():
            reporter.say(remark)
        return cls(
            components,
            store=ExecutableStore(compile_cache / FOLDER) if compile_cache else None,
            jax_folder=compile_cache / compiling.XLA_FOLDER if compile_cache else None,
            built=BuiltFolder.open(executables) if executables else None,
            reporter=reporter,
        )

    def check(self) -> None:
        """Refuse a built folder that is for other settings; see its ``check``."""
        if self.built is not None:
            self.built.check(self.components)

    def check_request(
        self,
        request: Request,
        stages: Collection[str],
        tilings: Sequence[TilingDecision] = (),
    ) -> None:
        """Refuse a built folder that is for other requests; see its method."""
        if self.built is not None:
            port = self.components.port
            self.built.check_request(request, port, stages, tilings)

    def jax_cache(self) -> AbstractContextManager[None]:
        """jax's own cache, for what is compiled beside the programs of the stages."""
        return compiling.persistent_cache(self.jax_folder)

    def clear(self) -> None:
        """Let go of every program."""
        self._ready.clear()

    def is_ready(self, stage: str, name: str, args: tuple[Any, Any, Any]) -> bool:
        """Whether :meth:`get` has the program for these shapes at hand."""
        return (stage, name, signature(args)) in self._ready

    def get(
        self,
        stage: str,
        name: str,
        program: Program,
        loaded: Loaded,
        args: tuple[Any, Any, Any],
        request: Request,
    ) -> tuple[Ready, CompileReport | None]:
        """The program for these shapes; with a report when it was made ready just now.

        Raises:
            ArtifactError: ``built`` has the stage for another run.
        """
        known = (stage, name, signature(args))
        if known in self._ready:
            return self._ready[known], None
        key = None
        report: CompileReport | None = None
        ready: Ready | None = None
        if self.store is not None or self.built is not None:
            key = program_key(
                self.components, stage, name, program, loaded, args, request
            )
            ready, report = self._load(key, loaded, args)
        if ready is None or report is None:
            ready, report = self._compile(stage, name, program, loaded, args, key)
        self._ready[known] = ready
        self.reporter.compiled(report)
        return ready, report

    def get_within(
        self,
        room: int,
        stage: str,
        name: str,
        program: Program,
        loaded: Loaded,
        args: tuple[Any, Any, Any],
        request: Request,
    ) -> tuple[Ready, CompileReport | None]:
        """:meth:`get`, of a program that may take ``room`` bytes of a device at most.

        What a larger one takes is remembered, and kept with the executables for other
        processes: the compiler is asked once.

        Raises:
            DoesNotFitError: it takes more, by the compiler's figure or its refusal.
            ArtifactError: as :meth:`get`.
        """
        known, key = (stage, name, signature(args)), None
        size = self._too_large.get(known)
        if size is None and self.store is not None:
            key = program_key(
                self.components, stage, name, program, loaded, args, request
            )
            size = self.store.size(key)
        if size is not None and size > room:
            raise DoesNotFitError(f"{stage}/{name}", size, room)
        try:
            ready, report = self.get(stage, name, program, loaded, args, request)
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
            self._ready.pop(known, None)
        self._too_large[known] = needed
        if key is not None and self.store is not None:
            self.store.keep_size(key, needed)
        raise DoesNotFitError(f"{stage}/{name}", needed, room)

    # ------------------------------------------------------------------- load

    def _load(
        self, key: ProgramKey, loaded: Loaded, args: tuple[Any, Any, Any]
    ) -> tuple[Ready | None, CompileReport | None]:
        """The kept program of a key, where there is one that can be loaded."""
        started = time.perf_counter()
        for entry in self._kept(key):
            call = self._try(entry, loaded, args)
            if call is not None:
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
                    compiler_flags=_flags(key.stage, loaded),
                )
                return Ready(call=call, traced=entry.traced), report
        return None, None

    def _kept(self, key: ProgramKey) -> Iterator[Entry]:
        """The entries of a key: the built folder's, then those of processes before."""
        if self.built is not None:
            entry = self.built.find(key)
            if entry is not None:
                yield entry
            else:
                self.reporter.say(
                    f"{self.built.folder}: {key.stage} was not compiled into it"
                )
        if self.store is not None:
            try:
                entry = self.store.find(key)
            except ArtifactError as error:
                self.reporter.say(f"{error}; compiling {key.name} again")
                return
            if entry is not None:
                yield entry

    def _try(self, entry: Entry, loaded: Loaded, args: tuple[Any, Any, Any]) -> Any:
        """The program of an entry, or ``None`` with a line that says why not."""
        devices = list(loaded.replicated.mesh.devices.flat)
        name = entry.key.name
        try:
            return files.load(entry, (loaded.weights, *args), devices)
        except ArtifactError as error:
            if self.built is not None and entry in self.built.entries:
                raise
            self.reporter.say(f"{error}; compiling {name} again")
        except Exception as error:
            # Whatever jax raises for an executable that the backend does not take.
            self._refused.add(name)
            self.reporter.say(
                f"{entry.path}: jax cannot load it ({type(error).__name__}: "
                f"{one_line(error)}); going on with jax's own cache"
            )
        return None

    # ---------------------------------------------------------------- compile

    def _compile(
        self,
        stage: str,
        name: str,
        program: Program,
        loaded: Loaded,
        args: tuple[Any, Any, Any],
        key: ProgramKey | None,
    ) -> tuple[Ready, CompileReport]:
        reasons = self._reasons(key)
        if reasons:
            self.reporter.say(f"recompiling {stage}/{name}: {'; '.join(reasons)}")
        self.reporter.compiling(stage, name)
        entry = None
        with self._jax_cache_for(f"{stage}/{name}"):
            hits = compiling.cache_hits()
            started = time.perf_counter()
            lowered, traced = trace(stage, name, program, loaded, args)
            lowered_at = time.perf_counter()
            call = lowered.compile()
            cached = compiling.cache_hits() > hits
            ended = time.perf_counter()
        if not cached and key is not None and self.store is not None:
            entry = self._keep(key, call, traced, ended - started)
        report = CompileReport(
            stage=stage,
            program=name,
            trace_seconds=lowered_at - started,
            compile_seconds=ended - lowered_at,
            cached=cached,
            reasons=reasons,
            executable=str(entry.path) if entry else "",
            executable_bytes=entry.size if entry else 0,
            compiler_flags=_flags(stage, loaded),
        )
        return Ready(call=call, traced=traced), report

    def _jax_cache_for(self, name: str) -> AbstractContextManager[None]:
        """jax's own cache, only for a program that is not kept as an executable.

        On a CPU a program that jax read from its own cache cannot be kept: see
        :meth:`ExecutableStore.write`.
        """
        if name in self._refused:
            if self.built is not None:
                return compiling.persistent_cache(self.built.xla)
        elif self.store is not None:
            return compiling.uncached()
        return nullcontext()

    def _reasons(self, key: ProgramKey | None) -> tuple[str, ...]:
        """What changed since the most alike program that was kept."""
        if key is None or self.store is None:
            return ()
        nearest = self.store.nearest(key)
        return key.difference(nearest.key) if nearest else ()

    def _keep(
        self,
        key: ProgramKey,
        compiled: jax.stages.Compiled,
        traced: Traced,
        seconds: float,
    ) -> Entry | None:
        assert self.store is not None
        try:
            entry = self.store.write(key, compiled, traced, seconds=seconds)
        except ArtifactError as error:
            self.reporter.say(f"{key.name} is not kept for the next process: {error}")
            return None
        except NotSerialisable as error:
            self.reporter.say(
                f"{key.name} is not kept: {error}; every process compiles it"
            )
            return None
        removed = files.prune(self.store.folder.parent)
        if removed:
            self.reporter.say(
                f"{self.store.folder.parent}: {len(removed)} old programs removed"
            )
        return entry


def trace(
    stage: str,
    name: str,
    program: Program,
    loaded: Loaded,
    args: tuple[Any, Any, Any],
) -> tuple[jax.stages.Lowered, Traced]:
    """A program lowered, and what tracing it told; see :func:`lower`."""
    runtime = loaded.ported.runtime
    with attention_of(runtime) as attention:
        lowered = lower(stage, name, program, loaded, args)
    return lowered, traced_of(runtime, attention)


def traced_of(runtime: Runtime, attention: Iterable[dict[str, Any]]) -> Traced:
    """What the runtime told of the program that it traced last."""
    convolutions = (record.as_dict() for record in counted(runtime.convolutions))
    return Traced(
        attention=tuple(attention),
        patches=patches_of(runtime),
        convolutions=tuple(convolutions),
    )


@contextmanager
def attention_of(runtime: Runtime) -> Iterator[list[dict[str, Any]]]:
    """What the attention calls traced in this block run as; filled when it ends.

    The runtime keeps its own list of all it ever traced, each once: it is emptied here,
    or a call that an earlier program made too would not be seen. Its list of
    convolutions is that of this block afterwards.
    """
    runtime.convolutions.clear()
    found = runtime.records
    before = list(found)
    found.clear()
    collected: list[dict[str, Any]] = []
    try:
        yield collected
        collected += [record.as_dict() for record in found]
    finally:
        found[:] = [*before, *(record for record in found if record not in before)]


def patches_of(runtime: Runtime) -> tuple[dict[str, Any], ...]:
    """What patching did when the runtime last traced."""
    if runtime.patch_report is None:
        return ()
    return tuple(runtime.patch_report.as_dict()["patches"])


def _flags(stage: str, loaded: Loaded) -> tuple[str, ...]:
    """The compiler's flags that go with programs of a stage."""
    return flags_for(loaded.replicated.mesh.devices.flat[0], stage).texts


def signature(args: Any) -> Any:
    """What tells the programs of one name apart: structure, shapes and dtypes."""

    leaves, tree = jax.tree.flatten(args)
    return tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
