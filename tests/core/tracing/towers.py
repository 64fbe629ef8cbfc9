"""A small module with a list of blocks, and how tests call it ported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tests.patches.tools import apply, model_runtime
from tpuport.core.arrays import to_numpy
from tpuport.core.tracing.block_stacks import Stack
from tpuport.core.tracing.forward_split import ForwardSplit, Where, capture, resume
from tpuport.core.tracing.ported_module import PortedModule

WIDTH = 6


class Scale:
    """A processor object, as attention modules have them."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Block(torch.nn.Module):
    """Two tensors of state, a condition, an optional table, a buffer, a processor."""

    def __init__(self, index: int = 0, width: int = WIDTH, factor: float = 0.5) -> None:
        super().__init__()
        self.index = index
        self.linear = torch.nn.Linear(WIDTH, width)
        self.mix = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.processor = Scale(factor)
        self.register_buffer("shift", torch.randn(WIDTH), persistent=False)

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        cond: torch.Tensor,
        *,
        tables: tuple[torch.Tensor, torch.Tensor] | None = None,
        gain: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        update = torch.tanh(self.linear(x) + self.shift) * cond[:, None]
        if tables is not None:
            update = update * tables[0] + tables[1]
        return x + gain * self.processor(update), y + self.mix(x.mean(1, keepdim=True))


Loop = Callable[..., Any]


class Tower(torch.nn.Module):
    """Blocks between two layers; how they are looped over is an argument."""

    def __init__(self, blocks: list[torch.nn.Module], loop: Loop) -> None:
        super().__init__()
        self.inlet = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList(blocks)
        self.outlet = torch.nn.Linear(WIDTH, WIDTH)
        self.loop = loop

    def forward(self, x: torch.Tensor, y: torch.Tensor, cond: torch.Tensor) -> Any:
        out = self.loop(self.blocks, self.inlet(x), y, cond)
        return (self.outlet(out[0]), *out[1:])


def plain(blocks: Any, x: Any, y: Any, cond: Any) -> Any:
    for block in blocks:
        x, y = block(x, y, cond)
    return x, y


def tower(loop: Loop = plain, count: int = 4, **changes: Any) -> Tower:
    torch.manual_seed(0)
    return Tower([Block(**changes) for _ in range(count)], loop).eval()


def inputs_of(batch: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, 3, WIDTH, generator=generator)
    y = torch.randn(batch, 1, WIDTH, generator=generator)
    return x, y, torch.rand(batch, 1, generator=generator)


def port(
    module: Any, *, stacked: bool = True, period: int = 1
) -> tuple[PortedModule, dict[str, jax.Array]]:
    """The module on one device with its own weights."""
    runtime = model_runtime(mesh=None, platform="cpu")
    stack = Stack("blocks", 0, tuple(module.blocks) if stacked else (), period)
    ported = PortedModule(module, runtime, (stack,) if stacked else ())
    tensors = ported.tensors()
    weights: dict[str, jax.Array] = {}
    for array, members in ported.arrays.items():
        values = [to_numpy(tensors[name]) for name in members]
        weights[array] = jnp.asarray(np.stack(values) if len(values) > 1 else values[0])
    return ported, weights


def arrays(tensors: tuple[torch.Tensor, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(to_numpy(t)) for t in tensors)


def call(ported: PortedModule, weights: Any, *inputs: Any) -> Any:
    return jax.jit(lambda w, args: apply(ported, w, *args))(weights, inputs)


def captured(
    ported: PortedModule, weights: Any, split: ForwardSplit, where: Where, *inputs: Any
) -> tuple[Any, dict[str, jax.Array]]:
    """What forward gives, and the state at ``where``."""

    def run(given: Any) -> Any:
        with capture(ported.module, split, where) as state:
            out = ported.module(*given)
        return out, dict(state)

    found: tuple[Any, dict[str, jax.Array]] = ported.call(weights, run, inputs)
    return found


def resumed(
    ported: PortedModule,
    weights: Any,
    split: ForwardSplit,
    where: Where,
    state: Any,
    *inputs: Any,
) -> Any:
    """What forward gives if it goes on from a state."""

    def run(given: Any) -> Any:
        state, inputs = given
        with resume(ported.module, split, where, state):
            return ported.module(*inputs)

    return ported.call(weights, run, (state, inputs))


def scans(function: Callable[..., Any], *args: Any) -> list[int]:
    """The lengths of the scans of a program, without those whose results go unused."""
    closed = jax.make_jaxpr(jax.jit(function))(*args)
    (inner,) = [e for e in closed.jaxpr.eqns if "jaxpr" in e.params]
    jaxpr = inner.params["jaxpr"].jaxpr
    from jax.interpreters import partial_eval

    used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return [e.params["length"] for e in used.eqns if e.primitive.name == "scan"]
