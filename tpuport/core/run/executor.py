"""Runs the stages of a port on one mesh: load, place, compile, call, free."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tpuport.core.enums import Backend, Pixels, Tiling
from tpuport.core.mesh.device_memory import planned_bytes, program_room
from tpuport.core.programs.components import Components
from tpuport.core.programs.jax_cache import persistent_cache
from tpuport.core.programs.program_store import Programs
from tpuport.core.reports import Reporter, StageReport
from tpuport.core.run.frame_delivery import Delivery
from tpuport.core.run.memory_report import MemoryLog
from tpuport.core.run.profile import SteadyTrace
from tpuport.core.run.stage_calls import StageRun, Timing, load
from tpuport.core.run.step_caching import with_step_cache
from tpuport.core.spec.request import Request
from tpuport.core.spec.run_settings import PROFILED_CALLS, RunSettings
from tpuport.core.spec.stage import Stage
from tpuport.core.spec.stage_work import StageContext, Work
from tpuport.core.spec.tiling import TilingDecision
from tpuport.core.tracing.ported_module import BoundModule

#: Calls dispatched before the oldest is waited for. Unbounded dispatch has cost 20 % on
#: TPU hosts; on the CPU, programs with collectives must not overlap at all.
CALLS_IN_FLIGHT = {"tpu": 4, "gpu": 4, "cpu": 1}

_OP_BY_OP = "op by op (--no-jit): nothing is compiled, to debug; it is much slower"


class Executor:
    """Runs stages with the components of a checkpoint.

    Args:
        components: the weights and where they go.
        settings: whether weights stay on the devices between runs, whether decode runs
            in tiles, and what the stages are looked at with.
        reporter: told what happens.
        programs: makes the compiled programs; without it they are compiled and kept
            for this executor alone.
    """

    def __init__(
        self,
        components: Components,
        settings: RunSettings,
        *,
        reporter: Reporter | None = None,
        programs: Programs | None = None,
    ) -> None:
        self.settings = settings
        self.components = components
        self.reporter = reporter or (programs.reporter if programs else Reporter())
        self.programs = programs or Programs(components, reporter=self.reporter)
        self._upstream: dict[tuple[str, str], Any] = {}
        self._memory = MemoryLog(components.mesh.devices.flat)
        # Shapes of the states that step caching keeps, found by tracing once.
        self._structs: dict[Any, Any] = {}
        self._cut: list[str] = []

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
        *,
        pixels: Pixels = Pixels.UINT8,
        vae_tiling: Tiling | None = None,
        **fields: Any,
    ) -> StageContext:
        """What the functions of a stage see for one batch.

        Args:
            inputs: of all batches.
            pixels: of decode. By default those of the command line, which is what
                ``plan`` and ``compile`` make ready.
            vae_tiling: in place of the executor's own.
            fields: others of :class:`StageContext`.
        """
        cut = {name: tensor[request.slice(batch)] for name, tensor in inputs.items()}
        return StageContext(
            checkpoint=self.components.checkpoint,
            request=request,
            batch=batch,
            inputs=cut,
            dtype=self.components.dtype,
            module=self.components.skeleton,
            say=self._warned,
            pixels=pixels,
            vae_tiling=vae_tiling or self.settings.vae_tiling,
            **fields,
        )

    def room(self, stage: Stage, *, alone: bool = False) -> int | None:
        """Bytes of a device that a stage's programs may take; ``None`` if unknown.

        Args:
            alone: leave out what other components hold of the devices by now.
        """
        held, own = self.components.held_bytes(stage.components)
        devices = list(self.components.mesh.devices.flat)
        return program_room(devices, 0 if alone else held, own)

    def _warned(self, text: str) -> None:
        """Say what is lost of a prompt; the report tells in short what is cut off."""
        self.reporter.say(text)
        if text.startswith("warning: "):
            self._cut.append(text.removeprefix("warning: ").partition(";")[0])

    def _say_tiling(self, tiling: TilingDecision) -> None:
        """Tiles make another video; the whole picture is what everybody expects."""
        if tiling.tiled or tiling.asked == Tiling.ON:
            self.reporter.say(tiling.line())

    def tiling(
        self,
        stage: Stage,
        request: Request,
        asked: Tiling | None = None,
        *,
        alone: bool = False,
    ) -> TilingDecision | None:
        """How a stage begins: with ``auto`` untiled, unless executables that are there
        say otherwise; ``None`` where it has no such choice.

        Args:
            asked: in place of the executor's own setting.
            alone: leave out what other components hold of the devices by now.
        """
        if stage.tiles is None:
            return None
        asked = asked or self.settings.vae_tiling
        limit = None
        if stage.name not in self.settings.no_jit:
            limit = self.room(stage, alone=alone)
        tiles = stage.tiles(self.context(request, 0, {}, vae_tiling=asked))
        built = self.programs.built
        given = built.tiling(stage.name) if built and asked == Tiling.AUTO else None
        return TilingDecision(
            stage=stage.name,
            asked=asked,
            tiles=tiles,
            tiled=bool(tiles) and (given or asked) == Tiling.ON,
            given=given is not None,
            limit=limit,
        )

    def check_built(
        self,
        request: Request,
        stages: Iterable[Stage],
        vae_tiling: Tiling | None = None,
    ) -> None:
        """Refuse executables that were compiled for other runs, if some are to be used.

        Args:
            stages: that will run.
            vae_tiling: in place of the executor's own setting.

        Raises:
            ArtifactError: what differs.
        """
        if self.programs.built is None:
            return
        compiled = [s for s in stages if s.name not in self.settings.no_jit]
        tilings = [self.tiling(s, request, vae_tiling, alone=True) for s in compiled]
        self.programs.built.check_request(
            request,
            self.components.port,
            [stage.name for stage in compiled],
            [tiling for tiling in tilings if tiling is not None],
        )

    def run(
        self,
        stage: Stage,
        request: Request,
        inputs: Mapping[str, torch.Tensor],
        delivery: Delivery | None = None,
        vae_tiling: Tiling | None = None,
    ) -> tuple[dict[str, Any], StageReport]:
        """Run a stage over all batches of a request.

        Args:
            delivery: takes the frames of a stage that makes some; without it they are
                collected as float32. Its checks are for the caller to ask for.
            vae_tiling: in place of the executor's own setting.

        Returns:
            The stage's tensors with all videos in the leading dim, and what it took.
            Frames that a sink took are not among them.
        """
        settings = self.settings
        op_by_op = stage.name in settings.no_jit
        if op_by_op:
            self.reporter.say(f"{stage.name} runs {_OP_BY_OP}")
        else:
            self.check_built(request, [stage], vae_tiling)
        started = time.perf_counter()
        self._cut = []
        trace = SteadyTrace(
            stage.name, settings.profile, settings.profile_calls or PROFILED_CALLS
        )
        self._memory.begins(request, stage.name, stage.unit)
        run = StageRun(
            components=self.components,
            programs=None if op_by_op else self.programs,
            reporter=self.reporter,
            request=request,
            limit=CALLS_IN_FLIGHT.get(self.components.platform, 1),
            delivery=delivery or Delivery(),
            memory=self._memory if settings.memory_report else None,
            trace=trace,
            room=None if stage.tiles or op_by_op else self.room(stage),
        )
        try:
            tiling = self.tiling(stage, request, vae_tiling)
            with self.reporter.watched(), persistent_cache(self.programs.jax_folder):
                tensors, tiling = self._run_batches(run, stage, inputs, tiling)
            used = stage.components_for(request)
            loaded = [name for name in used if name in self.components.loaded]
            plans = tuple(self.components.plan(name).as_dict() for name in loaded)
        except BaseException as error:
            if text := self._memory.text():
                error.add_note(text)
            self._memory.clear()
            raise
        finally:
            trace.stop()
            if not settings.keep_loaded:
                self.components.release(*stage.components)
        memory = self._memory.calls(stage.name)
        if stage is self.components.port.stages[-1]:
            self._memory.clear()
        if line := trace.line(stage.unit):
            self.reporter.say(line)
        report = StageReport(
            stage=stage.name,
            backend=Backend.TPUPORT,
            unit=stage.unit,
            total_seconds=time.perf_counter() - started,
            sharding=plans,
            calls_in_flight_limit=run.limit,
            op_by_op=op_by_op,
            memory=memory,
            profile=trace.result(),
            tiling=tiling.as_dict() if tiling is not None else None,
            cut=tuple(self._cut),
            **run.timing.as_dict(),
        )
        self.reporter.stage_finished(report)
        return tensors, report

    def _run_batches(
        self,
        run: StageRun,
        stage: Stage,
        inputs: Mapping[str, torch.Tensor],
        tiling: TilingDecision | None,
    ) -> tuple[dict[str, Any], TilingDecision | None]:
        """Run all batches.

        Returns:
            The tensors, and how the stage ran, with what its programs take of a device.
        """
        request = run.request

        def plan(batch: int, tiling: TilingDecision | None) -> Work:
            setting = None if tiling is None else tiling.setting
            pixels = run.delivery.pixels
            return stage.plan(
                self.context(request, batch, inputs, pixels=pixels, vae_tiling=setting)
            )

        batches = range(request.batches)
        works = [plan(batch, tiling) for batch in batches]
        total = sum(work.total for work in works)
        self.reporter.stage_started(stage.name, total, stage.unit)
        if tiling is not None and tiling.room is not None:
            tiling = self._fit(run, stage, tiling, lambda form: plan(0, form))
            # Fitting went through calls, maybe of the other form.
            works = [plan(batch, tiling) for batch in batches]
        run.total = sum(work.total for work in works)
        if tiling is not None:
            self._say_tiling(tiling)
        parts = []
        for batch, work in enumerate(works):
            cut, cached = self._cached(stage, work, request, run.timing)
            parts.append(run.batch(cut, cached, request.slice(batch).start))
        if tiling is not None:
            sizes = (planned_bytes(p.call) for p in run.timing.programs.values())
            known = (size for size in sizes if size is not None)
            tiling = tiling.weighed(max(known, default=None))
        return merge(parts), tiling

    def _fit(
        self,
        run: StageRun,
        stage: Stage,
        tiling: TilingDecision,
        plan: Callable[[TilingDecision], Work],
    ) -> TilingDecision:
        """The form that fits, by what the compiler says of its programs.

        Raises:
            DoesNotFitError: there is none.
        """
        while True:
            assert tiling.room is not None
            began = time.perf_counter()
            tiling = tiling.weighed(run.largest(stage, plan(tiling), tiling.room))
            other = tiling.instead(time.perf_counter() - began)
            if other is None:
                break
            self.reporter.say(tiling.passed())
            # Of what was passed over only loading counts: the weights stay.
            run.timing, tiling = Timing(load=run.timing.load), other
        if not tiling.fits:
            raise tiling.refusal()
        return tiling

    def run_upstream(
        self,
        stage: Stage,
        request: Request,
        inputs: Mapping[str, torch.Tensor],
        device: str,
        delivery: Delivery | None = None,
        vae_tiling: Tiling | None = None,
    ) -> tuple[dict[str, Any], StageReport]:
        """Run a stage with plain upstream code on ``device``; else as :meth:`run`."""
        delivery = delivery or Delivery()
        self._say_not_inspected(stage)
        started = time.perf_counter()
        self._cut = []
        load_seconds = 0.0

        def component(name: str, load: Callable[[], Any]) -> Any:
            """A component as upstream's own object, kept when weights are."""
            nonlocal load_seconds
            if (name, device) in self._upstream:
                return self._upstream[name, device]
            self.reporter.loading(name)
            began = time.perf_counter()
            loaded = load()
            load_seconds += time.perf_counter() - began
            if self.settings.keep_loaded:
                self._upstream[name, device] = loaded
            return loaded

        tiling = self.tiling(stage, request, vae_tiling)
        if tiling is not None:
            self._say_tiling(tiling)
            vae_tiling = tiling.setting
        self.reporter.stage_started(stage.name, request.batches, "batch")
        parts = []
        for batch in range(request.batches):
            context = self.context(
                request,
                batch,
                inputs,
                device=device,
                vae_tiling=vae_tiling,
                upstream=component,
            )
            part = stage.upstream(context)
            if "frames" in part:
                delivery.take(request.slice(batch).start, part.pop("frames"))
                part |= delivery.collected()
            parts.append(part)
            self.reporter.advanced(stage.name, batch + 1, request.batches)
        report = StageReport(
            stage=stage.name,
            backend=Backend.DIFFUSERS,
            unit=stage.unit,
            total_seconds=time.perf_counter() - started,
            load_seconds=load_seconds,
            cut=tuple(self._cut),
            tiling=tiling.as_dict() if tiling is not None else None,
        )
        self.reporter.stage_finished(report)
        return merge(parts), report

    def _say_not_inspected(self, stage: Stage) -> None:
        """Nothing that is asked for is left undone without a word."""
        runs = f"{stage.name} runs upstream's code"
        if self.settings.memory_report:
            self.reporter.say(f"{runs}: --memory-report has nothing on it")
        if self.settings.profile is not None:
            self.reporter.say(f"{runs}: it is not profiled")
        if stage.name in self.settings.no_jit:
            self.reporter.say(f"{runs}, op by op as ever: --no-jit changes nothing")

    def _cached(
        self, stage: Stage, work: Work, request: Request, timing: Timing
    ) -> tuple[Stage, Work]:
        """The work with the request's step cache, in the stage that can be cut."""
        cache = request.step_cache
        if cache is None:
            return stage, work
        for name in sorted({p.component for p in stage.programs.values()}):
            split = self.components.port.components[name].split
            if split is not None:
                loaded = load(self.components, stage, name, timing)
                model = loaded.ported.bind(loaded.weights)
                # Only upstream's class can be cut: see ``with_chosen``.
                assert isinstance(model, BoundModule)
                return with_step_cache(stage, work, split, cache, model, self._structs)
        return stage, work


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the tensors of batches along the leading dim."""
    return {
        name: (torch.cat if isinstance(first, torch.Tensor) else np.concatenate)(
            [part[name] for part in parts]
        )
        for name, first in parts[0].items()
    }
