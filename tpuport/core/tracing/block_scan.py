"""Stacked blocks under one ``lax.scan``, with upstream's forward as it is.

Upstream's loop calls one block after the other. While :func:`scanned` holds, a call of
a stacked block computes nothing: the call is noted and returns deferred tensors. When
something reads a deferred tensor, the blocks called so far run as one scan over the
stacked weights, whose body is the first block's forward, traced once. A loop that only
hands the state on becomes one scan; a loop that reads the state on the way gets one
more scan; a loop that does anything else between its blocks is refused, by name.

The state is found by looking: the arguments of a block that the block before returned.
All other arguments must be the very same objects for every block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import torch
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as torch_pytree

from tpuport.core import compat
from tpuport.core.tracing.block_stacks import Stack, StackError, forwards_replaced
from tpuport.core.tracing.deferred_tensors import deferred, owner_of, was_written
from tpuport.core.tracing.pair_rotations import rotations_joined


@contextlib.contextmanager
def scanned(
    stacks: Sequence[Stack],
    weights: Mapping[str, jax.Array],
    env: Any,
    gathered: Mapping[str, jax.sharding.NamedSharding],
) -> Iterator[None]:
    """In this block calls of stacked blocks run under scans.

    Args:
        weights: has the array of every tensor of every stack.
        env: the torchax environment, active.
        gathered: by array, the sharding in which a block uses a weight that is held in
            more parts.

    Raises:
        PluginError: from a block's call, when the loop over the blocks does more than
            hand their state on.
    """
    replacements: list[tuple[torch.nn.Module, Callable[..., Any]]] = []
    for stack in stacks:
        names = {tensor: stack.name(tensor) for tensor in stack.tensors}
        arrays = {tensor: weights[name] for tensor, name in names.items()}
        whole = {t: gathered[name] for t, name in names.items() if name in gathered}
        runner = _Runner(stack, arrays, env, whole)
        replacements += [
            (block, runner.forward_of(index))
            for index, block in enumerate(stack.blocks)
        ]
    with forwards_replaced(replacements):
        yield


def slices(
    stack: Stack, weights: Mapping[str, jax.Array], env: Any
) -> dict[str, torch.Tensor]:
    """The tensors of each block by their own names, cut out when they are read."""
    found: dict[str, torch.Tensor] = {}
    for tensor in stack.tensors:
        whole = weights[stack.name(tensor)]
        struct = jax.ShapeDtypeStruct(whole.shape[1:], whole.dtype)
        for index, name in enumerate(stack.members(tensor)):

            def read(whole: jax.Array = whole, index: int = index) -> jax.Array:
                return jax.lax.index_in_dim(whole, index, keepdims=False)

            found[name] = deferred(struct, env, read)
    return found


@dataclass(eq=False)
class _Runner:
    """The blocks of one stack during one call of the module."""

    stack: Stack
    weights: Mapping[str, jax.Array]
    env: Any
    gathered: Mapping[str, jax.sharding.NamedSharding]
    chain: _Chain | None = None

    def forward_of(self, index: int) -> Callable[..., Any]:
        original = self.stack.blocks[index].forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, tree = torch_pytree.tree_flatten((args, kwargs))
            chain = self.chain
            # A loop may end early, and the next loop starts at the first block again. A
            # loop that starts later belongs to a forward from a captured state.
            if chain is None or chain.done or index == 0:
                self.chain = chain = _Chain(self, index, original, leaves, tree)
            else:
                chain.add(index, leaves, tree)
            return chain.output(index)

        return forward


@dataclass(eq=False)
class _Chain:
    """Blocks that were called one after the other, each on the state of the one before.

    Attributes:
        runner: the runner of the blocks.
        start: the first block called.
        forward: forward of the first block.
        leaves: arguments of the first block, flattened.
        tree: structure of these arguments.
        last: the last block called so far.
        state: position among the arguments -> which output of the block before.
        starts: where scans begin -> the arguments there; a scan begins at a block if
            the state in front of the block was read.
        ran: the outputs of the blocks that ran.
    """

    runner: _Runner
    start: int
    forward: Callable[..., Any]
    leaves: list[Any]
    tree: Any
    last: int = -1
    state: dict[int, int] | None = None
    starts: dict[int, list[Any]] = field(default_factory=dict)
    ran: dict[int, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = self.start
        self._env = self.runner.env
        self._is_array = [
            _is_array(leaf) and not self._is_known(leaf) for leaf in self.leaves
        ]
        arrays = [
            _strong(self._env.t2j_iso(leaf))
            for leaf, is_array in zip(self.leaves, self._is_array, strict=True)
            if is_array
        ]
        # Positions among the leaves -> positions among the arrays.
        places = (p for p, is_array in enumerate(self._is_array) if is_array)
        self._slot = {position: slot for slot, position in enumerate(places)}
        self.starts[self.start] = arrays
        block = self.runner.stack.blocks[self.start]
        found: dict[str, Any] = {}

        def run(layer: Mapping[str, Any], arrays: list[Any]) -> list[Any]:
            tensors = self._env.j2t_iso(arrays)
            given = iter(tensors)
            leaves = [
                next(given) if is_array else leaf
                for leaf, is_array in zip(self.leaves, self._is_array, strict=True)
            ]
            args, kwargs = torch_pytree.tree_unflatten(leaves, self.tree)
            held = list(_tensors_in(self.leaves))
            with _reparametrize_module(block, self._env.j2t_iso(dict(layer))):
                out = self.forward(*args, **kwargs)
            after, tree = torch_pytree.tree_flatten((args, kwargs))
            if tree != self.tree or not all(map(_same, after, leaves)):
                raise self._error(self.start, "changes a list or dict that it is given")
            still = list(_tensors_in(self.leaves))
            if len(still) != len(held) or not all(map(_same, still, held)):
                kinds = {type(leaf).__name__ for leaf in self.leaves if _holds(leaf)}
                what = ", ".join(sorted(kinds)) or "what it is given"
                raise self._error(self.start, f"keeps tensors in {what}")
            for tensor, array in zip(tensors, arrays, strict=True):
                if tensor.jax() is not array:
                    raise self._error(self.start, "writes to its arguments in place")
            outputs, found["tree"] = torch_pytree.tree_flatten(out)
            found["leaves"] = [
                (None, True) if isinstance(leaf, torch.Tensor) else (leaf, False)
                for leaf in outputs
            ]
            return [
                self._env.t2j_iso(x) for x in outputs if isinstance(x, torch.Tensor)
            ]

        layer = {
            name: jax.ShapeDtypeStruct(whole.shape[1:], whole.dtype)
            for name, whole in self.runner.weights.items()
        }
        traced, self._structs = jax.make_jaxpr(run, return_shape=True)(layer, arrays)
        self._traced = rotations_joined(traced)
        self._out_leaves, self._out_tree = found["leaves"], found["tree"]

    def _is_known(self, leaf: Any) -> bool:
        """Whether a tensor's values are known while tracing: a mask, an index.

        The first block's code may ask for these values, and so may the scan.
        """
        array = self._env.t2j_iso(leaf)
        known = not isinstance(array, jax.core.Tracer)
        return known and not jnp.issubdtype(array.dtype, jnp.inexact)

    @property
    def done(self) -> bool:
        """Whether the last block of the stack was called."""
        return self.last == len(self.runner.stack.blocks) - 1

    def add(self, index: int, leaves: list[Any], tree: Any) -> None:
        """Note the call of the next block.

        Raises:
            PluginError: it is not the next block, or not called on the state of the
                block before and the same arguments otherwise.
        """
        if index != self.last + 1:
            raise self._error(
                index,
                f"runs after {self.runner.stack.block_name(self.last)}; stacked blocks "
                "run in order",
            )
        if tree != self.tree or len(leaves) != len(self.leaves):
            raise self._error(index, "is called with other arguments than the first")
        state: dict[int, int] = {}
        for position, (leaf, first) in enumerate(zip(leaves, self.leaves, strict=True)):
            owner = owner_of(leaf)
            if isinstance(owner, _Output) and owner.chain is self:
                if owner.block != self.last:
                    raise self._error(index, "takes the state of an earlier block")
                if was_written(leaf):
                    raise self._error(index, "takes a state that was written to")
                state[position] = owner.index
            elif not _same(leaf, first):
                raise self._error(
                    index,
                    f"is called with another argument ({_text(leaf)}, not "
                    f"{_text(first)}) than the blocks before it, and it is not what "
                    "the block before returned",
                )
        if not state:
            raise self._error(index, "does not take what the block before returned")
        if self.state is None:
            self._check_state(index, state)
            self.state = state
        elif state != self.state:
            raise self._error(index, "takes the state in other places")
        if self.last in self.ran:
            # The state was read: a new scan continues from here.
            before = self.ran[self.last]
            arrays = list(self.starts[max(self.starts)])
            for position, output in state.items():
                arrays[self._slot[position]] = before[output]
            self.starts[index] = arrays
        self.last = index

    def output(self, index: int) -> Any:
        """The result of block ``index``: deferred tensors, all else unchanged."""

        def make(number: int) -> torch.Tensor:
            def read() -> jax.Array:
                array: jax.Array = self.run(index)[number]
                return array

            owner = _Output(self, index, number)
            return deferred(self._structs[number], self._env, read, owner)

        tensors = map(make, range(len(self._structs)))
        leaves = [
            next(tensors) if is_tensor else leaf for leaf, is_tensor in self._out_leaves
        ]
        return torch_pytree.tree_unflatten(leaves, self._out_tree)

    def run(self, index: int) -> list[Any]:
        """The outputs of block ``index``."""
        if index in self.ran:
            return self.ran[index]
        start = max(s for s in self.starts if s <= index)
        arrays = self.starts[start]
        state = self.state or {}
        handed_on = set(state.values()) == set(range(len(self._structs)))
        # The last block runs by itself if it returns more than the state.
        alone = index == start or not handed_on
        stop = index if alone else index + 1
        if stop > start:
            arrays = self._scan(start, stop, arrays)
        if alone:
            layer = {
                name: jax.lax.index_in_dim(whole, index, keepdims=False)
                for name, whole in self.runner.weights.items()
            }
            outputs = self._block(layer, arrays)
        else:
            where = {output: self._slot[p] for p, output in state.items()}
            outputs = [arrays[where[number]] for number in range(len(self._structs))]
        self.ran[index] = outputs
        return outputs

    def _scan(self, start: int, stop: int, arrays: list[Any]) -> list[Any]:
        """The arguments of block ``stop``."""
        assert self.state is not None
        slots = [self._slot[position] for position in self.state]
        outputs = list(self.state.values())

        def step(values: list[Any], layer: Mapping[str, Any]) -> list[Any]:
            given = list(arrays)
            for slot, value in zip(slots, values, strict=True):
                given[slot] = value
            out = self._block(layer, given)
            return [out[number] for number in outputs]

        def part(carry: tuple[Any, list[Any]], _: None) -> Any:
            index, values = carry
            layer = {
                name: jax.lax.dynamic_index_in_dim(
                    whole, index, keepdims=False, allow_negative_indices=False
                )
                for name, whole in weights.items()
            }
            return (index + 1, step(values, layer)), None

        weights = dict(self.runner.weights)
        count, values = stop - start, [arrays[slot] for slot in slots]
        if count == len(self.runner.stack.blocks):
            values, _ = jax.lax.scan(lambda v, w: (step(v, w), None), values, weights)
        else:
            # Layers are picked by their index: cutting the stack would copy it.
            (_, values), _ = jax.lax.scan(part, (start, values), length=count)
        after = list(arrays)
        for slot, value in zip(slots, values, strict=True):
            after[slot] = value
        return after

    def _block(self, layer: Mapping[str, Any], arrays: list[Any]) -> list[Any]:
        """One block on the weights ``layer``."""
        # Gather inside the loop: before the loop all blocks would be whole at once.
        constrain = jax.lax.with_sharding_constraint
        whole = {n: constrain(layer[n], s) for n, s in self.runner.gathered.items()}
        flat = jax.tree.leaves(({**layer, **whole}, arrays))
        with compat.without_folding():  # a block may ask for its place on the mesh
            out: list[Any] = jax.extend.core.jaxpr_as_fun(self._traced)(*flat)
        return out

    def _check_state(self, index: int, state: Mapping[int, int]) -> None:
        arrays = self.starts[self.start]
        for position, output in state.items():
            given, struct = arrays[self._slot[position]], self._structs[output]
            if (given.shape, given.dtype) != (struct.shape, struct.dtype):
                raise self._error(
                    self.start,
                    f"takes {given.dtype} {[*given.shape]} and returns {struct.dtype} "
                    f"{[*struct.shape]} in its place for "
                    f"{self.runner.stack.block_name(index)}",
                )

    def _error(self, index: int, problem: str) -> StackError:
        stack = self.runner.stack
        return StackError(
            stack.path,
            f"stacked blocks: {stack.block_name(index)} {problem}. A loop that does "
            "more than hand the state from block to block cannot be one scan; take "
            f"{stack.path!r} out of Component.stacked",
        )


@dataclass(frozen=True, slots=True)
class _Output:
    """A deferred tensor's block, and its place among the block's outputs."""

    chain: _Chain
    block: int
    index: int


def _is_array(leaf: Any) -> bool:
    """Whether an argument is a tensor of the traced program."""
    from torchax.tensor import Tensor
    from torchax.view import View

    return isinstance(leaf, torch.Tensor) and isinstance(leaf, Tensor | View)


def _strong(x: jax.Array) -> jax.Array:
    """``x`` with a dtype that is not weak, as a scan's carry needs it."""
    return jnp.asarray(x, dtype=x.dtype)


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments of blocks are one and the same."""
    if one is other:
        return True
    plain = bool | int | float | str | None
    return isinstance(one, plain) and type(one) is type(other) and bool(one == other)


def _holds(leaf: Any) -> bool:
    """Whether an argument is no tensor and holds some."""
    return not isinstance(leaf, torch.Tensor) and any(True for _ in _tensors_in(leaf))


def _tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors that an object holds, a cache of keys and values say."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not callable(value):
        inside = value.values() if isinstance(value, Mapping) else value
        if not isinstance(value, Mapping | list | tuple):
            inside = getattr(value, "__dict__", {}).values()
        for part in inside:
            yield from _tensors_in(part, depth - 1)


def _text(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return repr(value)[:60] if shape is None else f"a tensor {[*shape]}"
