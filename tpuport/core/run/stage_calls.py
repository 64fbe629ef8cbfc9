"""The calls of one stage: a bounded number in flight, outputs taken as they come."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax

from tpuport.core.arrays import to_numpy
from tpuport.core.mesh.device_memory import planned_bytes
from tpuport.core.programs.components import EVERYTHING, Components, Loaded
from tpuport.core.programs.lowering import Traceable
from tpuport.core.programs.op_by_op import op_by_op
from tpuport.core.programs.program_store import Programs, Ready
from tpuport.core.reports import CompileReport, Reporter
from tpuport.core.run.frame_delivery import Delivery
from tpuport.core.run.memory_report import MemoryLog
from tpuport.core.run.profile import SteadyTrace
from tpuport.core.spec.request import Request
from tpuport.core.spec.stage import Stage
from tpuport.core.spec.stage_work import Work
from tpuport.core.spec.tiling import DoesNotFitError
from tpuport.core.tracing.convolution_notes import joined


@dataclass
class Timing:
    """What one stage has spent so far."""

    load: float = 0.0
    compile: float = 0.0
    first: float = 0.0
    steady: float = 0.0
    steady_calls: int = 0
    compiles: list[CompileReport] = field(default_factory=list)
    in_flight: int = 0
    programs: dict[Any, Ready] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As a :class:`~tpuport.core.reports.StageReport` has it."""
        told = [program.traced for program in self.programs.values()]
        return {
            "load_seconds": self.load,
            "compiles": tuple(self.compiles),
            "compile_seconds": self.compile,
            "first_call_seconds": self.first,
            "steady_calls": self.steady_calls,
            "steady_seconds": self.steady,
            "calls_in_flight": self.in_flight,
            "attention": _once(record for t in told for record in t.attention),
            "patches": _once(record for t in told for record in t.patches),
            "convolutions": joined(record for t in told for record in t.convolutions),
        }


class _Pending(NamedTuple):
    """A call that was dispatched and not yet waited for."""

    number: int
    program: str
    ready: Ready
    output: Any


@dataclass(kw_only=True)
class StageRun:
    """One stage of one request, batch after batch.

    Attributes:
        components: the weights.
        programs: makes the programs that are called; ``None`` runs them op by op.
        reporter: told about each call.
        request: the whole run.
        limit: calls dispatched before the oldest is waited for.
        delivery: takes frames.
        total: how many calls there are in all batches.
        timing: what it took so far.
        trace: records steady calls.
        memory: told each call that ended.
        room: bytes of a device that a program may take; ``None`` for no limit.
        done: calls of the batches before.
    """

    components: Components
    programs: Programs | None
    reporter: Reporter
    request: Request
    limit: int
    delivery: Delivery
    trace: SteadyTrace
    total: int = 0
    timing: Timing = field(default_factory=Timing)
    memory: MemoryLog | None = None
    room: int | None = None
    done: int = 0
    _frames: int = 0
    # Signatures of programs that were called in this stage, and of those that were
    # compiled or loaded for it and not called yet.
    _called: set[Any] = field(default_factory=set)
    _new: set[Any] = field(default_factory=set)

    def batch(self, stage: Stage, work: Work, first_video: int) -> dict[str, Any]:
        """The calls of one batch, a bounded number of them in flight.

        Args:
            stage: whose programs the calls name.
            first_video: the index of the batch's first video in the run.

        Returns:
            What the work finishes with; frames only where no sink took them.
        """
        flight = _Flight(run=self, stage=stage, work=work, first_video=first_video)
        constants: Any = None
        for index, call in enumerate(work.calls):
            program = stage.programs[call.program]
            loaded = load(self.components, stage, program.component, self.timing)
            if index == 0:
                flight.carry, constants = place((work.carry, work.constants), loaded)
            elif call.fresh:
                # What was placed first may be gone: programs donate their carry.
                flight.carry = place(work.carry, loaded)
            asked = Traceable(
                stage=stage.name,
                name=call.program,
                program=program,
                loaded=loaded,
                args=(flight.carry, constants, place(call.inputs, loaded)),
            )
            self.trace.turn(asked.signature in self._called, flight.pause)
            known = self.timing.programs if self.programs is None else self.programs
            if asked.signature not in known:
                # Steady calls under way are no part of making a program ready.
                flight.pause()
            self._called.add(asked.signature)
            for name in work.programs if index == 0 else ():
                ahead = replace(asked, name=name, program=stage.programs[name])
                self._ready(ahead)
                self._new.discard(ahead.signature)
                del ahead
            ready = self._ready(asked)
            first = (index, self.done) == (0, 0) or asked.signature in self._new
            self._new.discard(asked.signature)
            called = time.perf_counter()
            with self.trace.call(call.program, self.done + index):
                flight.carry, output = ready.call(loaded.weights, *asked.args)
            flight.dispatched(_Pending(index, call.program, ready, output))
            # Only what is pending holds these now, or fetched ones would stay.
            del output, asked
            flight.wait(called, first)
        flight.pause()
        self.done += work.total
        if work.to_frames is not None:
            return {**work.finish(flight.carry, []), **self.delivery.collected()}
        finished = work.finish(flight.carry, flight.outputs)
        flight.outputs.clear()
        if "frames" in finished:
            self.take(stage, first_video, finished.pop("frames"), None)
            finished |= self.delivery.collected()
        return finished

    def largest(self, stage: Stage, work: Work, room: int) -> int | None:
        """Make every program of a work ready, before any of them is called.

        Args:
            room: bytes of a device that one of them may take.

        Returns:
            Bytes of a device that the largest one takes by the compiler, or those of
            the first one over ``room``; ``None`` where the compiler does not tell.
        """
        sizes = [0]

        def results(asked: Traceable) -> tuple[Any, Any]:
            ready = self._ready(asked, room)
            sizes.append(planned_bytes(ready.call) or 0)
            return asked.results(ready.call.out_info)

        try:
            walk(
                stage,
                work,
                lambda name: load(self.components, stage, name, self.timing),
                results,
            )
        except DoesNotFitError as error:
            return error.bytes
        return max(sizes) or None

    def take(self, stage: Stage, first_video: int, made: Any, output: Any) -> None:
        """Hand frames to whoever takes them, and tell how many there are."""
        self._frames += self.delivery.take(first_video, made, output)
        total = self.request.num_frames * self.request.batches
        self.reporter.delivered(stage.name, self._frames, total)

    def _ready(self, asked: Traceable, room: int | None = None) -> Ready:
        """The program, made ready where that was not done before."""
        timing, started = self.timing, time.perf_counter()
        report = None
        room = self.room if room is None else room
        if self.programs is None:
            ready = timing.programs.get(asked.signature) or op_by_op(asked)
        elif room is None or asked.signature in timing.programs:
            ready, report = self.programs.get(asked, self.request)
        else:
            ready, report = self.programs.get_within(room, asked, self.request)
        timing.programs[asked.signature] = ready
        if report is not None:
            self._new.add(asked.signature)
            timing.compiles.append(report)
            timing.compile += time.perf_counter() - started
        return ready


def _once(entries: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The entries in order, each once."""
    found: list[dict[str, Any]] = []
    for entry in entries:
        if entry not in found:
            found.append(entry)
    return tuple(found)


def load(components: Components, stage: Stage, name: str, timing: Timing) -> Loaded:
    """A component's weights, as far as the stage needs them."""
    started = time.perf_counter()
    loaded = components.load(name, stage.loads.get(name, EVERYTHING))
    timing.load += time.perf_counter() - started
    return loaded


def place(tree: Any, loaded: Loaded) -> Any:
    """Every tensor or array of ``tree`` on the devices of ``loaded``, replicated.

    Floating point arrays keep their dtype; see :func:`tpuport.core.arrays.to_numpy`.
    """
    return jax.tree.map(
        lambda leaf: jax.device_put(to_numpy(leaf), loaded.replicated), tree
    )


def abstract(tree: Any, loaded: Loaded) -> Any:
    """Shapes and dtypes of ``tree``, placed as :func:`place` places it."""

    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            leaf = to_numpy(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=loaded.replicated)

    return jax.tree.map(struct, tree)


def walk(
    stage: Stage,
    work: Work,
    load: Callable[[str], Loaded],
    results: Callable[[Traceable], tuple[Any, Any]],
) -> tuple[Any, list[Any]]:
    """Go through the calls of a work without making them.

    Args:
        load: a component by its name.
        results: tells the carry and the output of a call, as ``ShapeDtypeStruct`` s,
            from its arguments, which are so too.

    Returns:
        the last carry and all outputs.
    """
    carry, constants = work.carry, work.constants
    outputs: list[Any] = []
    for index, call in enumerate(work.calls):
        program = stage.programs[call.program]
        loaded = load(program.component)
        if index == 0:
            carry, constants = abstract((carry, constants), loaded)
        elif call.fresh:
            carry = abstract(work.carry, loaded)
        asked = Traceable(
            stage=stage.name,
            name=call.program,
            program=program,
            loaded=loaded,
            args=(carry, constants, abstract(call.inputs, loaded)),
        )
        carry, output = results(asked)
        outputs.append(output)
    return carry, outputs


@dataclass(kw_only=True)
class _Flight:
    """The calls of one batch that were dispatched, and the clock of the steady ones.

    Attributes:
        run: whose calls they are.
        stage, work, first_video: as :meth:`StageRun.batch` takes them.
        carry: what the last call gave; ``None`` before the first.
        outputs: of every call; ``None`` where frames are taken from one.
    """

    run: StageRun
    stage: Stage
    work: Work
    first_video: int
    carry: Any = None
    outputs: list[Any] = field(default_factory=list)
    _pending: deque[_Pending] = field(default_factory=deque)
    _steady_from: float | None = None

    def dispatched(self, call: _Pending) -> None:
        """A call is under way."""
        self._pending.append(call)
        timing = self.run.timing
        timing.in_flight = max(timing.in_flight, len(self._pending))
        self.outputs.append(None if self.work.to_frames is not None else call.output)

    def wait(self, called: float, first: bool) -> None:
        """Wait for the calls before, as far as the limit asks for.

        Args:
            called: when the last call was dispatched.
            first: whether it is timed as its program's first; it is waited for then.
        """
        timing, limit = self.run.timing, self.run.limit
        if first:
            self.pause()
            timing.first += time.perf_counter() - called
            return
        if self._steady_from is None:
            self._steady_from = called
        timing.steady_calls += 1
        if len(self._pending) == limit and not jax.tree.leaves(self._pending[0].output):
            # A call without an output is waited for by its carry, and of those only
            # the last is left: the others were donated.
            jax.block_until_ready(self.carry)
            self._settle(0)
        self._settle(limit - 1)

    def pause(self) -> None:
        """End what runs; what follows is none of the steady calls' time."""
        self._settle(0)
        jax.block_until_ready(self.carry)
        if self._steady_from is not None:
            self.run.timing.steady += time.perf_counter() - self._steady_from
            self._steady_from = None

    def _settle(self, keep: int) -> None:
        """Wait for all but the last ``keep`` calls, and hand on what they made."""
        work, run = self.work, self.run
        while len(self._pending) > keep:
            ended = self._pending.popleft()
            jax.block_until_ready(ended.output)
            number = run.done + ended.number
            run.reporter.advanced(self.stage.name, number + 1, run.total)
            if run.memory is not None:
                run.memory.ended(
                    self.stage.name, number, ended.program, ended.ready.call
                )
            if work.watch is not None:
                work.watch(ended.number, ended.output)
            if work.to_frames is not None:
                fetched = jax.device_get(ended.output)
                made = work.to_frames(ended.number, fetched)
                if made is not None:
                    run.take(self.stage, self.first_video, made, fetched)
            elif work.to_host:
                self.outputs[ended.number] = jax.device_get(ended.output)
