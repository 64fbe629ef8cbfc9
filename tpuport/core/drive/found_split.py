"""Where a denoiser's forward splits, found by looking: what no plugin declares.

Upstream's forward runs on the host, and its lists of blocks answer zeros: each block
runs on tensors without numbers, to tell what it returns. A block takes what the block
before returned: that is the state. The split is after the last block of a list.
Nothing else that the blocks of the list made may reach the result of forward.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tpuport.core.seam.blocks import SMALLEST_SHARE
from tpuport.core.seam.module_state import (
    Attributes,
    ModuleTree,
    forgetting,
    without_numbers,
)
from tpuport.core.seam.values import (
    content_of,
    copied,
    put_together,
    same_content,
    take_apart,
    tensors_in,
)
from tpuport.core.tracing.block_stacks import forwards_replaced
from tpuport.core.tracing.forward_split import ForwardSplit
from tpuport.errors import TpuportError

Mark = tuple[str, int, int]
"""A value that a block returned: its list, the number of the call, and the place."""
Marks = frozenset[Any]
_Forward = Callable[..., Any]


class NoSplitError(TpuportError):
    """Forward has no place where it splits."""


def block_lists(module: torch.nn.Module) -> tuple[str, ...]:
    """The outermost lists of two or more blocks that hold much of the weights."""
    total = sum(parameter.numel() for parameter in module.parameters())
    found: list[str] = []
    for path, blocks in module.named_modules():
        if not isinstance(blocks, torch.nn.ModuleList) or len(blocks) < 2:
            continue
        held = sum(parameter.numel() for parameter in blocks.parameters())
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if not inside and held >= SMALLEST_SHARE * total:
            found.append(path)
    return tuple(found)


def found_split(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    before_last: bool,
) -> ForwardSplit:
    """The split of forward in a call.

    Args:
        args, kwargs: of the call.
        before_last: the last block is to run by itself too.

    Raises:
        NoSplitError: why there is none.
    """
    seen = _Marking()
    read = seen.reached(_look(module, args, kwargs, seen))
    why = "no list of blocks hands its state on"
    for path in reversed(list(dict.fromkeys(call.path for call in seen.calls))):
        own = [call for call in seen.calls if call.path == path]
        split = _handed_on(path, own)
        if split is None:
            continue
        last, reached = own[-1], read
        if before_last:
            taken = last.reached.items()
            reached = read.union(*(m for name, m in taken if name not in split.state))
        if any(not reached.isdisjoint(call.marks) for call in own[:-1]):
            why = f"more than the state of {path} is read behind its last block"
            continue
        made = zip(split.state, last.marks, strict=True)
        head = tuple(name for name, mark in made if mark in reached)
        if head:
            return ForwardSplit(
                blocks=split.blocks,
                state=split.state,
                places=split.places,
                head=None if before_last or head == split.state else head,
            )
    raise NoSplitError(why)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a block.

    Attributes:
        given: the tensors among its arguments, by name.
        reached: the marks that are in each argument.
        marks: of the values that it returned.
        keeps: the block wrote to its arguments: somebody may read that later.
    """

    path: str
    block: torch.nn.Module
    given: Mapping[str, torch.Tensor]
    reached: Mapping[str, Marks]
    returned: Any
    marks: Sequence[Mark]
    keeps: bool


def _handed_on(path: str, calls: Sequence[_Call]) -> ForwardSplit | None:
    """The split by what a block took from the one before; ``None`` for none."""
    blocks = [id(call.block) for call in calls]
    if len(set(blocks)) < len(blocks) or any(call.keeps for call in calls):
        return None
    for one, other in itertools.pairwise(calls):
        bare = isinstance(one.returned, torch.Tensor)
        returned = (one.returned,) if bare else one.returned
        if not isinstance(returned, tuple | list):
            continue
        given = other.given.items()
        taken = [[name for name, v in given if v is value] for value in returned]
        state = tuple(names[0] for names in taken if names)
        count = len(calls[-1].marks)
        whole = len(set(state)) == len(returned) == count and (count == 1) == bare
        if whole and set(state) <= set(calls[-1].given):
            order = [*inspect.signature(type(other.block).forward).parameters][1:]
            places = tuple(map(order.index, state))
            return ForwardSplit(blocks=(path,), state=state, places=places)
    return None


@dataclass(eq=False)
class _Marking(TorchDispatchMode):
    """Notes the calls of blocks, and marks what they make, and what is made of that."""

    calls: list[_Call] = field(default_factory=list)
    _marks: dict[Any, Marks] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def reached(self, value: Any) -> Marks:
        """The marks of all tensors in a value."""
        return self._of(tensors_in(value))

    def _of(self, tensors: Sequence[torch.Tensor]) -> Marks:
        """The marks of tensors, and of what was written to the memory they share."""
        keys = [key for one in tensors for key in (id(one), _memory(one))]
        return Marks().union(*(self._marks.get(key, ()) for key in keys))

    def _mark(self, value: Any, marks: Marks) -> None:
        for tensor in tensors_in(value):
            self._marks[id(tensor)] = marks
            self._alive.append(tensor)  # another one may not have its id

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        if marks := self._of(given):
            self._mark(found, marks)
            if func._schema.is_mutable:
                memory = _memory(given[0])
                self._marks[memory] = self._marks.get(memory, Marks()) | marks
                self._alive.append(given[0])
        return found

    def forward_of(self, path: str, block: torch.nn.Module) -> _Forward:
        """What stands in for a block."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            returned, keeps = _without_numbers(block, args, kwargs)
            given = _named(block, args, kwargs)
            tensors = {n: v for n, v in given.items() if isinstance(v, torch.Tensor)}
            reached = {name: self.reached(value) for name, value in given.items()}
            values = returned if isinstance(returned, tuple | list) else (returned,)
            number = len(self.calls)
            marks = [(path, number, place) for place in range(len(values))]
            call = _Call(path, block, tensors, reached, returned, marks, keeps)
            self.calls.append(call)
            # What blocks of this list made before counts where it was made.
            others = {m for m in self.reached((args, kwargs)) if m[0] != path}
            for value, mark in zip(values, marks, strict=True):
                self._mark(value, Marks({mark, *others}))
            return returned

        return forward


def _look(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    marking: _Marking,
) -> Any:
    """What forward returns with ``marking`` in the place of blocks.

    The module stays as it was, and so do the arguments.
    """
    attributes = Attributes(ModuleTree(module))
    state = attributes.state()
    # Nobody is told of the calls: a seam would run parts of forward as programs.
    own = [(one, type(one).forward.__get__(one)) for one in module.modules()]
    blocks = [
        (block, marking.forward_of(path, block))
        for path in block_lists(module)
        for block in module.get_submodule(path).children()
    ]
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        forgetting(module),
        attributes.held(state.form, iter(copied(state.tensors)), []),
        forwards_replaced(own),
        forwards_replaced(blocks),
    ):
        args, kwargs = copied((args, dict(kwargs)))
        with marking:
            return module.forward(*args, **kwargs)


def _without_numbers(
    block: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, bool]:
    """What a block returns, as zeros, and whether it wrote to its arguments.

    What it returns as it was given is the very same tensor."""
    leaves: list[Any] = []
    form = take_apart((tuple(args), dict(kwargs)), leaves, [])
    # Whatever watches the tensors of forward has nothing to watch here.
    with _disable_current_modes(), without_numbers(block) as empty:
        fakes = [*map(empty, leaves)]
        containers: list[Any] = []
        given, named = put_together(form, iter(fakes), containers)
        before = [content_of(one) for one in containers]
        try:
            found = type(block).forward(block, *given, **named)
        except (RuntimeError, NotImplementedError) as error:
            raise NoSplitError(
                f"{type(block).__name__} does not run without numbers "
                f"({type(error).__name__})"
            ) from error
        pairs = zip(containers, before, strict=True)
        changed = any(not same_content(content_of(one), old) for one, old in pairs)
        own = {id(tensor) for tensor in tensors_in(found)}
        keeps = changed or any(f._version and id(f) not in own for f in fakes)
    known = {id(fake): leaf for fake, leaf in zip(fakes, leaves, strict=True)}

    def zeros(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in known:
            known[id(value)] = torch.zeros(tuple(value.shape), dtype=value.dtype)
        return known[id(value)]

    return pytree.tree_map(zeros, found), keeps


def _named(
    block: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a block's call by the names of its parameters."""
    bound = inspect.signature(type(block).forward).bind(block, *args, **kwargs)
    return {**bound.arguments, **bound.arguments.get("kwargs", {})}


def _memory(tensor: torch.Tensor) -> tuple[str, int]:
    """Names the memory of a tensor, which views share."""
    return "memory", tensor.untyped_storage()._cdata
