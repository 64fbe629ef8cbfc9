"""Programs of one module: compiled when they first run, two calls of a step as one.

Upstream calls a denoiser twice in a guided step: with the prompt, and without. A call
waits until somebody reads its answer. If upstream makes a second call of the same
program first, both run as one: a gather of weights serves both, and an axis of the mesh
that nothing else uses takes one call each.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.core.arrays import torch_dtype
from tpuport.core.enums import StageName
from tpuport.core.files.atomic import one_line
from tpuport.core.mesh.compiler_flags import GATHERS
from tpuport.core.mesh.device_memory import refused_bytes
from tpuport.core.reports import CompileReport, bytes_text
from tpuport.core.seam.arithmetic import FEWEST
from tpuport.core.seam.device_tensors import DeviceTensor, Value
from tpuport.core.seam.devices import TracedProgram
from tpuport.core.seam.draws import Draw
from tpuport.core.seam.journal import Called
from tpuport.core.seam.module_state import State, forgetting
from tpuport.core.seam.module_weights import ModuleWeights
from tpuport.core.seam.values import Form
from tpuport.core.tracing.context import BATCH, AttentionRecord
from tpuport.errors import TpuportError


@dataclass(kw_only=True, eq=False)
class Program(TracedProgram):
    """A program of one module; compiled when it first runs.

    Attributes:
        call: ``call(weights, arrays) -> arrays``, which was traced.
        inputs: shapes, dtypes and places of the arrays.
        out: how the arrays become the result; see :class:`Out`.
        used: positions of the tensors that are inputs; the others are constants.
        draws: random numbers that are inputs, after the tensors.
        in_parts: whether each device may hold a part of a result.
        trace_seconds: what tracing took.
        dtypes: upstream's, of the tensors in forward's result; programs count in 32
            bits. Of what is not there, whole numbers have 64.
        shapes: of the results; a picture in parts has more rows and columns in arrays.
        runs: compiled; for two calls as one, by the inputs that differ.
    """

    call: Callable[..., list[jax.Array]]
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    out: Out
    used: tuple[int, ...]
    draws: tuple[Draw, ...] = ()
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
        ordered: numbers of tensors among the arguments that are changed as torch does
            where they are contiguous.
    """

    result: Form | None = None
    draws: tuple[Draw, ...] = ()
    ordered: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A call that waits."""

    program: Program
    inputs: Sequence[jax.Array]
    #: What upstream has in place of the results.
    answers: Sequence[Value]

    def answered(self, arrays: Iterable[jax.Array]) -> None:
        """The call was made."""
        for answer, array in zip(self.answers, arrays, strict=True):
            answer.answered(array)


class TooLargeError(TpuportError):
    """A program that does not fit a chip, and is smaller with weights on the host."""


class _ApartError(TpuportError):
    """Two calls of a program cannot be traced as one."""


class ProgramRuns(ModuleWeights):
    _made: CompileReport | None = None
    _waiting: _Waiting | None = None
    #: Programs of which two calls cannot be one.
    _apart: tuple[Program, ...] = ()

    def _results(
        self, program: Program, arrays: Iterable[Any] | None = None
    ) -> list[DeviceTensor]:
        """The tensors of the result; without arrays, of the call that waits."""
        infos = jax.tree.leaves(program.traced.out_info)
        given = itertools.repeat(None, len(infos)) if arrays is None else arrays
        # A picture in parts has phantom rows and columns.
        shapes = program.shapes or [tuple(info.shape) for info in infos]
        whole = itertools.chain(program.dtypes, itertools.repeat(torch.long))
        found = []
        for info, array, shape in zip(infos, given, shapes, strict=True):
            dtype, upstreams = torch_dtype(str(info.dtype)), next(whole)
            if dtype == torch.int32:
                dtype = upstreams
            # Whole videos have no room on each device.
            on_host = program.in_parts or math.prod(info.shape) < FEWEST
            found.append(
                DeviceTensor(
                    shape,
                    dtype,
                    Value(array, self.settle, waits=array is None),
                    read=functools.partial(self._read, shape, dtype),
                    arithmetic=None if on_host else self._arithmetic.record,
                )
            )
        return found

    def _read(
        self, shape: tuple[int, ...], dtype: torch.dtype, array: Any
    ) -> torch.Tensor:
        return self._devices.read(array)[tuple(map(slice, shape))].to(dtype)

    def _together(
        self, program: Program, inputs: Sequence[jax.Array]
    ) -> Iterable[torch.Tensor]:
        """The answer of a call, which waits for a second one, or is the second one."""
        first = self._waiting
        if first is None or first.program is not program:
            self.settle()
            self._placed()
            answers = self._results(program)
            self._waiting = _Waiting(program, inputs, [a.value for a in answers])
            return answers
        self._waiting = None
        try:
            ours, theirs = self._run(program, first.inputs, inputs)
        except _ApartError as error:
            self._apart = (*self._apart, program)
            self._journal.reporter.say(
                f"{self.name}: the two calls of a step run one by one ({error})"
            )
            ours, theirs = self._run(program, first.inputs), self._run(program, inputs)
        first.answered(ours)
        return self._results(program, theirs)

    def settle(self) -> None:
        """Run the call that waits, if one does."""
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        started, self._made = time.perf_counter(), None
        waiting.answered(self._run(waiting.program, waiting.inputs))
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
            if any(one is not other for one, other in pairs):
                differ = tuple(one is not other for one, other in pairs)
                given.append([other for one, other in pairs if one is not other])
        if self._journal.op_by_op:
            return self._op_by_op(program, inputs, others)
        run = program.runs.get(differ)
        if run is None:
            run = program.runs[differ] = self._made_of(program, differ)
        self._journal.ran = run
        arrays = run(self._placed(), *given)
        return arrays if others is None or differ else (arrays, arrays)

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

    def _tell(self) -> None:
        """Tell that a program is compiled next, or loaded where there are some."""
        reporter = self._journal.reporter
        if self._devices.target.built is None:
            reporter.compiling(self.name.partition(".")[0], self.name)
        else:
            reporter.loading(self.name)

    def _made_of(self, program: Program, differ: tuple[bool, ...]) -> Any:
        """``program`` compiled; two calls as one if ``differ`` names inputs."""
        self._tell()
        seconds = program.trace_seconds
        if differ:
            started = time.perf_counter()
            both = together(program.call, differ, self._free_axis(program))
            first = list(program.inputs)
            second = [one for one, own in zip(first, differ, strict=True) if own]
            jitted = self._devices.jitted(
                both, self._stages(), out_shardings=self.target.replicated
            )
            try:
                traced = jitted.trace(self._structs, first, second)
            except Exception as error:
                raise _ApartError(one_line(error)) from error
            seconds = time.perf_counter() - started
            attention = doubled(program.attention)
            program = replace(program, traced=traced, attention=attention)
        try:
            run, self._made = self._devices.compiled(program, seconds)
        except Exception as error:  # jaxlib raises one class for everything
            used = refused_bytes(str(error))
            assert self.plan is not None
            if used is None or not self.waiting or self.plan.streamed:
                raise
            raise TooLargeError(
                f"{self.name} needs {bytes_text(used)} of a chip, which has less: "
                "stream its blocks' weights by --weights-on host (weights_on=)"
            ) from error
        self._journal.compiled(self._made)
        return run

    def _stages(self) -> tuple[str, ...]:
        """Whose flags of the compiler the programs take."""
        # Convolutions compile four times longer with a denoiser's flags.
        stage = StageName.DENOISE if self._each_step else StageName.DECODE
        gathers = self.plan is not None and self.plan.held
        return (stage, GATHERS) if gathers else (stage,)


def together(
    call: Callable[..., list[Any]], differ: Sequence[bool], axis: str | None
) -> Callable[..., tuple[list[Any], list[Any]]]:
    """Two calls as one function of (weights, first inputs, second inputs).

    Args:
        call: of (weights, inputs).
        differ: which inputs differ; the second inputs are those alone.
        axis: of the mesh that takes one call each; ``None`` for no axis.
    """

    def both(
        weights: Any, first: Sequence[Any], second: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        others = iter(second)
        inputs = [
            jnp.stack([one, next(others)]) if differs else one
            for one, differs in zip(first, differ, strict=True)
        ]
        axes = [0 if differs else None for differs in differ]
        found = jax.vmap(
            lambda inputs: call(weights, inputs), in_axes=(axes,), spmd_axis_name=axis
        )(inputs)
        return [one[0] for one in found], [one[1] for one in found]

    return both


def doubled(records: Sequence[AttentionRecord]) -> tuple[AttentionRecord, ...]:
    """What the attention of two calls as one runs as, from that of one."""

    def twice(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (2 * shape[0], *shape[1:])

    return tuple(
        replace(record, query=twice(record.query), key=twice(record.key))
        for record in records
    )
