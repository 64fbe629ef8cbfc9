"""Stacked blocks under one ``lax.scan``, with upstream's forward as it is.

Upstream's loop calls one block after the other. While :func:`scanned` holds, a call of
a stacked block computes nothing: the call is noted and returns deferred tensors. When
something reads a deferred tensor, the blocks called so far run as one scan over the
stacked weights, whose body is the first block's forward, traced once. A loop that only
hands the state on becomes one scan; a loop that reads the state on the way gets one
more scan; a loop that does anything else between its blocks is refused, by name.

Where some kinds of blocks take turns, the body is one block of each kind.

The state is found by looking: the arguments of a block that the block before returned.
All other arguments must be the very same objects for every block of a kind, or tensors
alike that were all there before the first block ran: a text of each block's own.

Weights that wait in the host's memory stream: while a round of blocks computes, the
weights of the next round are on their way. The loop carries them, and its body is two
rounds: with one, XLA fetches them into the buffer that the round reads, and so begins
only after the round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as torch_pytree

from tpuport.core.tracing.block_stacks import Stack, StackError, forwards_replaced
from tpuport.core.tracing.block_trace import BlockCall, TracedBlock, Unscannable, same
from tpuport.core.tracing.deferred_tensors import deferred

#: Blocks, at most, that one call of a module calls in another way than those before, or
#: out of order. A scan ends there, and the next one begins: each is compiled by itself.
MOST_BREAKS = 4


@contextlib.contextmanager
def scanned(
    stacks: Sequence[Stack],
    weights: Mapping[str, jax.Array],
    env: Any,
    gathered: Mapping[str, jax.sharding.NamedSharding],
    streamed: Mapping[str, jax.sharding.NamedSharding],
) -> Iterator[None]:
    """In this block calls of stacked blocks run under scans.

    Args:
        weights: has the array of every tensor of every stack.
        env: the torchax environment, active.
        gathered: by array, the sharding in which a block uses a weight that is held in
            more parts.
        streamed: by array, the sharding of one block on the devices of a weight that
            waits in the host's memory.

    Raises:
        StackError: from a block's call, when the loop over the blocks does more than
            hand their state on.
    """
    replacements: list[tuple[torch.nn.Module, Callable[..., Any]]] = []
    for stack in stacks:
        runner = _Runner(stack, weights, env, gathered, streamed)
        replacements += [
            (block, runner.forward_of(index, block))
            for index, block in enumerate(stack.blocks)
        ]
    with forwards_replaced(replacements):
        yield


def slices(
    stack: Stack,
    weights: Mapping[str, jax.Array],
    env: Any,
    streamed: Mapping[str, jax.sharding.NamedSharding],
) -> dict[str, torch.Tensor]:
    """The tensors of each block by their own names, cut out when they are read."""
    found: dict[str, torch.Tensor] = {}
    for array, members in stack.arrays().items():
        whole = weights[array]
        struct = jax.ShapeDtypeStruct(whole.shape[1:], whole.dtype)
        for index, name in enumerate(members):

            def read(array: str = array, index: int = index) -> jax.Array:
                one = jax.lax.index_in_dim(weights[array], index, keepdims=False)
                return _on_device(one, streamed.get(array))

            found[name] = deferred(struct, env, read)
    return found


def _on_device(x: jax.Array, place: jax.sharding.NamedSharding | None) -> jax.Array:
    """``x`` on the devices; without a place it is there."""
    return x if place is None else jax.device_put(x, place)


def _cut(whole: jax.Array, index: Any) -> jax.Array:
    """One of the arrays along the leading dim."""
    one: jax.Array = jax.lax.dynamic_index_in_dim(
        whole, index, keepdims=False, allow_negative_indices=False
    )
    return one


@dataclass(eq=False)
class _Runner:
    """The blocks of a stack, during one call of the module."""

    stack: Stack
    weights: Mapping[str, jax.Array]
    env: Any
    gathered: Mapping[str, jax.sharding.NamedSharding]
    streamed: Mapping[str, jax.sharding.NamedSharding]
    chain: _Chain | None = None
    breaks: int = 0

    def turn(self, index: int) -> int:
        """Of which kind a block is."""
        return index % self.stack.period

    def arrays(self, turn: int) -> dict[str, jax.Array]:
        """The weights of one kind of block, by tensor."""
        names = self.stack.names(turn)
        return {tensor: self.weights[name] for tensor, name in names.items()}

    def fetched(self, array: str, place: Any) -> jax.Array:
        """One block's part of an array, on the devices."""
        return _on_device(_cut(self.weights[array], place), self.streamed.get(array))

    def round(self, start: int, number: Any) -> dict[str, jax.Array]:
        """What a round of a scan streams, by array.

        Args:
            start: the scan's first block.
            number: of the round.
        """
        turns = self.stack.period
        return {
            array: self.fetched(array, number + index // turns)
            for index in range(start, start + turns)
            for array in self.stack.names(self.turn(index)).values()
            if array in self.streamed
        }

    def traced(self, index: int, call: BlockCall, **state: Any) -> TracedBlock:
        """A block's call, traced for all blocks of its kind."""
        names = self.stack.names(self.turn(index))
        try:
            return TracedBlock(
                block=self.stack.blocks[index],
                call=call,
                weights=self.arrays(self.turn(index)),
                gathered={
                    tensor: self.gathered[name]
                    for tensor, name in names.items()
                    if name in self.gathered
                },
                env=self.env,
                **state,
            )
        except Unscannable as error:
            raise self.error(index, str(error)) from None

    def forward_of(self, index: int, block: torch.nn.Module) -> Callable[..., Any]:
        original = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = BlockCall(original, *torch_pytree.tree_flatten((args, kwargs)))
            # A loop may end early, and the next loop starts at the first block again. A
            # loop that starts later belongs to a forward from a captured state.
            if self.chain is None or self.chain.done or index == 0:
                self.chain = _Chain(self, index, call)
                return self.chain.output(index)
            try:
                self.chain.add(index, call)
            except StackError:
                # Guidance that skips a layer calls one block in another way.
                if self.breaks == MOST_BREAKS:
                    raise
                self.breaks += 1
                self.chain = _Chain(self, index, call)
            return self.chain.output(index)

        return forward

    def error(self, index: int, problem: str) -> StackError:
        text = f"stacked blocks: {self.stack.name(index)} {problem}"
        return StackError(self.stack.path, text)


@dataclass(eq=False)
class _Chain:
    """Blocks that were called one after the other, each on the state of the one before.

    Attributes:
        runner: the runner of the blocks.
        start: the first block called.
        first: the call of this block.
        last: the last block called so far.
        traced: by turn, the first call of a block.
        starts: where scans begin -> the arguments there; a scan begins at a block if
            the state in front of the block was read.
        ran: the outputs of the blocks that ran.
        own: block -> slot -> an array that the first block of the turn got another of;
            a block where a scan begins has none.
    """

    runner: _Runner
    start: int
    first: BlockCall
    last: int = -1
    traced: dict[int, TracedBlock] = field(default_factory=dict)
    starts: dict[int, list[Any]] = field(default_factory=dict)
    ran: dict[int, list[Any]] = field(default_factory=dict)
    own: dict[int, dict[int, jax.Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = self.start
        traced = self.runner.traced(self.start, self.first)
        self.traced[self.runner.turn(self.start)] = traced
        self.starts[self.start] = traced.arrays

    @property
    def done(self) -> bool:
        """Whether the last block of the stack was called."""
        return self.last == len(self.runner.stack.blocks) - 1

    def add(self, index: int, call: BlockCall) -> None:
        """Note the call of the next block.

        Raises:
            StackError: it is not the next block, or not called on the state of the
                block before and the same arguments otherwise.
        """
        if index != self.last + 1:
            before = self.runner.stack.name(self.last)
            raise self.runner.error(index, f"runs after {before}")
        state = self._state(index, call)
        known = self.traced.get(self.runner.turn(index))
        own = {} if known is None else self._check(index, call, state, known)
        if not state:
            raise self.runner.error(index, "does not take what the block before gave")
        if known is None:
            structs = self._at(self.last).structs
            handed = {place: structs[output] for place, output in state.items()}
            known = self.runner.traced(index, call, handed=handed, state=state)
            self.traced[self.runner.turn(index)] = known
        elif known.state is None:
            self._check_state(index, state, known)
            known.state = state
        elif state != known.state:
            raise self.runner.error(index, "takes the state in other places")
        if self.last in self.ran:
            # The state was read: a new scan continues from here.
            self.starts[index] = known.given(self.ran[self.last])
        self.own[index] = own
        self.last = index

    def output(self, index: int) -> Any:
        """The result of block ``index``: deferred tensors, all else unchanged."""
        traced = self._at(index)

        def make(number: int) -> torch.Tensor:
            def read() -> jax.Array:
                array: jax.Array = self.run(index)[number]
                return array

            owner = _Output(self, index, number)
            return deferred(traced.structs[number], self.runner.env, read, owner)

        return traced.wrapped(make)

    def run(self, index: int) -> list[Any]:
        """The outputs of block ``index``."""
        if index in self.ran:
            return self.ran[index]
        start = max(s for s in self.starts if s <= index)
        arrays = self.starts[start]
        count = len(self._at(index).structs)
        after = self.traced.get(self.runner.turn(index + 1))
        state = (after.state if after else None) or {}
        # The last block runs by itself if it returns more than the state.
        alone = index == start or {*state.values()} != {*range(count)}
        arrays = self._advance(start, index if alone else index + 1, arrays)
        if alone:
            outputs = self._block(index, arrays)
        else:
            assert after is not None
            where = {output: after.slot[place] for place, output in state.items()}
            outputs = [arrays[where[number]] for number in range(count)]
        self.ran[index] = outputs
        return outputs

    def _at(self, index: int) -> TracedBlock:
        return self.traced[self.runner.turn(index)]

    def _advance(self, start: int, stop: int, arrays: list[Any]) -> list[Any]:
        """The arguments of block ``stop`` from those of block ``start``."""
        rounds = (stop - start) // self.runner.stack.period
        if rounds:
            arrays = self._scan(start, rounds, arrays)
        for index in range(start + rounds * self.runner.stack.period, stop):
            arrays = self._at(index + 1).given(self._block(index, arrays))
            arrays = self._owned(index + 1, arrays)
        return arrays

    def _owned(self, index: int, arrays: Sequence[Any]) -> list[Any]:
        """``arrays`` with those that block ``index`` alone is given."""
        own = self.own.get(index, {})
        return [own.get(slot, array) for slot, array in enumerate(arrays)]

    def _scan(self, start: int, rounds: int, arrays: list[Any]) -> list[Any]:
        """The arguments of a block of the same turn, so many rounds after ``start``."""
        traced = self._at(start)
        state = traced.state
        assert state is not None
        slots = [traced.slot[place] for place in state]
        turns = self.runner.stack.period
        indices = range(start, start + turns)

        def step(carry: tuple[Any, list[Any], dict[str, Any]], own: Any) -> Any:
            place, values, here = carry
            coming: dict[str, jax.Array] = {}
            if here:
                # The last round fetches its own weights again: a branch would wait.
                coming = self.runner.round(start, jnp.minimum(place + 1, rounds - 1))
            given = list(arrays)
            for slot, value in zip(slots, values, strict=True):
                given[slot] = value
            for index, more in zip(indices, own, strict=True):
                for slot, array in more.items():
                    given[slot] = array
                out = self._block(index, given, place + index // turns, here)
                given = self._at(index + 1).given(out)
            return (place + 1, [given[slot] for slot in slots], coming), None

        stop = start + rounds * turns
        own = [self._stacked(range(index, stop, turns)) for index in indices]
        # Layers are picked by their index: cutting a part of the stack would copy it.
        here = self.runner.round(start, 0)
        carry = (0, [arrays[slot] for slot in slots], here)
        (_, values, _), _ = jax.lax.scan(
            step, carry, own, length=rounds, unroll=2 if here else 1
        )
        after = self._owned(stop, arrays)
        for slot, value in zip(slots, values, strict=True):
            after[slot] = value
        return after

    def _stacked(self, blocks: range) -> dict[int, jax.Array]:
        """By slot, the arrays that not all of these blocks of one turn are given."""
        first = self._at(blocks[0]).arrays
        slots = {slot for index in blocks for slot in self.own.get(index, {})}
        return {
            slot: jnp.stack([self._owned(index, first)[slot] for index in blocks])
            for slot in sorted(slots)
        }

    def _block(
        self,
        index: int,
        arrays: list[Any],
        place: Any = None,
        here: Mapping[str, jax.Array] | None = None,
    ) -> list[Any]:
        """A block on its weights.

        Args:
            place: of a block among those of its kind; ``None`` for block ``index``.
            here: its weights that have come from the host, by array.
        """
        if place is None:
            place = index // self.runner.stack.period
        here = here or {}
        layer = {
            tensor: here[array] if array in here else self.runner.fetched(array, place)
            for tensor, array in self.runner.stack.names(
                self.runner.turn(index)
            ).items()
        }
        return self._at(index)(layer, arrays)

    def _state(self, index: int, call: BlockCall) -> dict[int, int]:
        """Position among the arguments -> output of the block before; may be empty."""
        state: dict[int, int] = {}
        for position, leaf in enumerate(call.leaves):
            owner = getattr(leaf, "owner", None)
            if isinstance(owner, _Output) and owner.chain is self:
                if owner.block != self.last or leaf.written:
                    raise self.runner.error(index, "takes an earlier or altered state")
                state[position] = owner.index
        return state

    def _check(
        self, index: int, call: BlockCall, state: dict[int, int], known: TracedBlock
    ) -> dict[int, jax.Array]:
        """By slot, the arrays that the first block of this turn got others of."""
        own: dict[int, jax.Array] = {}
        if call.tree != known.call.tree or len(call.leaves) != len(known.call.leaves):
            raise self.runner.error(index, "is called with other arguments")
        for position, leaf in enumerate(call.leaves):
            if position in state or same(leaf, known.call.leaves[position]):
                continue
            array = known.alike(position, leaf)
            # What is made from the result of a block is there too late for its scan.
            if array is None or self.ran:
                raise self.runner.error(index, f"has another argument {position}")
            own[known.slot[position]] = array
        return own

    def _check_state(
        self, index: int, state: Mapping[int, int], known: TracedBlock
    ) -> None:
        for position, output in state.items():
            given = known.arrays[known.slot[position]]
            struct = self._at(self.last).structs[output]
            if (given.shape, given.dtype) != (struct.shape, struct.dtype):
                what = f"takes {given.dtype} {[*given.shape]}, not {struct}"
                raise self.runner.error(index, what)


@dataclass(frozen=True, slots=True)
class _Output:
    """A deferred tensor's block, and its place among the block's outputs."""

    chain: _Chain
    block: int
    index: int
