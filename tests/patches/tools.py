"""Torch functions as JAX functions, with a runtime's overrides and without them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.tracing.runtime import Runtime

Arrays = Callable[..., Any]


def traced(runtime: Runtime, function: Callable[..., Any]) -> Arrays:
    """``function`` in a traced block: what a port runs."""

    def call(*arrays: Any) -> Any:
        with runtime.tracing() as env:
            return env.t2j_iso(function(*env.j2t_iso(arrays)))

    return call


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
