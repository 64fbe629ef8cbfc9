"""A pipeline's run without weights and without devices: every program, and its calls.

Upstream's code drives as ever. Its modules are built from their configs, a call is
traced on shapes and answered with zeros. What is rehearsed is what runs.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from statistics import median
from typing import Any

import jax
import torch
import transformers
from accelerate import init_empty_weights

from tpuport.core.arrays import torch_dtype
from tpuport.core.drive.driving import Drive, driving
from tpuport.core.drive.step_caches import standing, step_caches
from tpuport.core.drive.tape import StageEnd
from tpuport.core.enums import Backend, Blocks, StageName
from tpuport.core.mesh.compiler_flags import ChosenFlags, flags_for
from tpuport.core.mesh.device_memory import array_bytes
from tpuport.core.pipelines.call_arguments import size_of
from tpuport.core.pipelines.folder import PipelineFolder, is_a
from tpuport.core.programs.jax_cache import lowered
from tpuport.core.programs.program_key import WHOLE, ProgramKey, module_key
from tpuport.core.reports import CompileReport, Reporter
from tpuport.core.seam.device_tensors import DeviceTensor
from tpuport.core.seam.devices import Devices, TracedProgram
from tpuport.core.seam.entry import Entry, PortError
from tpuport.core.seam.ported import modules_of
from tpuport.core.seam.program_runs import Program
from tpuport.core.seam.seam import Seam
from tpuport.core.seam.target import Target
from tpuport.core.spec.step_cache import StepCache
from tpuport.core.weights.configs import building
from tpuport.core.weights.sharding import ShardingPlan


@dataclass(kw_only=True, eq=False)
class Rehearsed(TracedProgram):
    """One program of a run, traced for devices that are not there.

    Attributes:
        inputs: dtypes and shapes, such as ``"bfloat16[1,512,4096]"``.
        resident: bytes of weights of other modules on a device beside it.
        by_stage: how often upstream calls it in each stage.
    """

    mesh: jax.sharding.Mesh
    inputs: tuple[str, ...]
    resident: int = 0
    by_stage: Counter[StageName] = field(default_factory=Counter)
    _lowered: jax.stages.Lowered | None = field(default=None, repr=False)

    @property
    def stage(self) -> StageName:
        """The stage that calls it most."""
        return max(self.by_stage, key=lambda stage: self.by_stage[stage])

    @property
    def calls(self) -> int:
        """How often the run calls it."""
        return sum(self.by_stage.values())

    @property
    def component(self) -> str:
        """The component of the pipeline."""
        return self.name.partition(".")[0]

    @property
    def flags(self) -> ChosenFlags:
        """What tpuport sets of the compiler's flags for it."""
        return flags_for(self.mesh.devices.flat[0], *self.stages)

    def lowered(self) -> jax.stages.Lowered:
        """What ``.compile()`` is called on."""
        if self._lowered is None:
            self._lowered = lowered(self.traced)
        return self._lowered

    def key(self) -> ProgramKey:
        program = self.lowered()
        return module_key(
            self.name, self.module, self.mesh, self.weights, program, self.stages
        )

    def forget(self) -> None:
        """Let go of what was traced, which of a whole model is large."""
        self._lowered = None
        del self.traced


class _Absent(Devices):
    """Devices that are not there: calls are answered with shapes, and counted by stage.

    Attributes:
        programs: all of them, also those that a later call made useless.
    """

    def __init__(self, stage: Callable[[], StageName], target: Target) -> None:
        super().__init__(target)
        self._stage = stage
        self.programs: list[Rehearsed] = []

    def compiled(
        self, program: TracedProgram, seconds: float
    ) -> tuple[Callable[..., Any], CompileReport]:
        given = program.traced.jaxpr.in_avals[len(program.weights) :]
        found = Rehearsed(
            **{f.name: getattr(program, f.name) for f in fields(TracedProgram)},
            mesh=self.target.mesh,
            inputs=tuple(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in given),
        )
        self.programs.append(found)

        def run(*given: Any) -> Any:
            found.by_stage[self._stage()] += 1
            return found.traced.out_info

        return run, CompileReport(
            stage=found.component,
            program=program.name.partition(".")[2] or WHOLE,
            trace_seconds=seconds,
            compile_seconds=0.0,
            cached=False,
        )

    def read(self, array: Any) -> torch.Tensor:
        return torch.zeros(array.shape, dtype=torch_dtype(str(array.dtype)))

    def moved(self, array: Any, sharding: Any) -> Any:
        return array

    def weights(self, ported: Any, structs: Any, read: Any, *, ahead: bool) -> Any:
        return structs

    def _fitted(self, array: Any, real: Any, place: Any) -> Any:
        return array

    def _put(self, tensor: torch.Tensor, place: jax.ShapeDtypeStruct) -> Any:
        # Another one for each tensor: two calls of a step are told apart by that.
        return place.update()


class _OnHost(Entry):
    """A module of a component that upstream's own code runs.

    Tracing tells the shapes of the answers in no time. What cannot be traced runs.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except PortError:
            return self._forward(*args, **kwargs)

    def _results(
        self, program: Program, arrays: Iterable[Any] | None = None
    ) -> list[DeviceTensor]:
        found = super()._results(program, arrays)
        for one in found:
            one.arithmetic = None  # what upstream's code answers is on the host
        return found

    def _check_mesh(self, program: Program) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a run of a pipeline would do.

    Attributes:
        programs: all of them, in the order of their first calls.
        steps: how often ``scheduler.step`` was called.
        plans: where the weights of the modules that were called go.
        blocks: those in place.
        host_seconds: of a step on this machine, outside of programs: upstream's code,
            the scheduler's, and the port's. The middle of all steps but the first.
        held: bytes of weights of each module that stay on a device; modules that do not
            fit together take turns.
        may_stream: components with weights on the devices that may wait on the host.
        streamed: bytes of weights of each module that wait on the host.
        size: frames, height and width by upstream's names, its defaults among them.
    """

    programs: tuple[Rehearsed, ...]
    steps: int
    plans: tuple[ShardingPlan, ...]
    blocks: Blocks
    host_seconds: float | None
    held: Mapping[str, int]
    may_stream: frozenset[str] = frozenset()
    streamed: Mapping[str, int] = field(default_factory=dict)
    size: Mapping[str, int] = field(default_factory=dict)

    def in_stages(self, stages: Collection[str]) -> list[Rehearsed]:
        """The programs that some stages call, beside the weights of these stages.

        Each stage may be a run of its own, which reads the weights that it calls.
        """
        found = [one for one in self.programs if one.by_stage.keys() & set(stages)]
        held = sum(self.held.get(name, 0) for name in {one.name for one in found})
        for one in found:
            own = array_bytes(jax.tree.leaves(one.weights))
            one.resident = max(held - own, 0)
        return found


def without_weights(
    folder: PipelineFolder, dtype: torch.dtype, fill: float = 0.0
) -> Any:
    """The pipeline with modules that have shapes and no weights.

    Buffers are computed as upstream computes them, and parameters have the dtypes that
    upstream loads them in.

    Args:
        fill: the value of all parameters.

    Raises:
        WeightsError: a config does not build its class.
    """
    folder.check_parts()
    parts: dict[str, Any] = {}
    for name in folder.components():
        cls: Any = folder.component_class(name)
        place = folder.folder / name
        if not is_a(cls, torch.nn.Module):
            with building(cls.__name__, f"{name}/"):
                parts[name] = folder.part(name, dtype)
            continue
        with (
            building(cls.__name__, f"{name}/config.json"),
            init_empty_weights(include_buffers=False),
            _default(dtype),
        ):
            module: Any
            if hasattr(cls, "load_config"):
                module = cls.from_config(cls.load_config(place, local_files_only=True))
            else:
                module = cls(cls.config_class.from_pretrained(place))
        if hasattr(module, "tie_weights"):
            module.tie_weights()
        parts[name] = _weightless(module, dtype, fill)
    return folder.adjusted(folder.put_together(parts))


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """``dtype`` for new tensors, as upstream has it while a module is built."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _weightless(
    module: torch.nn.Module, dtype: torch.dtype, fill: float
) -> torch.nn.Module:
    """``module`` with one number in place of each parameter, in ``dtype``.

    The parameters are on the CPU, where pipelines look for their device. What upstream
    keeps in float32 with ``from_pretrained(torch_dtype=...)`` is in float32.
    """
    kept = _in_full(module, dtype)
    made: dict[int, torch.nn.Parameter] = {}
    for path, child in module.named_modules():
        for tensors in (child._parameters, child._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                wanted = tensor.dtype
                computed = name in child._non_persistent_buffers_set
                if wanted.is_floating_point and not computed:
                    in_full = kept & {*path.split("."), name}
                    wanted = torch.float32 if in_full else dtype
                if not tensor.is_meta:
                    tensors[name] = tensor.to(wanted)
                    continue
                if id(tensor) not in made:
                    value = fill if wanted.is_floating_point else 0
                    one = torch.full((), value, dtype=wanted).expand(tensor.shape)
                    made[id(tensor)] = torch.nn.Parameter(one, requires_grad=False)
                tensors[name] = made[id(tensor)]
    return module.eval()


def _in_full(module: torch.nn.Module, dtype: torch.dtype) -> set[str]:
    """Names of the parts that upstream keeps in float32 when it loads in ``dtype``.

    transformers 5 keeps ``_keep_in_fp32_modules`` for float16 alone.
    """
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    if not isinstance(module, transformers.PreTrainedModel):
        return kept
    strict = set(module._keep_in_fp32_modules_strict or ())
    halves = {torch.float16: kept | strict, torch.bfloat16: strict}
    return halves.get(dtype, set())


def rehearse(
    pipeline: Any,
    target: Target,
    arguments: Mapping[str, Any],
    reporter: Reporter,
    on_host: Collection[str] = (),
    cache: StepCache | None = None,
    *,
    first_step: bool = False,
    first_call: bool = False,
) -> Rehearsal:
    """Drive ``pipeline`` once with made-up answers.

    Args:
        pipeline: from :func:`without_weights`.
        target: for real devices, or for those of a topology.
        arguments: keywords of the call, the prompt included.
        on_host: components that run by upstream's code, and so have no programs.
        cache: of steps; a denoiser has two programs then.
        first_step: end after the first ``scheduler.step``.
        first_call: end before the first call that the cache is for.

    Raises:
        StepCacheError: there is no such cache for the pipeline.
        TpuportError: a module cannot become a program.
    """

    def reached() -> None:
        raise StageEnd

    modules = modules_of(pipeline)
    drive: Drive | None = None

    def stage() -> StageName:
        return (drive and drive.stage) or StageName.ENCODE

    def answering(module: torch.nn.Module, forward: Any, name: str, *rest: Any) -> Any:
        kind = _OnHost if name.partition(".")[0] in on_host else Entry
        return kind(module, forward, name, *rest)

    devices = _Absent(stage, target)
    with contextlib.ExitStack() as stack:
        caches = None if cache is None else step_caches(pipeline, cache, target)
        if caches is not None:
            stack.enter_context(standing(caches.modules.values()))
            if first_call:
                caches.on_call = reached
        seam = Seam(modules, target, reporter, answering, lambda _: devices)
        stack.callback(seam.close)
        drive = stack.enter_context(driving(pipeline, seam.journal, Backend.TPUPORT))
        drive.caches = caches
        if first_step:
            drive.on_step = reached
        size = stack.enter_context(_size_of(pipeline, arguments))
        with contextlib.suppress(StageEnd):
            output = pipeline(**arguments)
            seam.arithmetic.compute()  # of what a run reads: its output
            del output
        between = [end - begin for begin, end in pairwise(drive.steps)]
        entries = [e for e in seam.entries.values() if type(e) is Entry]
        programs = [p for p in devices.programs if p.component not in on_host]
        # What lies between the calls comes after them.
        programs.sort(key=lambda program: program.module is None)
        plans = [entry.plan for entry in entries if entry.plan is not None]
        held = {e.name: e.bytes_per_device for e in entries if e.placed}
        return Rehearsal(
            programs=tuple(programs),
            steps=drive.made,
            plans=tuple(plans),
            blocks=target.blocks,
            host_seconds=median(between) if between else None,
            held=held,
            size=size,
            **_streams(entries),
        )


@contextlib.contextmanager
def _size_of(pipeline: Any, arguments: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """Frames, height and width of a call: what is given, else upstream's defaults.

    A default that a pipeline computes is known once its ``check_inputs`` is given it.
    ``check_inputs`` of CogVideoX takes no frames: those are of the denoiser's config.
    """
    takes = inspect.signature(pipeline.__call__).parameters
    denoiser = getattr(pipeline, "transformer", None)
    frames = getattr(getattr(denoiser, "config", None), "sample_frames", None)
    found = size_of({"num_frames": frames} if "num_frames" in takes else {})
    found |= size_of({name: one.default for name, one in takes.items()})
    found |= size_of(arguments)
    check = getattr(pipeline, "check_inputs", None)
    if check is None:
        yield found
        return

    def noted(*args: Any, **kwargs: Any) -> Any:
        found.update(size_of(inspect.signature(check).bind(*args, **kwargs).arguments))
        return check(*args, **kwargs)

    pipeline.check_inputs = noted
    try:
        yield found
    finally:
        del pipeline.check_inputs


def _streams(entries: Iterable[Entry]) -> dict[str, Any]:
    """The fields of a rehearsal on weights that wait on the host, or may."""
    waiting = [e for e in entries if e.waiting and e.plan]
    streamed = [e for e in waiting if e.plan and e.plan.streamed]
    left = {e.name.partition(".")[0] for e in waiting if e not in streamed}
    return {
        "may_stream": frozenset(left),
        "streamed": {e.name: sum(e.waiting.values()) for e in streamed},
    }


def check_step_cache(
    pipeline: Any, target: Target, arguments: Mapping[str, Any], cache: StepCache
) -> None:
    """Drive ``pipeline`` up to the first call of a denoiser, and find its split.

    Args:
        pipeline: from :func:`without_weights`.
        target: what programs are made for.
        arguments: keywords of the call, the prompt included.

    Raises:
        StepCacheError: there is no such cache for the pipeline.
    """
    on_host = modules_of(pipeline)
    rehearse(pipeline, target, arguments, Reporter(), on_host, cache, first_call=True)
