"""Programs of one module: compiled when they first run, two calls of a step as one."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import torch

from tpuport.core.arrays import to_torch, torch_dtype
from tpuport.core.enums import StageName
from tpuport.core.files.atomic import one_line
from tpuport.core.mesh.compiler_flags import GATHERS, flags_for
from tpuport.core.programs import executable_files as files
from tpuport.core.programs.jax_cache import cache_hits
from tpuport.core.reports import CompileReport
from tpuport.core.seam.arithmetic import FEWEST, Arithmetic
from tpuport.core.seam.device_tensors import DeviceTensor
from tpuport.core.seam.draws import Draw
from tpuport.core.seam.journal import Called, Journal
from tpuport.core.seam.module_state import State, forgetting
from tpuport.core.seam.module_weights import ModuleWeights
from tpuport.core.seam.pairs import Waiting, doubled, together
from tpuport.core.seam.target import Target
from tpuport.core.seam.values import Form
from tpuport.core.tracing.context import BATCH, AttentionRecord, ConvolutionRecord
from tpuport.errors import TpuportError


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Program:
    """A program of one module; compiled when it first runs.

    Attributes:
        call: ``call(weights, arrays) -> arrays``, to be traced.
        traced: what ``call`` became.
        inputs: shapes, dtypes and places of the arrays.
        out: how the arrays become the result; see :class:`Out`.
        used: positions of the tensors that are inputs; the others are constants.
        draws: random numbers that are inputs, after the tensors.
        attention, convolutions: what the calls in it run as.
        in_parts: whether each device may hold a part of a result.
        trace_seconds: what tracing took.
        dtypes: upstream's, of the tensors in forward's result; programs count in 32
            bits. Of what is not there, whole numbers have 64.
        shapes: of the results; a picture in parts has more rows and columns in arrays.
        runs: compiled; for two calls as one, by the inputs that differ.
    """

    call: Callable[..., list[jax.Array]]
    traced: jax.stages.Traced
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    out: Out
    used: tuple[int, ...]
    draws: tuple[Draw, ...] = ()
    attention: tuple[AttentionRecord, ...] = ()
    convolutions: tuple[ConvolutionRecord, ...] = ()
    in_parts: bool = False
    trace_seconds: float = 0.0
    dtypes: tuple[torch.dtype, ...] = ()
    shapes: tuple[tuple[int, ...], ...] | None = None
    runs: dict[tuple[bool, ...], Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Out:
    """What a traced forward gave back: forms whose tensors are the program's arrays.

    Attributes:
        result: of forward, and what it changed: lists and dicts among its arguments by
            their number, tensors among its arguments by theirs, and attributes.
        draws: the random numbers that forward took.
    """

    result: Form | None = None
    draws: tuple[Draw, ...] = ()


def _whole(program: Program) -> Iterator[torch.dtype]:
    """Upstream's dtypes of the results, for those that are whole numbers."""
    return itertools.chain(program.dtypes, itertools.repeat(torch.long))


class _ApartError(TpuportError):
    """Two calls of a program cannot be traced as one."""


class ProgramRuns(ModuleWeights):
    """Runs the programs of one module.

    Args:
        module, name, target, journal: as of :class:`ModuleWeights`.
        arithmetic: on results, of the port.
        make_room: called before weights are placed; other entries may have to go.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        target: Target,
        journal: Journal,
        arithmetic: Arithmetic,
        make_room: Callable[[Any], None],
    ) -> None:
        super().__init__(module, name, target, journal)
        self._arithmetic = arithmetic
        self._make_room = make_room
        self._made: CompileReport | None = None
        self._built: files.Entry | None = None
        self._waiting: Waiting | None = None
        self._apart: list[Program] = []

    def _results(self, program: Program, arrays: Iterable[Any]) -> list[DeviceTensor]:
        """The tensors of the result."""
        shapes = program.shapes or itertools.repeat(None)
        found = zip(arrays, _whole(program), shapes, strict=False)
        return [
            self._result(program, array, dtype, array, shape)
            for array, dtype, shape in found
        ]

    def _result(
        self,
        program: Program,
        struct: Any,
        whole: torch.dtype,
        array: Any,
        shape: tuple[int, ...] | None = None,
    ) -> DeviceTensor:
        """A tensor of the result; without an array, of the call that waits.

        Args:
            whole: upstream's dtype if the tensor is of whole numbers of 32 bits.
            shape: without phantom rows and columns, where the array has some.
        """
        real = tuple(struct.shape) if shape is None else shape
        cut = tuple(map(slice, real))
        dtype = torch_dtype(str(struct.dtype))
        if dtype == torch.int32:
            dtype = whole
        return DeviceTensor(
            real,
            dtype,
            read=lambda array: self._read(array)[cut].to(dtype),
            array=array,
            run=self.settle,
            # Whole videos have no room on each device.
            arithmetic=None
            if program.in_parts or math.prod(struct.shape) < FEWEST
            else self._arithmetic,
        )

    def _read(self, array: Any) -> torch.Tensor:
        return to_torch(array)

    def _together(
        self, program: Program, inputs: Sequence[jax.Array]
    ) -> Iterable[torch.Tensor]:
        """The answer of a call, which waits for a second one, or is the second one."""
        first = self._waiting
        if first is None or first.program is not program:
            self.settle()
            self._placed()
            infos = jax.tree.leaves(program.traced.out_info)
            found = zip(infos, _whole(program), strict=False)
            answers = [
                self._result(program, info, dtype, None) for info, dtype in found
            ]
            self._waiting = Waiting(
                program=program,
                inputs=inputs,
                answers=[answer.value for answer in answers],
            )
            return answers
        self._waiting = None
        try:
            ours, theirs = self._run(program, first.inputs, inputs)
        except _ApartError as error:
            self._apart.append(program)
            self._journal.reporter.say(
                f"{self.name}: the two calls of a step run one by one ({error})"
            )
            ours, theirs = self._run(program, first.inputs), self._run(program, inputs)
        for answer, array in zip(first.answers, ours, strict=True):
            answer.answered(array)
        return self._results(program, theirs)

    def settle(self) -> None:
        """Run the call that waits, if one does."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        started, self._made = time.perf_counter(), None
        arrays = self._run(waiting.program, waiting.inputs)
        for answer, array in zip(waiting.answers, arrays, strict=True):
            answer.answered(array)
        if self._made is not None:
            seconds = time.perf_counter() - started
            self._journal.calls.append(Called(self.name, started, seconds, self._made))

    def _may_wait(self, program: Program, state: State) -> bool:
        """Whether two calls of a program gain from running as one.

        They gain if weights are gathered, or if nothing else uses the data axis.
        """
        if not self._each_step or program.draws:
            return False
        if program in self._apart:
            return False
        assert self.plan is not None
        assert program.out.result is not None
        effects = program.out.result.parts[1:]
        if state.tensors or any(effect.parts for effect in effects):
            return False
        return bool(self.plan.held) or self._free_axis(program) is not None

    def _free_axis(self, program: Program) -> str | None:
        """The axis of the mesh that can take one call each of two."""
        used = any(record.split[0] is not None for record in program.attention)
        two = dict(self.target.mesh.shape).get(BATCH) == 2
        return BATCH if two and not used else None

    def _run(
        self,
        program: Program,
        inputs: Sequence[jax.Array],
        others: Sequence[jax.Array] | None = None,
    ) -> Any:
        """What a program gives back; with ``others``, what two calls give back."""
        differ: tuple[bool, ...] = ()
        given: list[Any] = [inputs]
        if others is not None:
            pairs = list(zip(inputs, others, strict=True))
            differ = tuple(one is not other for one, other in pairs)
            if not any(differ):
                arrays = self._run(program, inputs)
                return arrays, arrays
            given.append([other for one, other in pairs if one is not other])
        if self._journal.op_by_op:
            return self._op_by_op(program, inputs, others)
        run = program.runs.get(differ)
        if run is None:
            run = program.runs[differ] = self._made_of(program, differ)
        self._journal.ran = run
        return self._execute(run, self._placed(), given)

    def _op_by_op(
        self,
        program: Program,
        inputs: Sequence[jax.Array],
        others: Sequence[jax.Array] | None,
    ) -> Any:
        """What a program gives back, each op by itself; two calls one by one."""
        self._journal.ran = None
        if others is not None:
            return tuple(self._op_by_op(program, one, None) for one in (inputs, others))
        with (
            jax.disable_jit(),
            torch.inference_mode(False),
            torch.no_grad(),
            forgetting(self.module),
        ):
            return program.call(self._placed(), inputs)

    def _placed(self) -> Mapping[str, jax.Array]:
        """The weights, on the devices."""
        if self._weights is None:
            self._make_room(self)
            self._journal.reporter.loading(self.name)
            # The host may replace weights that are being uploaded.
            self._weights = jax.block_until_ready(self._place())
        return self._weights

    def _execute(self, run: Any, weights: Any, given: Sequence[Any]) -> Any:
        return run(weights, *given)

    def _made_of(self, program: Program, differ: tuple[bool, ...]) -> Any:
        """``program`` compiled; two calls as one if ``differ`` names inputs."""
        component, _, path = self.name.partition(".")
        self._journal.reporter.compiling(component, self.name)
        traced, tracing = program.traced, program.trace_seconds
        started, hits, self._built = time.perf_counter(), cache_hits(), None
        if differ:
            both = together(program.call, differ, self._free_axis(program))
            first = list(program.inputs)
            second = [one for one, own in zip(first, differ, strict=True) if own]
            jitted = self._jitted(both, out_shardings=self.target.replicated)
            try:
                traced = jitted.trace(self._structs, first, second)
            except Exception as error:
                raise _ApartError(one_line(error)) from error
            tracing, started = time.perf_counter() - started, time.perf_counter()
            program = replace(program, attention=doubled(program.attention))
        run = self._executable(program, traced)
        self._made = CompileReport(
            stage=component,
            program=path or "forward",
            trace_seconds=tracing,
            compile_seconds=time.perf_counter() - started,
            cached=self._built is not None or cache_hits() > hits,
            loaded=self._built is not None,
            executable=str(self._built.path) if self._built else "",
            executable_bytes=self._built.size if self._built else 0,
        )
        self._journal.reporter.compiled(self._made)
        return run

    def _executable(self, program: Program, traced: jax.stages.Traced) -> Any:
        """What runs a program; ``traced`` is one call of it, or two as one."""
        run, self._built = self.target.compiled(
            traced, self.name, self.module, self._structs, self._stages()
        )
        return run

    def _stages(self) -> list[str]:
        """Whose flags of the compiler the programs take."""
        # Convolutions compile four times longer with a denoiser's flags.
        stages: list[str] = [StageName.DENOISE if self._each_step else StageName.DECODE]
        if self.plan is not None and self.plan.held:
            stages.append(GATHERS)
        return stages

    def _jitted(self, function: Callable[..., Any], **options: Any) -> Any:
        flags = flags_for(self.target.mesh.devices.flat[0], *self._stages())
        return jax.jit(function, compiler_options=flags.options or None, **options)
