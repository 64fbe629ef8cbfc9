"""Upstream's weights under the names and in the layouts of the Flax VAE.

Everything comes from the abstract module: names, shapes and where each of a tensor's
dims goes. No weight is made up on the way, and each tensor is handled by itself, so
that a checkpoint can be streamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tpuport.core.weights.jax_module import Weight, WeightMap
from tpuport.errors import WeightsError
from tpuport.models.cogvideox.flax_vae import FlaxVae, vae_config


class FlaxWeights(WeightMap):
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
        tables = {
            path: module.STORED
            for path, module in nnx.iter_modules(abstract)
            if hasattr(module, "STORED")
        }
        self._paths: dict[str, tuple[Any, ...]] = {}
        weights = []
        for path, value in nnx.to_flat_state(state):
            *parent, leaf = path
            stored, order = tables[tuple(parent)][leaf]
            stored = ".".join([*map(str, parent), stored])
            name = ".".join(map(str, path))
            self._paths[name] = tuple(path)
            weights.append(Weight(name, stored, order, tuple(value.shape)))
        super().__init__("Flax VAE", weights)

    def bind(self, arrays: Mapping[str, Any]) -> FlaxVae:
        """See :meth:`WeightMap.bind`.

        Raises:
            WeightsError: an unknown name.
        """
        unknown = sorted(arrays.keys() - self.by_name.keys())
        if unknown:
            raise WeightsError(f"the Flax VAE has no weight {unknown[0]!r}")

        def leaf(name: str, weight: Weight) -> nnx.Param[Any]:
            # A weight of a part that does not run stands as its shape: using it fails.
            shape = jax.ShapeDtypeStruct(weight.shape, jnp.float32)
            return nnx.Param(arrays.get(name, shape))

        state = nnx.from_flat_state(
            [(self._paths[name], leaf(name, w)) for name, w in self.by_name.items()]
        )
        module: FlaxVae = nnx.merge(self._graph, state)
        return module
