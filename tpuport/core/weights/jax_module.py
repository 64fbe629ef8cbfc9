"""A component in JAX alone, as :mod:`tpuport.core.tracing.ported_module` is for torch.

The component's sharding rules are written for the stored weights; each spec is permuted
here with the dims of its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.core.tracing.ported_module import Bound, Weights
from tpuport.core.tracing.runtime import Runtime
from tpuport.core.weights.sharding import ShardingPlan, named_shardings


class JaxModule:
    """A module written in JAX whose weights live outside of it.

    Args:
        weights: the weight map of the implementation for the config.
        runtime: the component's runtime; no torch code is traced in it.

    Attributes:
        arrays: array name -> the array's own name, in a tuple of one, as in
            :attr:`tpuport.core.tracing.ported_module.PortedModule.arrays`.
    """

    def __init__(self, weights: WeightMap, runtime: Runtime) -> None:
        self.map = weights
        self.runtime = runtime
        self.arrays: Mapping[str, tuple[str, ...]] = {
            weight.name: (weight.name,) for weight in weights.by_stored_name.values()
        }

    def bind(self, weights: Weights) -> BoundJaxModule:
        """This module with ``weights`` filled in, for use inside a program."""
        return BoundJaxModule(self, weights)

    def abstract_weights(
        self,
        plan: ShardingPlan,
        mesh: jax.sharding.Mesh,
        dtype: Any,
        used: Callable[[str], bool],
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of the arrays; nothing is read.

        Args:
            plan: plan of the stored tensors, by their names in upstream's module.
            dtype: dtype of all arrays.
            used: whether a stored tensor, by name, will be there.

        Raises:
            WeightsError: the plan is for other tensors.
            ShardingError: the plan has problems.
        """
        shardings = named_shardings(plan, mesh)
        self.map.check(shardings)
        found = {}
        for stored, weight in self.map.by_stored_name.items():
            if not used(stored):
                continue
            split = tuple(shardings[stored].spec)
            split += (None,) * (len(weight.order) - len(split))
            turned = PartitionSpec(*(split[dim] for dim in weight.order))
            found[weight.name] = jax.ShapeDtypeStruct(
                weight.shape, dtype, sharding=NamedSharding(mesh, turned)
            )
        return found


class BoundJaxModule(Bound[JaxModule]):
    """A JAX module inside a program; ``model.module()`` is the implementation."""

    def module(self) -> Any:
        """The implementation's module with these weights."""
        return self.ported.map.bind(self.weights)

    @property
    def dtype(self) -> Any:
        """The common dtype of all weights."""
        return next(iter(self.weights.values())).dtype

    @property
    def platform(self) -> str:
        """The platform that the program is lowered for."""
        return self.ported.runtime.platform


class StoredWeight(Protocol):
    """One weight of an implementation, and its stored tensor.

    Attributes:
        name: name in the implementation.
        stored: upstream's name, as in the component's sharding rules.
        order: the stored dim at each dim of the weight.
        shape: shape in the implementation.
    """

    @property
    def name(self) -> str: ...
    @property
    def stored(self) -> str: ...
    @property
    def order(self) -> tuple[int, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class WeightMap(Protocol):
    """The weights of an implementation for one config."""

    @property
    def by_stored_name(self) -> Mapping[str, StoredWeight]:
        """Every weight by upstream's name."""

    def check(self, stored: Iterable[str]) -> None:
        """Refuse a checkpoint with other names.

        Raises:
            WeightsError: names are missing or unknown.
        """

    def convert(self, stored: str, array: Any) -> tuple[str, Any]:
        """Name and array in the implementation, dims permuted, of a stored tensor.

        Raises:
            WeightsError: there is no such weight, or the shape differs.
        """

    def bind(self, arrays: Mapping[str, Any]) -> Any:
        """The module with these weights: arrays, or tracers inside a program."""
