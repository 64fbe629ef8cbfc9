"""Runs the stages of a port on one mesh: load, place, compile, call, free."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tpuport.core.arrays import to_numpy
from tpuport.core.components import EVERYTHING, Components, Loaded
from tpuport.core.programs import Programs, Ready
from tpuport.core.report import CompileReport, Reporter, StageReport
from tpuport.core.rotary import RotaryCache
from tpuport.core.spec import Stage, StageContext, Work
from tpuport.core.step_cache import StepCache, with_step_cache

if TYPE_CHECKING:
    import torch

    from tpuport.core.request import Request

#: Calls dispatched before the oldest is waited for. Unbounded dispatch has cost 20 % on
#: TPU hosts; on the CPU, programs with collectives must not overlap at all.
CALLS_IN_FLIGHT = {"tpu": 4, "gpu": 4, "cpu": 1}


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
    programs: list[Ready] = field(default_factory=list)


class Executor:
    """Runs stages with the components of a checkpoint.

    Args:
        components: the weights and where they go.
        keep_loaded: keep weights on the devices between runs.
        reporter: told what happens.
        programs: makes the compiled programs; without it they are compiled and kept
            for this executor alone.
    """

    def __init__(
        self,
        components: Components,
        *,
        keep_loaded: bool = False,
        reporter: Reporter | None = None,
        programs: Programs | None = None,
    ) -> None:
        self.components = components
        self.keep_loaded = keep_loaded
        self.reporter = reporter or (programs.reporter if programs else Reporter())
        self.rotary = RotaryCache()
        self._upstream: dict[tuple[str, str], Any] = {}
        self.programs = programs or Programs(components, reporter=self.reporter)
        # Shapes of the states that step caching keeps, found by tracing once.
        self._structs: dict[Any, Any] = {}

    def close(self) -> None:
        """Free everything this executor holds, the components' weights included."""
        self._upstream.clear()
        self.programs.clear()
        self._structs.clear()
        self.components.close()

    def context(
        self,
        request: Request,
        batch: int,
        inputs: Mapping[str, torch.Tensor],
        device: str = "cpu",
        timing: Timing | None = None,
    ) -> StageContext:
        """What the functions of a stage see for one batch; ``inputs`` hold all."""
        cut = {name: tensor[request.slice(batch)] for name, tensor in inputs.items()}
        return StageContext(
            checkpoint=self.components.checkpoint,
            request=request,
            batch=batch,
            inputs=cut,
            dtype=self.components.dtype,
            rotary=self.rotary,
            module=self.components.skeleton,
            device=device,
            say=self.reporter.say,
            upstream=lambda name, load: self._load_upstream(
                name, device, load, timing or Timing()
            ),
        )

    def _load_upstream(
        self, name: str, device: str, load: Callable[[], Any], timing: Timing
    ) -> Any:
        """A component as upstream's own object, kept when weights are."""
        key = (name, device)
        if key in self._upstream:
            return self._upstream[key]
        self.reporter.loading(name)
        started = time.perf_counter()
        loaded = load()
        timing.load += time.perf_counter() - started
        if self.keep_loaded:
            self._upstream[key] = loaded
        return loaded

    def run(
        self, stage: Stage, request: Request, inputs: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, Any], StageReport]:
        """Run a stage over all batches of a request.

        Returns:
            The stage's tensors with all videos in the leading dim, and what it took.
        """
        self.programs.check_request(request)
        started = time.perf_counter()
        timing = Timing()
        parts: list[dict[str, Any]] = []
        try:
            works = [
                stage.plan(self.context(request, batch, inputs))
                for batch in range(request.batches)
            ]
            total = sum(work.total for work in works)
            self.reporter.stage_started(stage.name, total, stage.unit)
            done = 0
            for work in works:
                run, cached = self._cached(stage, work, request, timing)
                parts.append(self._run_work(run, cached, request, timing, done, total))
                done += work.total
            names = stage.components_for(request)
            plans = tuple(
                self.components.plan(name).as_dict()
                for name in names
                if name in self.components.loaded
            )
        finally:
            if not self.keep_loaded:
                self.components.release(*stage.components)
        report = StageReport(
            stage=stage.name,
            backend="tpuport",
            unit=stage.unit,
            total_seconds=time.perf_counter() - started,
            load_seconds=timing.load,
            compiles=tuple(timing.compiles),
            compile_seconds=timing.compile,
            first_call_seconds=timing.first,
            steady_calls=timing.steady_calls,
            steady_seconds=timing.steady,
            sharding=plans,
            calls_in_flight=timing.in_flight,
            calls_in_flight_limit=self.calls_in_flight_limit,
            attention=_once(r for p in timing.programs for r in p.traced.attention),
            patches=_once(r for p in timing.programs for r in p.traced.patches),
        )
        self.reporter.stage_finished(report)
        return merge(parts), report

    def run_upstream(
        self,
        stage: Stage,
        request: Request,
        inputs: Mapping[str, torch.Tensor],
        device: str,
    ) -> tuple[dict[str, Any], StageReport]:
        """Run a stage with plain upstream code on ``device``."""
        started = time.perf_counter()
        timing = Timing()
        self.reporter.stage_started(stage.name, request.batches, "batch")
        parts = []
        for batch in range(request.batches):
            context = self.context(request, batch, inputs, device=device, timing=timing)
            parts.append(stage.upstream(context))
            self.reporter.advanced(stage.name, batch + 1, request.batches)
        report = StageReport(
            stage=stage.name,
            backend="diffusers",
            unit=stage.unit,
            total_seconds=time.perf_counter() - started,
            load_seconds=timing.load,
        )
        self.reporter.stage_finished(report)
        return merge(parts), report

    def _cached(
        self, stage: Stage, work: Work, request: Request, timing: Timing
    ) -> tuple[Stage, Work]:
        """The work with the request's step cache, in the stage that can be cut."""
        cache = StepCache.parse(request.step_cache)
        named = {program.component for program in stage.programs.values()}
        splits = {n: self.components.port.components[n].split for n in sorted(named)}
        name, split = next(((n, s) for n, s in splits.items() if s), (None, None))
        if cache is None or name is None or split is None:
            return stage, work
        loaded = self._load_timed(stage, name, timing)
        model = loaded.ported.bind(loaded.weights)
        shapes = self.programs.kept_shapes(self._structs, stage, loaded, request)
        made = with_step_cache(stage, work, split, cache, model, shapes)
        self._structs.update(shapes)
        return made

    @property
    def calls_in_flight_limit(self) -> int:
        """How many calls may be dispatched and not yet waited for."""
        return CALLS_IN_FLIGHT.get(self.components.platform, 1)

    def _run_work(
        self,
        stage: Stage,
        work: Work,
        request: Request,
        timing: Timing,
        done: int,
        total: int,
    ) -> dict[str, Any]:
        """The calls of one batch, a bounded number of them in flight."""
        import jax

        limit = self.calls_in_flight_limit
        pending: deque[tuple[int, Any]] = deque()
        outputs: list[Any] = []
        carry = constants = None
        placed_on: Any = None
        steady_from: float | None = None

        def settle(keep: int) -> None:
            while len(pending) > keep:
                index, output = pending.popleft()
                jax.block_until_ready(output)
                if work.watch is not None:
                    work.watch(index, output)
                if work.to_host:
                    outputs[index] = jax.device_get(output)

        for index, call in enumerate(work.calls):
            program = stage.programs[call.program]
            loaded = self._load_timed(stage, program.component, timing)
            if placed_on is None:
                carry, constants = place((work.carry, work.constants), loaded)
                placed_on = loaded.replicated
            inputs = place(call.inputs, loaded)
            args = (carry, constants, inputs)
            if index == 0:
                for name in work.programs:
                    self._ready(stage, name, loaded, args, request, timing)
            compiled, fresh = self._ready(
                stage, call.program, loaded, args, request, timing
            )
            if fresh and steady_from is not None:
                # A new program in mid-stage: what ran so far is settled first, so
                # that its time is not counted as this program's first call.
                settle(0)
                timing.steady += time.perf_counter() - steady_from - fresh
                steady_from = None
            first = fresh > 0 or (index == 0 and done == 0)
            called = time.perf_counter()
            carry, output = compiled(loaded.weights, carry, constants, inputs)
            pending.append((index, output))
            timing.in_flight = max(timing.in_flight, len(pending))
            outputs.append(output)
            if first:
                settle(0)
                jax.block_until_ready(carry)
                timing.first += time.perf_counter() - called
            else:
                if steady_from is None:
                    steady_from = called
                timing.steady_calls += 1
                if len(pending) == limit and not jax.tree.leaves(pending[0][1]):
                    # A call without an output is waited for by its carry, and of
                    # those only the last is left: the others were donated.
                    jax.block_until_ready(carry)
                    settle(0)
                settle(limit - 1)
            self.reporter.advanced(stage.name, done + index + 1, total)
        settle(0)
        jax.block_until_ready(carry)
        if steady_from is not None:
            timing.steady += time.perf_counter() - steady_from
        return work.finish(carry, outputs)

    def _load_timed(self, stage: Stage, name: str, timing: Timing) -> Loaded:
        started = time.perf_counter()
        loaded = self.components.load(name, stage.loads.get(name, EVERYTHING))
        timing.load += time.perf_counter() - started
        return loaded

    def _ready(
        self,
        stage: Stage,
        name: str,
        loaded: Loaded,
        args: tuple[Any, Any, Any],
        request: Request,
        timing: Timing,
    ) -> tuple[Any, float]:
        """The program for these shapes, and the seconds it took to get it just now."""
        started = time.perf_counter()
        ready, report = self.programs.get(
            stage.name, name, stage.programs[name], loaded, args, request
        )
        if ready not in timing.programs:
            timing.programs.append(ready)
        if report is None:
            return ready.call, 0.0
        seconds = time.perf_counter() - started
        timing.compiles.append(report)
        timing.compile += seconds
        return ready.call, seconds


def _once(entries: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The entries in order, each once."""
    found: list[dict[str, Any]] = []
    for entry in entries:
        if entry not in found:
            found.append(entry)
    return tuple(found)


def place(tree: Any, loaded: Loaded) -> Any:
    """Every tensor or array of ``tree`` on the devices of ``loaded``, replicated.

    Floating point arrays keep their dtype; see :func:`tpuport.core.arrays.to_numpy`.
    """
    import jax

    return jax.tree.map(
        lambda leaf: jax.device_put(to_numpy(leaf), loaded.replicated), tree
    )


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the tensors of batches along the leading dim."""
    import numpy as np
    import torch

    merged: dict[str, Any] = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if isinstance(values[0], torch.Tensor):
            merged[name] = torch.cat(values)
        else:
            merged[name] = np.concatenate(values)
    return merged
