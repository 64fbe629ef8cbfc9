"""Runs the stages of a port on one mesh: load, place, compile, call, free."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tpuport.core import compile as compiling
from tpuport.core.arrays import to_numpy
from tpuport.core.components import EVERYTHING, Components, Loaded
from tpuport.core.report import CompileReport, Reporter, StageReport
from tpuport.core.rotary import RotaryCache
from tpuport.core.spec import Call, Program, Stage, StageContext, Work
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


class Executor:
    """Runs stages with the components of a checkpoint.

    Args:
        components: the weights and where they go.
        keep_loaded: keep weights on the devices between runs.
        reporter: told what happens.
    """

    def __init__(
        self,
        components: Components,
        *,
        keep_loaded: bool = False,
        reporter: Reporter | None = None,
    ) -> None:
        self.components = components
        self.keep_loaded = keep_loaded
        self.reporter = reporter or Reporter()
        self.rotary = RotaryCache()
        self._upstream: dict[tuple[str, str], Any] = {}
        self._compiled: dict[Any, Any] = {}
        # Shapes of the states that step caching keeps, found by tracing once.
        self._structs: dict[Any, Any] = {}

    def close(self) -> None:
        """Free everything this executor holds, the components' weights included."""
        self._upstream.clear()
        self._compiled.clear()
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
                parts.append(self._run_work(run, cached, timing, done, total))
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
        used = list(dict.fromkeys(map(self.components.runtime, names)))
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
            attention=tuple(r.as_dict() for rt in used for r in rt.records),
            patches=tuple(
                entry
                for rt in used
                if rt.patch_report is not None
                for entry in rt.patch_report.as_dict()["patches"]
            ),
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
        return with_step_cache(stage, work, split, cache, model, self._structs)

    def _run_work(
        self, stage: Stage, work: Work, timing: Timing, done: int, total: int
    ) -> dict[str, Any]:
        """The calls of one batch, a bounded number of them in flight."""
        import jax

        limit = CALLS_IN_FLIGHT.get(self.components.platform, 1)
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
            if index == 0:
                for name in work.programs:
                    args = (carry, constants, inputs)
                    self._compile(
                        stage,
                        Call(name, None),
                        stage.programs[name],
                        loaded,
                        args,
                        timing,
                    )
            compiled, fresh = self._compile(
                stage, call, program, loaded, (carry, constants, inputs), timing
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
            outputs.append(output)
            if first:
                settle(0)
                jax.block_until_ready(carry)
                timing.first += time.perf_counter() - called
            else:
                if steady_from is None:
                    steady_from = called
                timing.steady_calls += 1
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

    def _compile(
        self,
        stage: Stage,
        call: Call,
        program: Program,
        loaded: Loaded,
        args: tuple[Any, Any, Any],
        timing: Timing,
    ) -> tuple[Any, float]:
        """The compiled program for these shapes, and the seconds it took just now."""
        import jax

        key = (stage.name, call.program, _signature(args))
        if key in self._compiled:
            return self._compiled[key], 0.0
        self.reporter.compiling(stage.name, call.program)

        def run(
            weights: Any, carry: Any, constants: Any, inputs: Any
        ) -> tuple[Any, Any]:
            return program.fn(loaded.ported.bind(weights), carry, constants, inputs)

        run.__name__ = f"{stage.name}_{call.program}"
        jitted = jax.jit(
            run,
            donate_argnums=(1,) if program.donate else (),
            out_shardings=loaded.replicated,
        )
        hits = compiling.cache_hits()
        started = time.perf_counter()
        lowered = jitted.lower(loaded.weights, *args)
        traced = time.perf_counter()
        compiled = lowered.compile()
        ended = time.perf_counter()
        report = CompileReport(
            stage=stage.name,
            program=call.program,
            trace_seconds=traced - started,
            compile_seconds=ended - traced,
            cached=compiling.cache_hits() > hits,
        )
        timing.compiles.append(report)
        timing.compile += ended - started
        self.reporter.compiled(report)
        self._compiled[key] = compiled
        return compiled, ended - started


def place(tree: Any, loaded: Loaded) -> Any:
    """Every tensor or array of ``tree`` on the devices of ``loaded``, replicated.

    Floating point arrays keep their dtype; see :func:`tpuport.core.arrays.to_numpy`.
    """
    import jax

    return jax.tree.map(
        lambda leaf: jax.device_put(to_numpy(leaf), loaded.replicated), tree
    )


def _signature(args: Any) -> Any:
    """What a compiled program depends on: structure, shapes and dtypes."""
    import jax

    leaves, tree = jax.tree.flatten(args)
    return tree, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


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
