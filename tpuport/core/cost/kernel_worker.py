"""Compiles one kernel in a process of its own, and counts the cycles of its schedule.

Run as ``python -m tpuport.core.cost.kernel_worker FOLDER`` by
:mod:`tpuport.core.cost.kernel_cycles`, which puts ``request.json`` into the folder and
makes libtpu write its schedules to ``FOLDER/schedule``. Writes ``cost.json``, or
``refused.txt`` where the kernel or the compiler refuses what was asked.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpuport.core.cost.attention_case import AttentionCase, Blocks
from tpuport.core.cost.attention_kernels import build
from tpuport.core.cost.hlo import parse
from tpuport.core.cost.kernel_schedule import Execution, ScheduleError, read_dump
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.slices import smallest_of, topology_devices

_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "pred": "bool",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    **{f"s{n}": f"int{n}" for n in (4, 8, 16, 32)},
    **{f"u{n}": f"uint{n}" for n in (4, 8, 16, 32)},
}


def main(folder: Path) -> None:
    """Compile the kernel of a request and write what its schedule says."""
    request = json.loads((folder / "request.json").read_text())
    try:
        names, rest = _compile(request)
    except Exception as error:  # the kernel's refusals and the compiler's own
        (folder / "refused.txt").write_text(str(error))
        return
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise ScheduleError(f"compiled to {len(names)} kernels ({found}), not to one")
    schedule = read_dump(folder / "schedule", request["chip"], names[0])
    scalars = {int(n): value for n, value in request.get("scalars", {}).items()}
    way = usual(schedule.executions(scalars))
    # Two cores share a grid where one of its axes lets them.
    shared = way.grid not in rest.pop("grids")
    cost = {
        "kernel": names[0],
        "grid": way.grid,
        "cores": chip(request["chip"]).cores if shared else 1,
        "bundles": schedule.program.bundles,
        "cycles": way.cycles,
        "busiest": way.busiest,
        "utilization": way.utilization,
        "spills": way.used.get("VSTORE:SPILL", 0.0) / way.steps,
        "fills": way.used.get("VLOAD:FILL", 0.0) / way.steps,
        "conditions": [
            f"{'' if value else 'not '}({text})" for text, value in way.conditions
        ],
        "regions": [asdict(region) for region in way.regions],
        **rest,
    }
    (folder / "cost.json").write_text(json.dumps(cost, indent=1))
    for path in (folder / "schedule").iterdir():
        if f"-{names[0]}-" not in path.name:
            path.unlink()


def usual(ways: Sequence[Execution]) -> Execution:
    """The way that a call is taken to go, of all that its data may make it go.

    The dearest one: what is in the data skips nothing.
    """
    return max(ways, key=lambda way: way.cycles)


def _compile(request: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Compile for one device of the chip.

    Returns:
        the names of the kernels in the compiled program, and ``grids`` (of its Pallas
        kernels, whole: before two cores share one), ``other_cycles`` (the compiler's
        estimate for all else), ``compile_seconds``.
    """
    # A kernel runs on one chip: of which slice makes no difference to its schedule.
    device = topology_devices(smallest_of(request["chip"]))[0]
    mesh = Mesh(np.array([device]), ("one",))
    whole = NamedSharding(mesh, PartitionSpec())
    if "case" in request:
        blocks = Blocks(**request["case"].pop("blocks"))
        run, arrays = build(AttentionCase(**request["case"], blocks=blocks))
    else:
        run, arrays = _custom_call(request)
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole) for a in arrays]
    started = time.perf_counter()
    # Kernels that ask what chip they are for are told by the mesh, not by this machine.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(run).trace(*placed)
        compiled = traced.lower().compile()
    seconds = time.perf_counter() - started
    text = compiled.as_text()
    return [
        instruction.name
        for computation in parse(text).computations.values()
        for instruction in computation.values()
        if instruction.target == "tpu_custom_call"
    ], {
        "grids": list(_grids(traced.jaxpr.jaxpr)),
        "other_cycles": sum(map(int, _ESTIMATE.findall(text))),
        "compile_seconds": seconds,
    }


def _custom_call(
    request: dict[str, Any],
) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """A custom call as a compiled program has it, and the arrays that it takes."""

    def struct(dtype: str, shape: list[int]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), jax.numpy.dtype(_DTYPES[dtype]))

    call = jax.ffi.ffi_call(
        "tpu_custom_call",
        [struct(*result) for result in request["results"]],
        custom_call_api_version=1,
        legacy_backend_config=json.dumps(
            {
                "custom_call_config": request["config"],
                "scoped_memory_configs": request["scoped"],
            }
        ),
    )
    return (lambda *args: call(*args)), [struct(*o) for o in request["operands"]]


def _grids(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """The grids of all Pallas kernels in a program, those of every branch."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield tuple(equation.params["grid_mapping"].grid)
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from _grids(inner)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
