"""Every program that a run would compile, lowered for devices that are not there.

The same stages, modules and ``lower`` that ``generate`` uses, on weights without data:
what is planned is what runs. Each stage's own ``plan`` makes its calls; the tensors
between stages are zeros of the shapes that the programs return.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from tpuport.core.mesh.device_memory import array_bytes
from tpuport.core.programs.components import EVERYTHING, Components, Loaded
from tpuport.core.programs.lowering import Traceable
from tpuport.core.reports import Reporter
from tpuport.core.run.executor import Executor, merge
from tpuport.core.run.stage_calls import Timing, load, walk
from tpuport.core.spec.request import Request
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.spec.stage import Stage
from tpuport.core.spec.tiling import TilingDecision
from tpuport.core.tracing.context import AttentionRecord, ConvolutionRecord
from tpuport.core.tracing.convolution_notes import counted


@dataclass(kw_only=True, eq=False)
class AbstractProgram:
    """One program of a stage for one set of shapes.

    Attributes:
        asked: the program; the weights of its component and its arguments are
            ``ShapeDtypeStruct`` with shardings.
        calls: how often the run calls it, over all batches.
        tiling: how its stage runs, where that has a choice.
        resident: bytes of a device that the stage holds besides: weights of its other
            components, and outputs of other calls that wait for the end.
        needed: bytes of a device that it takes by the compiler; to be set by who
            compiles it.
        attention, convolutions: what its calls run as, once it is traced.
    """

    asked: Traceable
    calls: int = 0
    tiling: TilingDecision | None = None
    resident: int = 0
    needed: int | None = None
    attention: tuple[AttentionRecord, ...] = field(default=(), repr=False)
    convolutions: tuple[ConvolutionRecord, ...] = field(default=(), repr=False)
    _traced: jax.stages.Traced | None = field(default=None, repr=False)
    _lowered: jax.stages.Lowered | None = field(default=None, repr=False)

    @property
    def loaded(self) -> Loaded:
        """The component, without arrays."""
        return self.asked.loaded

    @property
    def weights(self) -> Mapping[str, Any]:
        """The component's weights, as shapes with places."""
        return self.loaded.weights

    @property
    def stage(self) -> str:
        """The stage that it is of."""
        return self.asked.stage

    @property
    def program_name(self) -> str:
        """Its name in the stage."""
        return self.asked.name

    @property
    def component(self) -> str:
        """The component whose weights it takes."""
        return self.asked.program.component

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices that it is for."""
        return self.loaded.replicated.mesh

    def traced(self) -> jax.stages.Traced:
        """Traced, once, whoever asks."""
        if self._traced is None:
            self._traced = self.asked.trace()
            runtime = self.loaded.ported.runtime
            self.attention = tuple(runtime.records)
            self.convolutions = counted(runtime.convolutions)
        return self._traced

    def lowered(self) -> jax.stages.Lowered:
        """Lowered, once: what ``.compile()`` is called on."""
        if self._lowered is None:
            self._lowered = self.traced().lower()
        return self._lowered

    def outputs(self) -> tuple[Any, Any]:
        """Shapes and places of the carry and the output."""
        return self.asked.results(self.traced().out_info)

    def forget(self) -> None:
        """Let go of what was traced and lowered, which of a whole model is large."""
        self._traced = self._lowered = None


class AbstractComponents(Components):
    """Components whose weights have shapes and places, and no data."""

    def load(self, name: str, used: tuple[str, ...] = EVERYTHING) -> Loaded:
        """The component as :meth:`Components.load` places it, without reading files."""
        if (name, used) not in self._loaded:
            self._loaded[name, used] = self.abstract(name, used)
        return self._loaded[name, used]


def abstract_programs(
    components: Components,
    request: Request,
    settings: RunSettings,
    *,
    stages: Sequence[str] | None = None,
    inputs: Mapping[str, Any] | None = None,
    decided: Callable[[TilingDecision], None] | None = None,
    reporter: Reporter | None = None,
) -> Iterator[AbstractProgram]:
    """Every distinct program of a run, in the order in which it would be compiled.

    A stage needs the shapes that the stage before leaves. So earlier stages are traced
    too if only a later stage is asked for; their programs are not handed out.

    The caller compiles a program and sets its ``needed`` before taking the next
    program. If a program of the whole picture takes too much memory, the programs of
    the tiles replace its stage's; see :mod:`tpuport.core.spec.tiling`.

    Args:
        components: whose weights the programs take, for the devices of a topology or
            for real ones; their weights are not read.
        request: the run, checked against the variant.
        settings: how to run; the dtype is known.
        stages: names of the stages to yield; all stages when not given.
        inputs: what the first stage reads: the pixels of an image or a video.
        decided: told how a stage that can run in tiles runs, once its programs were
            taken.
        reporter: told what is traced, and what the plugin's plan says.

    Raises:
        ShardingError: the plugin's rules do not fit the weights and the mesh.
        AttentionError: the named implementation cannot do a call.
    """
    port = components.port
    wanted = [s.name for s in port.stages] if stages is None else list(stages)
    last = max(i for i, s in enumerate(port.stages) if s.name in wanted)
    told = reporter or Reporter()
    settings = replace(settings, keep_loaded=True)
    placed_nowhere = AbstractComponents(
        components.port,
        components.checkpoint,
        components.mesh,
        settings,
        reporter=told,
        skeletons=components.skeletons,
    )
    executor = Executor(placed_nowhere, settings, reporter=told)
    walked = _Walk(executor, request, inputs or {})
    for index, stage in enumerate(port.stages[: last + 1]):
        programs = functools.partial(walked.stage, stage, index < last)
        tiling = executor.tiling(stage, request, alone=True)
        if stage.name not in wanted or tiling is None:
            found = programs(tiling)
            if stage.name in wanted:
                yield from found
        else:
            tiling = yield from weighed(tiling, programs, executor.reporter.say)
            if decided is not None:
                decided(tiling)
        walked.inputs = walked.written


def weighed(
    tiling: TilingDecision,
    programs: Callable[[TilingDecision], Iterable[AbstractProgram]],
    say: Callable[[str], None],
) -> Generator[AbstractProgram, None, TilingDecision]:
    """Hand out the programs of a stage, form by form until one fits.

    Args:
        tiling: how the stage begins.
        programs: in a form.
        say: told why it goes on in tiles.

    Returns:
        how it runs, with what the programs take by ``AbstractProgram.needed``.
    """
    while True:
        other = None
        for program in programs(tiling):
            yield program
            if (program.needed or 0) > (tiling.needed or 0):
                tiling = tiling.weighed(program.needed)
            if (other := tiling.instead()) is not None:
                break
        if other is None:
            return tiling
        say(tiling.passed())
        tiling = other


@dataclass
class _Walk:
    """Goes through the calls of a run without making them.

    Attributes:
        inputs, written: what a stage reads, and what it writes for the next one.
    """

    executor: Executor
    request: Request
    inputs: Mapping[str, Any]
    written: Mapping[str, Any] = field(default_factory=dict)

    def stage(
        self, stage: Stage, finish: bool, tiling: TilingDecision | None
    ) -> list[AbstractProgram]:
        """The distinct programs of a stage; with ``finish`` what it writes, too."""
        programs: dict[Any, AbstractProgram] = {}
        parts = []
        held = 0
        setting = None if tiling is None else tiling.setting

        def results(asked: Traceable) -> tuple[Any, Any]:
            found = programs.setdefault(
                asked.signature, AbstractProgram(asked=asked, tiling=tiling)
            )
            found.calls += 1
            return found.outputs()

        executor, request = self.executor, self.request
        with executor.reporter.timed(f"tracing {stage.name}"):
            for batch in range(request.batches):
                context = executor.context(
                    request, batch, self.inputs, vae_tiling=setting
                )
                work = stage.plan(replace(context, planned=True))
                split, work = executor._cached(stage, work, request, Timing())
                parted = functools.partial(
                    load, executor.components, split, timing=Timing()
                )
                carry, outputs = walk(split, work, parted, results)
                if not work.to_host:
                    held = max(held, sum(map(device_bytes, outputs[:-1])))
                if finish:
                    ends = (_zeros(carry), [_zeros(o) for o in outputs])
                    parts.append(work.finish(*ends))
        loaded = {p.asked.program.component: p.loaded for p in programs.values()}
        for program in programs.values():
            own = program.asked.program.component
            others = [x for n, x in loaded.items() if n != own]
            program.resident = held + sum(device_bytes(x.weights) for x in others)
        if finish:
            self.written = merge(parts)
        return list(programs.values())


def device_bytes(tree: Any) -> int:
    """What placed arrays take on one device."""
    return array_bytes(jax.tree.leaves(tree))


def _zeros(tree: Any) -> Any:
    # Calloc'd: pages that nobody touches take no memory.
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)
