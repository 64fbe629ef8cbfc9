"""Programs that are not compiled: each op runs by itself, for debugging.

An error then names the line of the op that made it, and a print or a breakpoint in a
program shows numbers. Loops run turn by turn. What has no smaller parts stays whole: an
op, a Pallas kernel, and an op of a program that is split over devices, on all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from tpuport.core.programs.lowering import Traceable, Traced
from tpuport.core.programs.program_store import Ready


def op_by_op(asked: Traceable) -> Ready:
    """The program without compiling it; its results are placed as a compiled one's."""
    without_arrays = replace(asked, args=(None, None, None))

    def call(weights: Any, *args: Any) -> tuple[Any, Any]:
        program = replace(without_arrays, args=args)
        run, places = program.split()
        program.forget_records()
        with jax.disable_jit():
            made = run(weights, *args)
        ready.traced = Traced.of(program.loaded.ported.runtime)
        out: tuple[Any, Any] = jax.device_put(tuple(made), places)
        return out

    ready = Ready(call=call, traced=Traced())
    return ready
