"""Upstream's weights under the names and in the layouts of the Flax VAE.

Everything comes from the abstract module: names, shapes and where each of a tensor's
dims goes. No weight is made up on the way, and each tensor is handled by itself, so
that a checkpoint can be streamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from tpuport.errors import WeightsError
from tpuport.models.cogvideox.flax_vae import FlaxVae, vae_config

Array = TypeVar("Array")


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One weight.

    Attributes:
        name: the dotted path in the module, such as ``"decoder.conv_in.kernel"``.
        stored: upstream's name.
        order: which of the stored dims stands at each of ours.
        shape: here.
    """

    name: str
    stored: str
    order: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        shape = [0] * len(self.order)
        for ours, theirs in enumerate(self.order):
            shape[theirs] = self.shape[ours]
        return tuple(shape)


class FlaxWeights:
    """The weights of the VAE of a config.

    Args:
        config: upstream's.

    Raises:
        NotImplementedError: an option that the Flax VAE does not have.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        known = vae_config(config)
        abstract = nnx.eval_shape(lambda: FlaxVae(known))
        self._graph, state = nnx.split(abstract)
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._weights: dict[str, Weight] = {}
        tables = {
            path: module.STORED
            for path, module in nnx.iter_modules(abstract)
            if hasattr(module, "STORED")
        }
        for path, value in nnx.to_flat_state(state):
            *parent, leaf = path
            stored, order = tables[tuple(parent)][leaf]
            name = ".".join(str(part) for part in path)
            self._paths[name] = tuple(path)
            self._weights[name] = Weight(
                name=name,
                stored=".".join([*(str(part) for part in parent), stored]),
                order=order,
                shape=tuple(value.shape),
            )

    @property
    def by_name(self) -> Mapping[str, Weight]:
        """Every weight by its name here."""
        return self._weights

    @cached_property
    def by_stored_name(self) -> Mapping[str, Weight]:
        """Every weight by upstream's name."""
        return {weight.stored: weight for weight in self._weights.values()}

    def check(self, stored: Iterable[str]) -> None:
        """Compare a checkpoint's names with the module's.

        Raises:
            WeightsError: some are missing, or some are unknown.
        """
        found = set(stored)
        missing = sorted(self.by_stored_name.keys() - found)
        unknown = sorted(found - self.by_stored_name.keys())
        if missing or unknown:
            said = [
                f"{len(names)} {what}: {', '.join(names[:5])}"
                + (" ..." if len(names) > 5 else "")
                for what, names in (("missing", missing), ("unknown", unknown))
                if names
            ]
            raise WeightsError(
                "the checkpoint does not fit the Flax VAE of its config: "
                f"{'; '.join(said)}. Check config.json, or use the torchax VAE"
            )

    def convert(self, stored: str, array: Array) -> tuple[str, Array]:
        """One tensor of the checkpoint -> (name here, the array with its dims turned).

        Args:
            stored: upstream's name.
            array: numpy, torch or JAX; a view of it is returned where it can be.

        Raises:
            WeightsError: no such weight, or one of another shape.
        """
        weight = self.by_stored_name.get(stored)
        if weight is None:
            raise WeightsError(
                f"the checkpoint has {stored!r}, which the Flax VAE of its config does "
                "not; check config.json"
            )
        values: Any = array
        if tuple(values.shape) != weight.stored_shape:
            raise WeightsError(
                f"{stored} has the shape {tuple(values.shape)}; its config says "
                f"{weight.stored_shape}"
            )
        turn = values.permute if hasattr(values, "permute") else values.transpose
        return weight.name, turn(weight.order)

    def bind(self, arrays: Mapping[str, Any]) -> FlaxVae:
        """The module with these weights: arrays, or tracers inside a program.

        Args:
            arrays: by name, all of them or those of the parts that are used.

        Raises:
            WeightsError: an unknown name.
        """
        unknown = sorted(arrays.keys() - self._weights.keys())
        if unknown:
            raise WeightsError(f"the Flax VAE has no weight {unknown[0]!r}")
        # A weight of a part that does not run stands as its shape; using it fails.
        abstract = {
            name: nnx.Param(arrays.get(name, _shape(weight)))
            for name, weight in self._weights.items()
        }
        state = nnx.from_flat_state(
            [(self._paths[name], value) for name, value in abstract.items()]
        )
        module: FlaxVae = nnx.merge(self._graph, state)
        return module


def _shape(weight: Weight) -> Any:
    return jax.ShapeDtypeStruct(weight.shape, jnp.float32)
