"""Runs the stages of a port on one mesh: load, place, compile, call, free."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tpuport.core import checkpoint as checkpoints
from tpuport.core import compile as compiling
from tpuport.core.arrays import to_numpy, torch_dtype
from tpuport.core.module import PortedModule
from tpuport.core.report import CompileReport, Reporter, StageReport
from tpuport.core.rotary import RotaryCache
from tpuport.core.runtime import Runtime
from tpuport.core.sharding import (
    ShardingPlan,
    WeightInfo,
    named_shardings,
    plan_sharding,
)
from tpuport.core.spec import Call, ModelPort, Program, Stage, StageContext, Work
from tpuport.errors import WeightsError

if TYPE_CHECKING:
    from pathlib import Path

    import jax
    import torch

    from tpuport.core.checkpoint import Checkpoint
    from tpuport.core.request import Request

#: Calls dispatched before the oldest is waited for. Unbounded dispatch has cost 20 % on
#: TPU hosts; on the CPU, programs with collectives must not overlap at all.
CALLS_IN_FLIGHT = {"tpu": 4, "gpu": 4, "cpu": 1}


@dataclass
class Loaded:
    """A component with its weights on the devices."""

    ported: PortedModule
    weights: dict[str, jax.Array]
    plan: ShardingPlan
    replicated: jax.sharding.NamedSharding


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
    """Runs stages of ``port`` with the weights of ``checkpoint`` on ``mesh``.

    Args:
        port: the model.
        checkpoint: its files.
        mesh: the devices.
        dtype: of the weights, ``"float32"`` or ``"bfloat16"``.
        attention: the attention implementation, ``"auto"`` or a name.
        keep_loaded: keep weights on the devices between runs.
        reporter: told what happens.
    """

    def __init__(
        self,
        port: ModelPort,
        checkpoint: Checkpoint,
        mesh: jax.sharding.Mesh,
        *,
        dtype: str,
        attention: str = "auto",
        keep_loaded: bool = False,
        reporter: Reporter | None = None,
    ) -> None:
        self.port = port
        self.checkpoint = checkpoint
        self.mesh = mesh
        self.dtype = dtype
        self.keep_loaded = keep_loaded
        self.reporter = reporter or Reporter()
        self.rotary = RotaryCache()
        self._attention = attention
        self._runtimes: dict[bool, Runtime] = {}
        self._skeletons: dict[str, torch.nn.Module] = {}
        self._loaded: dict[str, Loaded] = {}
        self._upstream: dict[tuple[str, str], Any] = {}
        self._compiled: dict[Any, Any] = {}

    @property
    def platform(self) -> str:
        """Where programs run: ``"cpu"``, ``"tpu"`` or ``"gpu"``."""
        return str(self.mesh.devices.flat[0].platform)

    # ------------------------------------------------------------- components

    def skeleton(self, name: str) -> torch.nn.Module:
        """The upstream module of a component, without weights."""
        if name not in self._skeletons:
            component = self.port.components[name]
            self.checkpoint.check_class(name, component.class_path)
            self._skeletons[name] = checkpoints.build_skeleton(
                component, self.checkpoint.config(name)
            )
        return self._skeletons[name]

    def runtime(self, single_device: bool) -> Runtime:
        """The tracing environment of the mesh, or of its first device."""
        if single_device not in self._runtimes:
            mesh = self.mesh
            if single_device:
                import jax

                mesh = jax.sharding.Mesh(
                    mesh.devices.flat[:1].reshape((1,) * mesh.devices.ndim),
                    mesh.axis_names,
                    axis_types=(jax.sharding.AxisType.Auto,) * mesh.devices.ndim,
                )
            self._runtimes[single_device] = Runtime(
                mesh=mesh,
                platform=self.platform,
                patches=self.port.patches,
                overrides=self.port.overrides,
                attention=self.port.attention,
                attention_implementation=self._attention,
                # Float32 weights mean float32 products, on chips whose matrix units
                # would otherwise round their inputs to bfloat16.
                matmul_precision="highest" if self.dtype == "float32" else None,
            )
        return self._runtimes[single_device]

    def plan(self, name: str) -> ShardingPlan:
        """Where the weights of a component go; reads names and shapes only.

        Raises:
            ShardingError: rules and weights disagree.
        """
        component = self.port.components[name]
        module = self.skeleton(name)
        ported = PortedModule(module, self.runtime(component.single_device))
        tensors = dict(module.state_dict(keep_vars=True))
        itemsize = torch_dtype(self.dtype).itemsize
        mesh = ported.runtime.mesh
        assert mesh is not None
        return plan_sharding(
            component.sharding,
            {
                name: WeightInfo(tuple(tensors[name].shape), itemsize)
                for name in ported.names.stored
            },
            dict(mesh.shape),
            component=name,
        )

    def load(self, name: str) -> Loaded:
        """The component with its weights placed; read from disk once until released.

        Tensors stream from the files to their shards one at a time, so the host never
        holds the component whole.

        Raises:
            WeightsError: the files do not fit the config.
            ShardingError: rules and weights disagree.
        """
        if name in self._loaded:
            return self._loaded[name]
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        self.reporter.loading(name)
        component = self.port.components[name]
        module = self.skeleton(name)
        runtime = self.runtime(component.single_device)
        ported = PortedModule(module, runtime)
        assert runtime.mesh is not None
        files, found = self._match(name, ported)
        plan = self.plan(name)
        shardings = named_shardings(plan, runtime.mesh)
        replicated = NamedSharding(runtime.mesh, PartitionSpec())
        tensors = dict(module.named_parameters(remove_duplicate=False))
        tensors.update(module.named_buffers(remove_duplicate=False))
        by_file = {v: k for k, v in found.items() if checkpoints.is_used(component, k)}
        weights: dict[str, jax.Array] = {}
        dtype = torch_dtype(self.dtype)
        for stored, tensor in self.checkpoint.stream(files, list(by_file)):
            target = by_file[stored]
            if tensor.is_floating_point():
                tensor = tensor.to(dtype)
            weights[target] = jax.device_put(
                to_numpy(tensor), shardings[target], may_alias=False
            )
        for buffer in ported.names.computed:
            weights[buffer] = jax.device_put(to_numpy(tensors[buffer]), replicated)
        jax.block_until_ready(weights)
        loaded = Loaded(ported, weights, plan, replicated)
        self._loaded[name] = loaded
        return loaded

    def check_files(self, name: str) -> None:
        """Refuse a component whose files do not fit its config; reads no tensor.

        Raises:
            WeightsError: files, names or shapes are off.
        """
        single_device = self.port.components[name].single_device
        self._match(
            name, PortedModule(self.skeleton(name), self.runtime(single_device))
        )

    def _match(
        self, name: str, ported: PortedModule
    ) -> tuple[dict[str, Path], dict[str, str]]:
        """File of every stored tensor, and the stored name of every weight.

        Raises:
            WeightsError: files, names or shapes are off.
        """
        files = self.checkpoint.weight_files(name)
        found = checkpoints.match_names(
            self.checkpoint.source,
            self.port.components[name],
            ported.module,
            files,
            ported.names.tied,
            ported.names.stored,
        )
        expected = ported.module.state_dict(keep_vars=True)
        shapes = self.checkpoint.shapes(files)
        for weight, stored in found.items():
            if shapes[stored] != tuple(expected[weight].shape):
                raise WeightsError(
                    f"{self.checkpoint.source}: {name}/ holds {stored} of shape "
                    f"{shapes[stored]}; its config.json asks for "
                    f"{tuple(expected[weight].shape)}"
                )
        return files, found

    def release(self, *names: str) -> None:
        """Free the weights of the named components, or of all."""
        for name in names or tuple(self._loaded):
            loaded = self._loaded.pop(name, None)
            if loaded is not None:
                for array in loaded.weights.values():
                    array.delete()

    def close(self) -> None:
        """Free everything this executor holds."""
        self.release()
        self._upstream.clear()
        self._compiled.clear()
        self._skeletons.clear()
        self._runtimes.clear()

    # ----------------------------------------------------------------- stages

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
            checkpoint=self.checkpoint,
            request=request,
            batch=batch,
            inputs=cut,
            dtype=self.dtype,
            rotary=self.rotary,
            module=self.skeleton,
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
                parts.append(self._run_work(stage, work, timing, done, total))
                done += work.total
            plans = tuple(
                self._loaded[name].plan.as_dict()
                for name in stage.components
                if name in self._loaded
            )
            runtimes = {
                self.port.components[name].single_device for name in stage.components
            }
        finally:
            if not self.keep_loaded:
                self.release(*stage.components)
        used = [self._runtimes[key] for key in sorted(runtimes)]
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

    def _run_work(
        self, stage: Stage, work: Work, timing: Timing, done: int, total: int
    ) -> dict[str, Any]:
        """The calls of one batch, a bounded number of them in flight."""
        import jax

        limit = CALLS_IN_FLIGHT.get(self.platform, 1)
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

        for index, call in enumerate(work.calls):
            program = stage.programs[call.program]
            loaded = self._load_timed(program.component, timing)
            if placed_on is None:
                carry, constants = place((work.carry, work.constants), loaded)
                placed_on = loaded.replicated
            inputs = place(call.inputs, loaded)
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

    def _load_timed(self, name: str, timing: Timing) -> Loaded:
        if name in self._loaded:
            return self._loaded[name]
        started = time.perf_counter()
        loaded = self.load(name)
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
