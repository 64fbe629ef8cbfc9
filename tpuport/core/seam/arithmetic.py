"""Upstream's arithmetic between the calls of modules, as programs on the devices.

Guidance and a scheduler's step are some hundred operators on tensors of the latents'
size. Each is recorded. What somebody holds is computed before a module is called, when
the host reads, and at the end of a scheduler's step: all of it as one program, on every
device of the mesh. Programs are told apart by the operators and shapes; numbers of the
host are inputs.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from tpuport.core.arrays import array_dtype
from tpuport.core.enums import StageName
from tpuport.core.programs.program_key import ARITHMETIC
from tpuport.core.programs.torch_operators import (
    STATIC,
    Computes,
    computes,
    counts,
)
from tpuport.core.seam.device_tensors import (
    DeviceTensor,
    HostError,
    Value,
    View,
    version,
)
from tpuport.core.seam.devices import Devices, TracedProgram
from tpuport.core.seam.journal import Between, Called, Journal
from tpuport.errors import UsageError

aten = torch.ops.aten
#: Elements of a module's result, at least, for arithmetic on the devices. The host is
#: done with fewer before a program is started.
FEWEST = 4096
#: Operators that wait, at most: a loop may never end in a call.
MOST_WAITING = 1024
#: Programs of one port, at most: a slice that moves with each step makes many.
MOST_PROGRAMS = 256
#: The largest whole number up to which float32 has all.
_EXACT = 1 << 24
#: Programs that the host is ahead of the devices, at most: those before and after the
#: calls of one step.
_AHEAD = 2
#: What the host can take back.
_DTYPES = frozenset(
    {
        *(torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.float64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)
#: A number for each node, of any port: tensors of two ports may meet.
_serials = itertools.count()
#: Whose flags of the compiler the programs take.
STAGES = (str(StageName.DENOISE),)


@dataclass(frozen=True, slots=True, eq=False)
class _Operation:
    """An operator on tensors of some shapes."""

    computes: Computes
    #: With places for tensors and numbers; see :class:`_Taking`.
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    result: jax.ShapeDtypeStruct
    #: Of the result, as torch says.
    strides: tuple[int, ...]
    dtype: torch.dtype

    def run(self, arrays: Iterator[Any], numbers: Iterator[Any]) -> Any:
        """The result; ``arrays`` and ``numbers`` are taken from the front."""

        def put(form: Any) -> Any:
            kind = form[0]
            if kind == "tensor":
                return next(arrays)
            if kind == "number":
                return next(numbers)
            if kind == "list":
                return [put(one) for one in form[1]]
            return form[2]

        args = [put(form) for form in self.args]
        kwargs = {name: put(form) for name, form in self.kwargs}
        found = self.computes(self.result, *args, **kwargs)
        assert found.shape == self.result.shape, (self, found.shape)
        return found


class _Node(Value):
    """A result that is computed later.

    Attributes:
        operation, parts, numbers: what is computed of what.
        serial: a number that is larger than those of ``parts``.
        owner: the tensor that somebody holds.
    """

    __slots__ = ("numbers", "operation", "owner", "parts", "serial")

    def __init__(
        self,
        run: Callable[[], None],
        operation: _Operation,
        taken: _Taking,
        serial: int,
    ) -> None:
        super().__init__(None, run)
        self.operation, self.serial = operation, serial
        self.parts: Sequence[Value] = taken.parts
        self.numbers: Sequence[float] = taken.numbers
        self.owner: weakref.ref[DeviceTensor] | None = None

    @property
    def held(self) -> bool:
        """Whether somebody may ask for it."""
        owner = None if self.owner is None else self.owner()
        return self.array is None and owner is not None and owner.value is self

    def answered(self, array: Any) -> None:
        super().answered(array)
        self.parts, self.numbers = (), ()


class _Taking:
    """Takes the arguments of an operator apart: tensors, numbers, and all else.

    Attributes:
        parts, kinds: the tensors, and their shapes and dtypes.
        numbers: of the host.
    """

    def __init__(self, upload: Callable[[torch.Tensor], Any]) -> None:
        self._upload = upload
        self.parts: list[Value] = []
        self.kinds: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.numbers: list[float] = []

    def form(self, given: Any, number: bool) -> Any:
        """A key of one argument; ``number`` says whether a number may be an input."""
        if isinstance(given, torch.Tensor):
            return self._tensor(given)
        if isinstance(given, list | tuple):
            return "list", tuple(self.form(one, False) for one in given)
        if number and type(given) in (int, float):
            self.numbers.append(_number(given))
            return "number", type(given)
        return "plain", type(given), given

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, DeviceTensor):
            value = tensor.ask()
            if value is None:
                # A view of a tensor on the host is made where torch keeps its books.
                raise HostError
            with torch._C.DisableTorchFunctionSubclass():
                shape, strides = tuple(tensor.size()), tensor.stride()
                dtype = tensor.dtype
            if value.array is not None and value.array.shape != shape:
                raise HostError  # a picture in parts has phantom rows
            self.parts.append(value)
            self.kinds.append((shape, dtype))
            return "tensor", shape, strides, dtype
        plain = tensor.layout == torch.strided and not tensor.is_complex()
        if tensor.device.type != "cpu" or not plain:
            raise HostError
        if tensor.ndim == 0:
            self.numbers.append(_number(tensor.item()))
            return "number", tensor.dtype
        if tensor.dtype == torch.float64:
            raise HostError
        try:
            self.parts.append(Value(self._upload(tensor)))
        except UsageError:  # whole numbers beyond 32 bits
            raise HostError from None
        self.kinds.append((tuple(tensor.shape), tensor.dtype))
        return "tensor", tuple(tensor.shape), tensor.stride(), tensor.dtype


def _number(given: float) -> float:
    """A number of the host as an input; NaN is one too.

    Raises:
        HostError: float32 has not all whole numbers of this size.
    """
    if isinstance(given, int) and abs(given) > _EXACT:
        raise HostError
    return float(given)


class Arithmetic(Between):
    """Records operators on tensors of the devices, and computes what is asked for.

    Args:
        devices, journal: of the port.
    """

    def __init__(self, devices: Devices, journal: Journal) -> None:
        self.devices, self.journal = devices, journal
        self._operations: dict[Any, _Operation | None] = {}
        self._programs: dict[Any, Any] = {}
        self._waiting: list[weakref.ref[_Node]] = []
        self._lock = threading.RLock()
        self._under_way: deque[Any] = deque()
        self._last: Any = None

    # Recording.

    def record(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator, to be computed later.

        Raises:
            HostError: the host must compute it.
        """
        if _is_composite(operator):
            # In inference mode torch leaves it to us to take an operator apart.
            return operator.decompose(*args, **kwargs)
        if operator in (aten.split.Tensor, aten.split_with_sizes.default):
            return self._split(*args, **kwargs)
        if operator == aten.unbind.int:
            x, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
            return [
                self.record(aten.select.int, (x, dim, index), {})
                for index in range(x.size(dim))
            ]
        with self._lock:
            if operator._schema.is_mutable:
                return self._write(operator, args, kwargs)
            node = self._node(operator, args, kwargs)
            view_of = None
            if operator.is_view:
                view_of = args[0], View(operator, tuple(args[1:]), kwargs)
            return self._tensor(node, view_of)

    def _split(self, x: Any, size: Any, dim: int = 0) -> list[Any]:
        length, at, found = x.size(dim), 0, []
        sizes = size
        if isinstance(size, int):
            if size < 1 or not length:
                raise HostError
            whole = range(0, length, size)
            sizes = [min(size, length - begin) for begin in whole]
        elif sum(sizes) != length or min(sizes) < 0:
            raise HostError
        for one in sizes:
            given = (x, dim, at, at + one)
            found.append(self.record(aten.slice.Tensor, given, {}))
            at += one
        return found

    def _write(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Write to a tensor, which takes another value: nobody else may see it."""
        tensor = args[0]
        packet, _, overload = str(operator)[len("aten.") :].partition(".")
        plain = getattr(aten, packet.removesuffix("_"), None)
        if (
            not packet.endswith("_")
            or not isinstance(tensor, DeviceTensor)
            or tensor.arithmetic is None
            or not tensor.alone()
            or overload not in getattr(plain, "overloads", list)()
            or _overlaps(tensor)
        ):
            raise HostError
        node = self._node(getattr(plain, overload), args, kwargs)
        same = node.operation.result.shape == tuple(tensor.size())
        if not same or node.operation.dtype != tensor.dtype:
            raise HostError
        tensor.value, tensor.writes = node, tensor.writes + 1
        self._wanted(node, tensor)
        return tensor

    def _wanted(self, node: _Node, tensor: DeviceTensor) -> None:
        node.owner = weakref.ref(tensor)
        self._waiting.append(weakref.ref(node))

    def _node(self, operator: Any, args: Any, kwargs: Any) -> _Node:
        if len(self._programs) >= MOST_PROGRAMS:
            raise HostError
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != "cpu":
            raise HostError
        kwargs = {name: v for name, v in kwargs.items() if name != "device"}
        taken = _Taking(self._upload)
        positions, names = _numbers_of(operator)
        forms = tuple(
            taken.form(one, number)
            for one, number in zip(args, positions, strict=False)
        )
        named = tuple((n, taken.form(v, n in names)) for n, v in sorted(kwargs.items()))
        key = (operator, forms, named)
        if key not in self._operations:
            found = _operation(operator, args, kwargs, forms, named)
            traces = found is not None and _traces(found, taken)
            self._operations[key] = found if traces else None
        operation = self._operations[key]
        if operation is None:
            raise HostError
        if len(self._waiting) >= MOST_WAITING:
            self.compute()
        return _Node(self.compute, operation, taken, next(_serials))

    def _tensor(
        self, node: _Node, view_of: tuple[DeviceTensor, View] | None
    ) -> DeviceTensor:
        operation = node.operation
        made = DeviceTensor(
            operation.result.shape,
            operation.dtype,
            node,
            read=self._reader(operation.dtype),
            strides=operation.strides,
            arithmetic=self.record,
            view_of=view_of,
        )
        self._wanted(node, made)
        return made

    def _reader(self, dtype: torch.dtype) -> Callable[[Any], torch.Tensor]:
        """What makes a tensor on the host from an array."""
        return lambda array: self.devices.read(array).to(dtype)

    def of_host(self, tensor: torch.Tensor) -> DeviceTensor:
        """A tensor that is on the host, for arithmetic on the devices."""
        value = Value(None, lambda: value.answered(self._upload(tensor)))
        made = DeviceTensor(
            tuple(tensor.shape),
            tensor.dtype,
            value,
            read=self._reader(tensor.dtype),
            strides=tensor.stride(),
            arithmetic=self.record,
        )
        made.family.host, made.family.seen = tensor, version(tensor)
        return made

    # Computing.

    def compute(self, *, everything: bool = True) -> None:
        """Compute what somebody holds.

        Args:
            everything: also what is computed from a call that waits for a second one.
        """
        with self._lock:
            found = [one for ref in self._waiting if (one := ref()) is not None]
            held = [one for one in found if one.held]
            nodes = _needed(held)
            late: set[int] = set()
            for node in () if everything else nodes:
                if any(p.waits or id(p) in late for p in node.parts):
                    late.add(id(node))
            now = [one for one in held if id(one) not in late]
            if now:
                self._compute(_needed(now) if late else nodes, now)
            self._waiting = [weakref.ref(one) for one in held if id(one) in late]

    def step(self) -> Callable[[], None] | None:
        """Compute everything at the end of a step.

        Returns:
            what waits for the result; ``None`` if the host made the step.
        """
        self.compute()
        last, self._last = self._last, None
        # What a rehearsal makes is there at once.
        there = not isinstance(last, jax.Array)
        return None if there else functools.partial(jax.block_until_ready, last)

    def wait(self) -> None:
        """Wait until everything is there."""
        jax.block_until_ready(list(self._under_way))
        self._under_way.clear()

    def _compute(self, nodes: Sequence[_Node], held: Sequence[_Node]) -> None:
        places = {id(node): at for at, node in enumerate(nodes)}
        leaves: dict[int, int] = {}
        given: list[Value] = []
        steps = []
        for node in nodes:
            for part in node.parts:
                if id(part) not in places and id(part) not in leaves:
                    leaves[id(part)] = len(given)
                    given.append(part)
            # An input's number is below zero.
            of = (places.get(id(p), -1 - leaves.get(id(p), 0)) for p in node.parts)
            steps.append((node.operation, tuple(of)))
        wanted = tuple(places[id(node)] for node in held)
        numbers = np.array([n for node in nodes for n in node.numbers], np.float32)
        whole = self.devices.target.replicated
        arrays = [self.devices.moved(one.get(), whole) for one in given]
        key = (tuple(steps), wanted)
        run = self._programs.get(key)
        if run is None:
            run = self._programs[key] = self._made(steps, wanted, numbers, arrays)
        *found, done = run(numbers, arrays)
        for node, array in zip(held, found, strict=True):
            node.answered(array)
        self._last = done
        self._under_way.append(done)
        if len(self._under_way) > _AHEAD:
            jax.block_until_ready(self._under_way.popleft())

    def _made(
        self,
        steps: Sequence[tuple[_Operation, tuple[int, ...]]],
        wanted: Sequence[int],
        numbers: Any,
        arrays: Sequence[Any],
    ) -> Any:
        started = time.perf_counter()
        reporter = self.journal.reporter
        if len(self._programs) == MOST_PROGRAMS - 1:
            reporter.say(
                f"upstream's arithmetic between calls makes {MOST_PROGRAMS} programs: "
                "from here on it runs on the host"
            )
        if self.devices.target.built is None:
            reporter.compiling(ARITHMETIC, ARITHMETIC)
        else:
            reporter.loading(ARITHMETIC)

        def arithmetic(numbers: Any, arrays: Sequence[Any]) -> list[Any]:
            each, made = iter(numbers), list[Any]()
            for operation, of in steps:
                parts = [made[at] if at >= 0 else arrays[-1 - at] for at in of]
                made.append(operation.run(iter(parts), each))
            # The last one is there when all are, and holds nothing alive.
            return [*(made[at] for at in wanted), jnp.zeros((), jnp.int32)]

        whole = self.devices.target.replicated
        jitted = self.devices.jitted(arithmetic, STAGES, out_shardings=whole)
        structs = [
            jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=whole)
            for one in (numbers, *arrays)
        ]
        traced = jitted.trace(structs[0], structs[1:])
        run, report = self.devices.compiled(
            TracedProgram(name=ARITHMETIC, traced=traced, stages=STAGES),
            time.perf_counter() - started,
        )
        self.journal.compiled(report)
        seconds = time.perf_counter() - started
        self.journal.calls.append(Called(ARITHMETIC, started, seconds, report))
        return run

    def _upload(self, tensor: torch.Tensor) -> Any:
        place = jax.ShapeDtypeStruct(
            tuple(tensor.shape),
            array_dtype(tensor),
            sharding=self.devices.target.replicated,
        )
        return self.devices.array(tensor, place)


def _needed(held: Iterable[_Node]) -> list[_Node]:
    """All that is not computed yet of what makes some results, in order."""
    found: dict[int, _Node] = {}
    waiting = list(held)
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            waiting += [
                p for p in one.parts if isinstance(p, _Node) and p.array is None
            ]
    return sorted(found.values(), key=lambda node: node.serial)


@functools.cache
def _is_composite(operator: Any) -> bool:
    """Whether torch makes an operator of others."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(operator.name(), "CompositeImplicitAutograd"))


@functools.cache
def _numbers_of(operator: Any) -> tuple[tuple[bool, ...], frozenset[str]]:
    """Which arguments of an operator may be numbers of the host: by place, by name."""
    kinds = ("number", "Optional[number]", "Tensor", "Optional[Tensor]")
    told = [
        (one.name, operator not in STATIC and str(one.type) in kinds)
        for one in operator._schema.arguments
    ]
    return tuple(may for _, may in told), frozenset(name for name, may in told if may)


def _operation(
    operator: Any, args: Any, kwargs: Any, forms: Any, named: Any
) -> _Operation | None:
    """An operator on such arguments; ``None`` if the host must compute it."""
    found = computes(operator)
    if found is None:
        return None
    kinds: list[torch.dtype] = []

    def bare(tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            size, strides, dtype = tensor.size(), tensor.stride(), tensor.dtype
        kinds.append(dtype)
        return torch.empty_strided(size, strides, dtype=dtype, device="meta")

    args, kwargs = tree_map_only(torch.Tensor, bare, (args, kwargs))
    result = operator(*args, **kwargs)
    if result.dtype not in _DTYPES:
        return None
    # Programs count in 32 bits, and have no float64.
    whole = any(not k.is_floating_point and k != torch.bool for k in kinds)
    if result.dtype == torch.float64 or (counts(operator) and whole):
        return None
    return _Operation(
        computes=found,
        args=forms,
        kwargs=named,
        result=jax.ShapeDtypeStruct(tuple(result.shape), array_dtype(result)),
        strides=result.stride(),
        dtype=result.dtype,
    )


def _traces(operation: _Operation, taken: _Taking) -> bool:
    """Whether JAX computes an operator on such arguments; else the host does."""
    arrays = [
        jax.ShapeDtypeStruct(shape, array_dtype(torch.empty(0, dtype=dtype)))
        for shape, dtype in taken.kinds
    ]
    numbers = [jax.ShapeDtypeStruct((), jnp.float32) for _ in taken.numbers]
    try:
        jax.eval_shape(lambda a, n: operation.run(iter(a), iter(n)), arrays, numbers)
    except Exception:  # torch's arguments may mean what JAX has no words for
        return False
    return True


def _overlaps(tensor: DeviceTensor) -> bool:
    """Whether several elements lie in one place, to which torch refuses to write."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(
            stride == 0 and size > 1
            for stride, size in zip(tensor.stride(), tensor.size(), strict=True)
        )
