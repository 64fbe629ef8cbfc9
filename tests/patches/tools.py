"""Torch functions as JAX functions, with a runtime's overrides and without them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.layers.exchanged_attention import EXCHANGED_ATTENTION
from tpuport.core.tracing.op_overrides import OpOverride
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.tracing.runtime import Runtime

Arrays = Callable[..., Any]


def model_runtime(*, overrides: Sequence[OpOverride] = (), **settings: Any) -> Runtime:
    """A runtime with attention's override, which every model has, and with these."""
    own = (one for one in overrides if one is not EXCHANGED_ATTENTION)
    return Runtime(overrides=(EXCHANGED_ATTENTION, *own), **settings)


def traced(runtime: Runtime, function: Callable[..., Any]) -> Arrays:
    """``function`` in a traced block: what a port runs."""

    def call(*arrays: Any) -> Any:
        with runtime.tracing() as env:
            return env.t2j_iso(function(*env.j2t_iso(arrays)))

    return call


def found_by(
    function: Callable[..., Any], *tensors: torch.Tensor, **settings: Any
) -> Any:
    """What ``function`` makes of tensors in a traced block, op by op, as torch's.

    ``settings`` are those of a runtime on one CPU.
    """
    runtime = model_runtime(**{"mesh": None, "platform": "cpu", **settings})
    arrays = [jnp.asarray(to_numpy(tensor)) for tensor in tensors]
    return jax.tree.map(to_torch, traced(runtime, function)(*arrays))


def by_torchax(runtime: Runtime, function: Callable[..., Any]) -> Arrays:
    """``function`` by torchax's own operators, in the same environment.

    After a traced block this is also what the block has left behind.
    """

    def call(*arrays: Any) -> Any:
        env = runtime.env
        with warnings.catch_warnings(), env:
            # Of torch's indices, as while tracing.
            warnings.filterwarnings("ignore", message="Explicitly requested dtype.*64")
            return env.t2j_iso(function(*env.j2t_iso(arrays)))

    return call


def apply(ported: PortedModule, weights: Any, *args: Any, **kwargs: Any) -> Any:
    """What the module's forward gives, as a function of JAX arrays."""

    def run(given: Any) -> Any:
        args, kwargs = given
        return ported.module(*args, **kwargs)

    return ported.call(weights, run, (args, kwargs))
