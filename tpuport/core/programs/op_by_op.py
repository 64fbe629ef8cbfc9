"""Programs that are not compiled: each op runs by itself, for debugging.

An error then names the line of the op that made it, and a print or a breakpoint in a
program shows numbers. Loops run turn by turn. What has no smaller parts stays whole: an
op, a Pallas kernel, and an op of a program that is split over devices, on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tpuport.core.programs.components import Loaded
from tpuport.core.programs.executable_files import Traced
from tpuport.core.programs.lowering import placed
from tpuport.core.programs.program_store import Ready, attention_of, traced_of
from tpuport.core.reports import CompileReport
from tpuport.core.spec.request import Request
from tpuport.core.spec.stage import Program


class OpByOp:
    """Makes programs that can be called, without compiling them."""

    def __init__(self) -> None:
        self._ready: dict[tuple[str, str], tuple[Program, Loaded, Ready]] = {}

    def is_ready(self, stage: str, name: str, args: tuple[Any, Any, Any]) -> bool:
        """There is nothing to compile."""
        return True

    def clear(self) -> None:
        """Let go of every program."""
        self._ready.clear()

    def get(
        self,
        stage: str,
        name: str,
        program: Program,
        loaded: Loaded,
        args: tuple[Any, Any, Any],
        request: Request,
    ) -> tuple[Ready, CompileReport | None]:
        """The program, whatever the shapes."""
        known = self._ready.get((stage, name))
        if known is not None and known[0] is program and known[1] is loaded:
            return known[2], None
        ready = Ready(call=None, traced=Traced())
        ready.call = _runner(program, loaded, ready)
        self._ready[stage, name] = (program, loaded, ready)
        return ready, None


def _runner(program: Program, loaded: Loaded, ready: Ready) -> Callable[..., Any]:
    """``call(weights, carry, constants, inputs)``, which compiles nothing as a whole.

    The results are placed as the compiled program's are.
    """

    def run(weights: Any, carry: Any, constants: Any, inputs: Any) -> tuple[Any, Any]:
        return program.fn(loaded.ported.bind(weights), carry, constants, inputs)

    def call(weights: Any, carry: Any, constants: Any, inputs: Any) -> tuple[Any, Any]:

        runtime = loaded.ported.runtime
        split, places = placed(program, run, loaded, (carry, constants, inputs))
        with jax.disable_jit(), attention_of(runtime) as attention:
            made = split(weights, carry, constants, inputs)
        ready.traced = traced_of(runtime, attention)
        out: tuple[Any, Any] = jax.device_put(tuple(made), places)
        return out

    return call
