"""One module's forward as compiled programs, called as upstream calls it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from textwrap import shorten
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding

from tpuport.core.arrays import array_dtype, to_numpy
from tpuport.core.enums import WeightsOn, denoises
from tpuport.core.mesh.mesh_use import check_used
from tpuport.core.mesh.pictures import picture_sharding
from tpuport.core.seam.arithmetic import Arithmetic
from tpuport.core.seam.blocks import without
from tpuport.core.seam.draws import Draw, DrawError, recorded
from tpuport.core.seam.journal import Called
from tpuport.core.seam.module_state import (
    Attributes,
    State,
    forgetting,
    without_numbers,
)
from tpuport.core.seam.program_runs import Out, Program, ProgramRuns, TooLargeError
from tpuport.core.seam.values import (
    Form,
    content_of,
    inside,
    names_of,
    put_together,
    same_content,
    take_apart,
    tensors_in,
)
from tpuport.core.space.pictures import Pictures, pictures_of
from tpuport.core.space.split_program import Call, SplitTracing
from tpuport.core.tracing.block_stacks import StackError
from tpuport.core.tracing.context import Active, activated, counted
from tpuport.core.tracing.strided import ORDERED
from tpuport.core.weights.gathering import usable_memory
from tpuport.errors import TpuportError

#: Programs of one forward that differ in the values of their masks, at most.
MOST_CONSTANTS = 16
#: What upstream code raises that asks a traced array for its value.
_ASKS_FOR_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
)


class PortError(TpuportError):
    """Upstream code that cannot become a program."""


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """What forward reads in one call, besides the weights."""

    form: Form
    state: State
    #: Of the arguments, then of the attributes.
    tensors: Sequence[torch.Tensor]

    def values(self, constant: Iterable[int]) -> Any:
        """The values of the tensors at some positions, as a key."""
        found = {i: to_numpy(self.tensors[i]).tobytes() for i in sorted(constant)}
        return tuple(found.items())


@dataclass(slots=True)
class _OfShapes:
    """The programs for tensors of some shapes, by the values that are compiled in."""

    #: Positions of the tensors with these values.
    constant: frozenset[int] = frozenset()
    programs: dict[Any, Program] = field(default_factory=dict)


class Entry(ProgramRuns):
    """The forward of one module, as compiled programs.

    Weights are placed at the first call. They are placed again when something changed
    them: an adapter, another dtype.

    Args:
        module: upstream's.
        forward: its own forward, without a port around it.
        name: for messages.
        arithmetic: shared by the entries of one port.
        make_room: called before weights are placed; other entries may have to go.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        name: str,
        arithmetic: Arithmetic,
        make_room: Callable[[Any], None],
    ) -> None:
        super().__init__(module, name, arithmetic, make_room)
        self._forward = forward
        self._attributes = Attributes(self._tree)
        self._may_keep = _may_keep(module, forward)
        self._convolves = _convolves(module)
        self._shapes: dict[Any, _OfShapes] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What upstream's forward returns for the arguments."""
        started = time.perf_counter()
        self._made = None
        result = self._called(args, kwargs)
        seconds = time.perf_counter() - started
        self._journal.calls.append(Called(self.name, started, seconds, self._made))
        return result

    def _called(self, args: Any, kwargs: Any) -> Any:
        leaves: list[torch.Tensor] = []
        containers: list[Any] = []
        if self._may_keep and not {"use_cache", "past_key_values"} & kwargs.keys():
            # Nobody asked for the keys and values of all layers.
            kwargs = {**kwargs, "use_cache": False}
        form = take_apart((args, kwargs), leaves, containers)
        self._refresh()
        state = self._attributes.state()
        given = _Given(form, state, [*leaves, *state.tensors])
        try:
            program = self._program(given)
        except PortError:
            self._check_signature(args, kwargs)
            raise
        chosen = [given.tensors[place] for place in program.used]
        chosen += [draw.numbers() for draw in program.draws]
        inputs = [*map(self._devices.array, chosen, program.inputs)]
        if self._may_wait(program, state):
            found = self._together(program, inputs)
        else:
            arrays = self._run(program, inputs)
            if not self._each_step:
                jax.block_until_ready(arrays)
            found = self._results(program, arrays)
        return self._given_back(
            program.out, found, given.tensors, [*containers, *state.containers]
        )

    def _check_signature(self, args: Any, kwargs: Any) -> None:
        """Raise the TypeError of a call with arguments that forward does not take."""
        forward = type(self.module).forward
        try:
            inspect.signature(forward).bind(self.module, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{type(self.module).__name__}.forward: {error}") from None

    @property
    def programs(self) -> tuple[Program, ...]:
        found = self._shapes.values()
        return tuple(program for one in found for program in one.programs.values())

    def _given_back(
        self,
        out: Out,
        answers: Iterable[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        containers: Sequence[Any],
    ) -> Any:
        assert out.result is not None
        found = put_together(out.result, iter(answers))
        result, changed, written, attributes = found
        for number, content in changed.items():
            container = containers[number]
            if isinstance(container, list):
                container[:] = content
                continue
            inside(container).clear()
            inside(container).update(inside(content))
        for number, tensor in written.items():
            if number in out.ordered and not tensors[number].is_contiguous():
                raise PortError(
                    f"{self.name}: writes in place to a reshape, flatten or contiguous "
                    "of an argument that is not contiguous, and has a program for "
                    "contiguous ones; write to a clone(), or hand over .contiguous()"
                )
            tensors[number].copy_(tensor)
        self._attributes.write(attributes)
        return result

    # Programs.

    def _forget(self) -> None:
        self._shapes.clear()

    def _program(self, given: _Given) -> Program:
        shapes = tuple((tuple(t.shape), t.dtype) for t in given.tensors)
        key = (given.form, given.state.form, shapes)
        known = self._shapes.get(key, _OfShapes())
        found = known.programs.get(given.values(known.constant))
        if found is not None:
            return found
        kinds = len(known.programs) + 1
        component = self.name.partition(".")[0]
        if kinds > MOST_CONSTANTS:
            raise PortError(
                f"{self.name} needs more than {MOST_CONSTANTS} programs that differ in "
                "the values of integer arguments alone; run this component by "
                f"upstream's own code (on_host={component!r})"
            )
        self.settle()
        self._tell()
        program, constant = self._compiled(given, known.constant)
        if self._too_large(program, given.state):
            assert self._blocks is not None
            self._too_large_on_chip = True
            self._rebuild(self._blocks)
            program, constant = self._compiled(given, constant)
        for record in program.attention:
            if record.notice:
                self._journal.notice(f"{component}: attention: {record.notice}")
        # Stacks may have changed while tracing, and all programs with them.
        known = self._shapes.setdefault(key, _OfShapes())
        known.constant = constant
        known.programs[given.values(constant)] = program
        if kinds == 2:
            self._journal.reporter.say(
                f"{self.name} reads the values of its arguments, a mask's say: each "
                f"value compiles a program, {MOST_CONSTANTS} at most"
            )
        return program

    def _compiled(
        self, given: _Given, constant: frozenset[int]
    ) -> tuple[Program, frozenset[int]]:
        stages = iter(_readable(given.tensors))
        draws: tuple[Draw, ...] = ()
        while True:
            started = time.perf_counter()
            try:
                program = self._traced(given, constant, draws)
            except StackError as error:
                assert self._blocks is not None
                kept = without(self.module, self._blocks, error.path)
                if kept == self._blocks:
                    raise
                self._rebuild(kept)
                continue
            except _ASKS_FOR_VALUES as error:
                more = next((s for s in stages if s - constant), None)
                if more is None:
                    raise self._refused(error) from error
                constant |= more
                continue
            except Exception as error:
                if isinstance(error, TpuportError) and not isinstance(error, DrawError):
                    raise
                raise self._refused(error) from error
            out, traced = program.out, program.traced
            taken = len(jax.tree.leaves((self._structs, program.inputs)))
            if draws and out.draws != draws and len(out.draws) == len(draws):
                made = "random numbers of a generator that forward makes"
                raise self._refused(RuntimeError(made))
            if out.draws != draws or len(traced.jaxpr.in_avals) > taken:
                # Each block draws its own numbers, and what is made in a block and
                # kept outside cannot leave a scan.
                if not self._blocks and out.draws == draws:
                    lost = "what a loop of the program made cannot leave the loop"
                    raise self._refused(RuntimeError(lost))
                draws = () if self._blocks else out.draws
                if self._blocks:
                    self._rebuild(())
                continue
            self._check_mesh(program)
            seconds = time.perf_counter() - started
            dtypes = self._dtypes(program, given)
            return replace(program, trace_seconds=seconds, dtypes=dtypes), constant

    def _too_large(self, program: Program, state: State) -> bool:
        """Whether a program is refused that would be smaller with weights on the host.

        A program that fits is compiled then. Two calls as one are another program.
        """
        assert self.plan is not None
        auto = self.target.weights_on == WeightsOn.AUTO and not self.plan.streamed
        if not auto or not self.waiting or self._journal.op_by_op:
            return False
        if math.isinf(usable_memory(self.target.mesh.devices.flat)):
            return False  # no chip
        if self._may_wait(program, state):
            return False
        try:
            program.runs[()] = self._made_of(program, ())
        except TooLargeError:
            return True
        return False

    def _dtypes(self, program: Program, given: _Given) -> tuple[torch.dtype, ...]:
        """Upstream's dtypes of the tensors in forward's result, if a program loses any.

        Upstream's forward runs once more, on tensors without numbers. A forward that
        reads numbers cannot: of its result nothing is known.
        """
        infos = jax.tree.leaves(program.traced.out_info)
        if not any(info.dtype == jnp.int32 for info in infos):
            return ()
        runtime = self._port().runtime
        with contextlib.ExitStack() as stack:
            stack.enter_context(forgetting(self.module))
            stack.enter_context(torch.no_grad())
            stack.enter_context(activated(Active(runtime.env, runtime.op_context())))
            empty = stack.enter_context(without_numbers(self.module))
            values = iter([*map(empty, given.tensors)])
            args, kwargs = put_together(given.form, values)
            stack.enter_context(self._attributes.held(given.state.form, values, []))
            try:
                found = tensors_in(self._forward(*args, **kwargs))
            except RuntimeError:  # torch's, at the line that reads
                return ()
        return tuple(one.dtype for one in found)

    def _check_mesh(self, program: Program) -> None:
        """Refuse a mesh with an axis over which a denoiser splits nothing."""
        if denoises(self.name):
            calls = [(r.query, r.split) for r in program.attention]
            splits = [s.sharding.spec for s in jax.tree.leaves(self._structs)]
            check_used(self.name, self.target.mesh.shape, calls, splits)

    def _place_of(
        self, tensors: Sequence[torch.Tensor]
    ) -> Callable[[tuple[int, ...]], NamedSharding]:
        """Where arrays of a shape go, as inputs and outputs of a program.

        A module that convolves pictures and takes no tokens has pictures in parts:
        caches of frames stay in parts on the devices from call to call.
        """
        if self._in_parts(tensors):
            return functools.partial(picture_sharding, self.target.mesh)
        return lambda shape: self.target.replicated

    def _in_parts(self, tensors: Sequence[torch.Tensor]) -> bool:
        return self._convolves and not any(t.ndim == 3 for t in tensors)

    def _traced(
        self, given: _Given, constant: frozenset[int], draws: tuple[Draw, ...]
    ) -> Program:
        ported, tensors = self._port(), given.tensors
        place = self._place_of(tensors)
        used = tuple(i for i in range(len(tensors)) if i not in constant)
        fixed = {i: jnp.asarray(to_numpy(tensors[i])) for i in constant}
        runtime, out = ported.runtime, Out()

        def bare(weights: Mapping[str, Any], arrays: list[Any]) -> list[Any]:
            known = {**dict(zip(used, arrays, strict=False)), **fixed}
            values = [known[i] for i in range(len(tensors))]

            def run(values: Any) -> Any:
                with recorded(runtime.env, arrays[len(used) :]) as made:
                    result = self._forwarded(given, values, runtime.env, out)
                out.draws = tuple(made)
                return result

            found: list[Any] = ported.call(weights, run, values)
            return found

        structs = [_struct(tensors[i], place) for i in used]
        shapes, pictures = None, self._pictures(given, used, structs)
        options: dict[str, Any] = {}
        structs += [
            _struct(draw.example, lambda _: self.target.replicated) for draw in draws
        ]
        runtime.records.clear()
        runtime.convolutions.clear()
        with contextlib.ExitStack() as stack:
            # Inference mode hides the parts that some operators are made of.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(forgetting(self.module))
            if constant:
                stack.enter_context(jax.ensure_compile_time_eval())
            call = _placing(bare, place)
            if pictures is not None:
                split = SplitTracing(
                    self.name, bare, runtime, self._structs, structs, pictures
                ).split()
                call, structs, shapes = split.call, [*split.inputs], split.shapes
                options["out_shardings"] = [*split.places]
                if split.told:
                    self._journal.reporter.say(f"{self.name}: {split.told}")
            call.__name__ = self.name.replace(".", "_")
            jitted = self._devices.jitted(call, self._stages(), **options)
            traced = jitted.trace(self._structs, structs)
        return Program(
            name=self.name,
            module=self.module,
            weights=self._structs,
            stages=self._stages(),
            call=call,
            traced=traced,
            inputs=tuple(structs),
            out=out,
            used=used,
            draws=draws,
            attention=tuple(runtime.records),
            convolutions=tuple(counted(runtime.convolutions)),
            in_parts=self._in_parts(tensors) or shapes is not None,
            shapes=shapes,
        )

    def _pictures(
        self, given: _Given, used: Sequence[int], arrays: Sequence[Any]
    ) -> Pictures | None:
        """The pictures among a program's inputs, if a plugin lets them be split."""
        if not self.target.splits_space(self.name):
            return None
        names = names_of(given.form)
        names += ["an attribute"] * len(given.state.tensors)
        return pictures_of(self.name, [names[i] for i in used], arrays)

    def _forwarded(
        self, given: _Given, values: Sequence[Any], env: Any, out: Out
    ) -> list[Any]:
        """Upstream's forward on traced tensors; its effects as results."""
        containers: list[Any] = []
        own = iter(values)
        args, kwargs = put_together(given.form, own, containers)
        arrays = [tensor.jax() for tensor in values]
        with self._attributes.held(given.state.form, own, containers) as attributes:
            before = [content_of(container) for container in containers]
            result = self._forward(*args, **kwargs)
        changed = {
            number: container
            for number, (container, old) in enumerate(
                zip(containers, before, strict=True)
            )
            if not same_content(content_of(container), old)
        }
        written = {
            number: tensor
            for number, (tensor, array) in enumerate(zip(values, arrays, strict=True))
            if tensor.jax() is not array
        }
        out.ordered = frozenset(n for n in written if ORDERED in vars(values[n]))
        leaves: list[Any] = []
        out.result = take_apart((result, changed, written, attributes), leaves, [])
        return [_array(leaf, env) for leaf in leaves]

    def _refused(self, error: BaseException) -> PortError:
        kind, frame = type(self.module).__name__, _upstream_frame(error)
        who = self.name if self.name == kind else f"{self.name} ({kind})"
        text = (str(error).strip().splitlines() or [""])[0]
        what = f"{type(error).__name__}{f' at {frame}' if frame else ''}: {text}"
        component, native = self.name.partition(".")[0], ""
        if self._claim is not None and self._claim.whole:
            native = (
                f". Native blocks of {self._claim.plugin} are in place: --blocks "
                "upstream (blocks=) runs without them"
            )
        return PortError(
            f"{who[:90]} cannot become a program: {shorten(what, 240)}. Patch the "
            f"line, or leave {component} to upstream's own code (--on-host, on_host=); "
            f"upstream too may refuse what was asked for{native}"
        )


def _placing(run: Call, place: Callable[[tuple[int, ...]], NamedSharding]) -> Call:
    """``run`` with its results where ``place`` has arrays of their shapes."""

    def call(weights: Mapping[str, Any], arrays: list[Any]) -> list[Any]:
        constrain = jax.lax.with_sharding_constraint
        return [constrain(one, place(one.shape)) for one in run(weights, arrays)]

    return call


def _readable(tensors: Sequence[torch.Tensor]) -> tuple[frozenset[int], ...]:
    """Which inputs may become constants for Python to read: integers, then masks.

    A mask in floats has rows of zeros and ones alone; a vector may be of timesteps.
    Rows of zeros alone come last: an embedding of no text is such.
    """
    whole = {
        i
        for i, t in enumerate(tensors)
        if not t.is_floating_point() and not t.is_complex()
    }
    masks = {
        i
        for i, t in enumerate(tensors)
        if t.is_floating_point() and t.ndim == 2 and bool(((t == 0) | (t == 1)).all())
    }
    empty = {i for i in masks if not tensors[i].any()}
    return frozenset(whole), frozenset(masks - empty), frozenset(masks)


def _may_keep(module: torch.nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a language model of transformers keeps keys and values by default."""
    config: Any = getattr(module, "config", None)
    if "past_key_values" not in inspect.signature(forward).parameters:
        return False
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    return bool(getattr(text, "use_cache", False))


def _convolves(module: torch.nn.Module) -> bool:
    """Whether a module has convolutions that look at the neighbours in a picture."""
    return any(
        isinstance(child, torch.nn.Conv2d | torch.nn.Conv3d)
        and child.stride[-1] == 1 < child.kernel_size[-1]
        for child in module.modules()
    )


def _struct(
    tensor: torch.Tensor, place: Callable[[tuple[int, ...]], NamedSharding]
) -> jax.ShapeDtypeStruct:
    shape = tuple(tensor.shape)
    return jax.ShapeDtypeStruct(shape, array_dtype(tensor), sharding=place(shape))


def _array(leaf: Any, env: Any) -> Any:
    """The JAX array of a tensor that forward gave back."""
    from torchax.tensor import Tensor
    from torchax.view import View

    if isinstance(leaf, Tensor | View):
        return env.t2j_iso(leaf)
    return jnp.asarray(to_numpy(leaf.detach()))  # made on the host, such as positions


def _upstream_frame(error: BaseException) -> str:
    """The innermost line of upstream's code on the way to an error."""
    own = ("/jax/", "/torch/", "/torchax/", "/tpuport/", "/jaxlib/", "/contextlib.py")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = frame.filename.replace("\\", "/")
        if not any(part in path for part in own):
            return "/".join(path.split("/")[-2:]) + f":{frame.lineno}"
    return ""
