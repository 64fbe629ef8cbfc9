"""A torch module as a pure function of weights and inputs.

One object is called on real arrays, lowered on abstract arrays, and sharded: what is
planned is what runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch.nn.utils.stateless import _reparametrize_module

from tpuport.core import compat
from tpuport.core.tracing.block_scan import scanned, slices
from tpuport.core.tracing.block_stacks import Stack
from tpuport.core.tracing.runtime import Runtime

Weights = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightNames:
    """The tensors of a module by role.

    Attributes:
        stored: parameters and persistent buffers, tied ones under one name.
        computed: non-persistent buffers, which no checkpoint holds.
        tied: every other name of a stored tensor -> its stored name.
    """

    stored: tuple[str, ...]
    computed: tuple[str, ...]
    tied: Mapping[str, str]

    @classmethod
    def of(cls, module: torch.nn.Module) -> WeightNames:
        """Collect the names of ``module``, which may be on the meta device."""
        first: dict[int, str] = {}
        stored: list[str] = []
        computed: list[str] = []
        tied: dict[str, str] = {}
        persistent = set(module.state_dict(keep_vars=True))
        tensors = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in tensors:
            if id(tensor) in first:
                tied[name] = first[id(tensor)]
                continue
            first[id(tensor)] = name
            (stored if name in persistent else computed).append(name)
        return cls(stored=tuple(stored), computed=tuple(computed), tied=tied)


def _arrays(names: WeightNames, stacks: Sequence[Stack]) -> dict[str, tuple[str, ...]]:
    """The arrays that hold a module's tensors; see :class:`PortedModule`."""
    of: dict[str, tuple[str, tuple[str, ...]]] = {}
    for stack in stacks:
        for array, members in stack.arrays().items():
            of |= dict.fromkeys(members, (array, members))
    return dict(
        of.get(name, (name, (name,))) for name in (*names.stored, *names.computed)
    )


class PortedModule:
    """A torch module whose weights live outside of it.

    Args:
        module: the skeleton; its own tensors are never read while tracing.
        runtime: the environment torch code is traced in.
        stacks: blocks whose weights are held as one array per name and which run under
            one scan.

    Attributes:
        names: the tensors, by their names in the module.
        arrays: the weights: the name of each array -> the tensors in the array. One
            tensor, or the tensors of all blocks of a stack along a new leading dim,
            under a name such as ``blocks.*.linear.weight``.
        gathered: sharding of one block, by array, for stacked arrays whose blocks are
            gathered for use.
        streamed: sharding of one block on the devices, by array, for stacked arrays
            that wait in the host's memory.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        runtime: Runtime,
        stacks: Sequence[Stack] = (),
    ) -> None:
        self.module = module
        self.runtime = runtime
        self.names = WeightNames.of(module)
        self.stacks = tuple(stacks)
        self.arrays: Mapping[str, tuple[str, ...]] = _arrays(self.names, self.stacks)
        self.gathered: Mapping[str, jax.sharding.NamedSharding] = {}
        self.streamed: Mapping[str, jax.sharding.NamedSharding] = {}

    def call(self, weights: Weights, run: Callable[[Any], Any], given: Any) -> Any:
        """``run(given)`` with these weights in the module and tensors for arrays.

        Args:
            weights: one array per name in :attr:`arrays`.
            run: uses the module, in a tracing context.
            given: a tree of JAX arrays, or of anything else.

        Returns:
            What ``run`` returns, with JAX arrays in place of tensors.

        Raises:
            StackError: the module does more with stacked blocks than run one after the
                other.
        """
        env = self.runtime.env
        values = dict(weights)
        loaded = [s for s in self.stacks if s.arrays().keys() <= values.keys()]
        stacked = {array for stack in loaded for array in stack.arrays()}
        for alias, name in self.names.tied.items():
            values[alias] = values[name]
        with self.runtime.tracing():
            tensors = env.j2t_iso({k: v for k, v in values.items() if k not in stacked})
            for stack in loaded:
                tensors |= slices(stack, values, env, self.streamed)
            with (
                _eval_mode(self.module),
                _reparametrize_module(self.module, tensors),
                scanned(loaded, values, env, self.gathered, self.streamed),
            ):
                return env.t2j_iso(run(env.j2t_iso(given)))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The module's own tensors by name; a tied tensor has several names."""
        tensors = dict(self.module.named_parameters(remove_duplicate=False))
        tensors.update(self.module.named_buffers(remove_duplicate=False))
        return tensors

    def stored(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint holds, by name."""
        tensors = self.tensors()
        return {name: tensors[name] for name in self.names.stored}

    def leading(self, array: str) -> tuple[int, ...]:
        """The dims of an array in front of the dims of its tensors."""
        count = len(self.arrays[array])
        return (count,) if count > 1 else ()


def constrain(
    mesh: jax.sharding.Mesh | None, x: jax.Array, *axes: str | None
) -> jax.Array:
    """``x`` split over mesh axes, one per leading dim.

    An axis that does not divide its dim leaves that dim whole.
    """
    if mesh is None or mesh.size == 1:
        return x
    fitting = [
        axis if axis and x.shape[dim] % mesh.shape[axis] == 0 else None
        for dim, axis in enumerate(axes)
    ]
    sharding = NamedSharding(mesh, PartitionSpec(*fitting))
    return jax.lax.with_sharding_constraint(x, sharding)


def on_devices(
    mesh: jax.sharding.Mesh | None,
    run: Callable[..., jax.Array],
    arrays: Sequence[jax.Array | None],
    split: Sequence[tuple[str | None, ...]],
    result: tuple[str | None, ...],
) -> jax.Array:
    """``run`` on each device's part of the arrays.

    Args:
        split: the mesh axis that splits each dim of each array.
        result: the mesh axis that splits each dim of the result.
    """
    if mesh is None or mesh.size == 1:
        return run(*arrays)
    out: jax.Array = compat.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(PartitionSpec(*axes) for axes in split),
        out_specs=PartitionSpec(*result),
    )(*arrays)
    return out


@contextlib.contextmanager
def _eval_mode(module: torch.nn.Module) -> Iterator[None]:
    """No dropout in this context; the caller's training flags are restored."""
    training = [child for child in module.modules() if child.training]
    for child in training:
        child.training = False
    try:
        yield
    finally:
        for child in training:
            child.training = True
