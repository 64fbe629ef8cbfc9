"""One block's forward, traced once for all blocks that are alike."""

from __future__ import annotations

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
from tpuport.core.tracing.pair_rotations import rotations_joined


class Unscannable(Exception):
    """What a block does that no block of a scan may do; the message is a predicate."""


@dataclass(frozen=True, slots=True)
class BlockCall:
    """A call of a block: its own forward, and the arguments, flattened."""

    forward: Callable[..., Any]
    leaves: list[Any]
    tree: Any


@dataclass(eq=False, kw_only=True)
class TracedBlock:
    """The first call of a block, as a program of weights and arrays.

    Args:
        block: the module.
        call: of the block.
        weights: the stacked arrays, by tensor of the block.
        gathered: by tensor, the sharding in which a block uses the tensor.
        env: the torchax environment, active.
        handed: position among the arguments -> shape of what the block before hands on
            there, if that did not run yet.
        state: position among the arguments -> which output of the block before;
            ``None`` while no block ran before this one.

    Attributes:
        arrays: the arguments that are arrays; ``None`` where the block before hands on.
        slot: positions among the arguments -> positions among the arrays.
        structs: shapes of the outputs that are tensors.

    Raises:
        Unscannable: the block does more than compute outputs of its arguments.
    """

    block: torch.nn.Module
    call: BlockCall
    weights: Mapping[str, jax.Array]
    gathered: Mapping[str, jax.sharding.NamedSharding]
    env: Any
    handed: Mapping[int, jax.ShapeDtypeStruct] = field(default_factory=dict)
    state: dict[int, int] | None = None

    def __post_init__(self) -> None:
        self._is_array = [
            place in self.handed or (_is_array(leaf) and not self._is_known(leaf))
            for place, leaf in enumerate(self.call.leaves)
        ]
        places = [place for place, is_array in enumerate(self._is_array) if is_array]
        self.slot = {place: slot for slot, place in enumerate(places)}
        self.arrays: list[Any] = [
            None
            if place in self.handed
            else _strong(self.env.t2j_iso(self.call.leaves[place]))
            for place in places
        ]
        given = [
            self.handed.get(place, array)
            for place, array in zip(places, self.arrays, strict=True)
        ]
        layer = {
            name: jax.ShapeDtypeStruct(whole.shape[1:], whole.dtype)
            for name, whole in self.weights.items()
        }
        traced, self.structs = jax.make_jaxpr(self._run, return_shape=True)(
            layer, given
        )
        self._traced = rotations_joined(traced)

    def __call__(self, layer: Mapping[str, Any], arrays: Sequence[Any]) -> list[Any]:
        """The outputs, on the weights ``layer``."""
        # Gather inside the loop: before the loop all blocks would be whole at once.
        constrain = jax.lax.with_sharding_constraint
        whole = {name: constrain(layer[name], s) for name, s in self.gathered.items()}
        flat = jax.tree.leaves(({**layer, **whole}, list(arrays)))
        with compat.without_folding():  # a block may ask for its place on the mesh
            out: list[Any] = jax.extend.core.jaxpr_as_fun(self._traced)(*flat)
        return out

    def given(self, outputs: Sequence[Any]) -> list[Any]:
        """The arrays of the call after a block that returned ``outputs``."""
        arrays = list(self.arrays)
        for position, output in (self.state or {}).items():
            arrays[self.slot[position]] = outputs[output]
        return arrays

    def alike(self, position: int, leaf: Any) -> jax.Array | None:
        """The array of an argument of another call, if it may stand in the first's."""
        first = self.arrays[self.slot[position]] if position in self.slot else None
        if first is None or not _is_array(leaf):
            return None
        array = _strong(self.env.t2j_iso(leaf))
        same_kind = (array.shape, array.dtype) == (first.shape, first.dtype)
        return array if same_kind else None

    def wrapped(self, make: Callable[[int], torch.Tensor]) -> Any:
        """What the block returns, with ``make(i)`` for tensor ``i``."""
        tensors = map(make, range(len(self.structs)))
        leaves = [
            next(tensors) if is_tensor else leaf for leaf, is_tensor in self._out_leaves
        ]
        return torch_pytree.tree_unflatten(leaves, self._out_tree)

    def _run(self, layer: Mapping[str, Any], arrays: list[Any]) -> list[Any]:
        tensors = self.env.j2t_iso(arrays)
        given = iter(tensors)
        leaves = [
            next(given) if is_array else leaf
            for leaf, is_array in zip(self.call.leaves, self._is_array, strict=True)
        ]
        args, kwargs = torch_pytree.tree_unflatten(leaves, self.call.tree)
        held = list(_tensors_in(self.call.leaves))
        with _reparametrize_module(self.block, self.env.j2t_iso(dict(layer))):
            out = self.call.forward(*args, **kwargs)
        after, tree = torch_pytree.tree_flatten((args, kwargs))
        if tree != self.call.tree or not all(map(same, after, leaves)):
            raise Unscannable("changes a list or dict that it is given")
        still = list(_tensors_in(self.call.leaves))
        if len(still) != len(held) or not all(map(same, still, held)):
            kinds = {type(leaf).__name__ for leaf in self.call.leaves if _holds(leaf)}
            what = ", ".join(sorted(kinds)) or "what it is given"
            raise Unscannable(f"keeps tensors in {what}")
        for tensor, array in zip(tensors, arrays, strict=True):
            if tensor.jax() is not array:
                raise Unscannable("writes to its arguments in place")
        outputs, self._out_tree = torch_pytree.tree_flatten(out)
        self._out_leaves = [
            (None, True) if isinstance(leaf, torch.Tensor) else (leaf, False)
            for leaf in outputs
        ]
        return [self.env.t2j_iso(x) for x in outputs if isinstance(x, torch.Tensor)]

    def _is_known(self, leaf: Any) -> bool:
        """Whether a tensor's values are known while tracing: a mask, an index.

        The first block's code may ask for these values, and so may the scan.
        """
        array = self.env.t2j_iso(leaf)
        known = not isinstance(array, jax.core.Tracer)
        return known and not jnp.issubdtype(array.dtype, jnp.inexact)


def _is_array(leaf: Any) -> bool:
    """Whether an argument is a tensor of the traced program."""
    from torchax.tensor import Tensor
    from torchax.view import View

    return isinstance(leaf, torch.Tensor) and isinstance(leaf, Tensor | View)


def _strong(x: jax.Array) -> jax.Array:
    """``x`` with a dtype that is not weak, as a scan's carry needs it."""
    return jnp.asarray(x, dtype=x.dtype)


def same(one: Any, other: Any) -> bool:
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
