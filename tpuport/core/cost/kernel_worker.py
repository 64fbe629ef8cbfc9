"""Compiles one kernel in a process of its own, and counts the cycles of its schedule.

Run as ``python -m tpuport.core.cost.kernel_worker FOLDER`` by
:mod:`tpuport.core.cost.kernel_cycles`, which puts ``request.json`` into the folder and
makes libtpu write its schedules to ``FOLDER/schedule``. Writes ``cost.json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpuport.core.cost.hlo import parse
from tpuport.core.cost.kernel_cycles import usual
from tpuport.core.cost.kernel_schedule import read_dump
from tpuport.core.mesh.slices import smallest_of, topology_devices

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
    # A kernel runs on one chip: of which slice makes no difference to its schedule.
    topology = smallest_of(request["chip"])
    name = _compile(request, topology_devices(topology)[0])
    schedules = read_dump(folder / "schedule", topology.chip)
    kernel = schedules[name]
    way = usual(kernel.executions())
    (folder / "cost.json").write_text(
        json.dumps(
            {
                "cycles": way.cycles,
                "busiest": way.busiest,
                "utilization": way.utilization,
                "grid": list(way.grid),
                "bundles": kernel.bundles,
                "conditions": [
                    f"{'' if value else 'not '}({text})"
                    for text, value in way.conditions
                ],
                "regions": [
                    {"start": r.start, "end": r.end, "depth": r.depth, "runs": r.runs}
                    for r in way.regions
                ],
            },
            indent=1,
        )
    )
    for path in (folder / "schedule").iterdir():
        if f"-{name}-" not in path.name:
            path.unlink()


def _compile(request: dict[str, Any], device: Any) -> str:
    """Compile the custom call alone; returns its name in the program."""

    mesh = Mesh(np.array([device]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def struct(dtype: str, shape: list[int], **placed: Any) -> jax.ShapeDtypeStruct:
        kind = jax.numpy.dtype(_DTYPES[dtype])
        return jax.ShapeDtypeStruct(tuple(shape), kind, **placed)

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
    operands = [struct(*operand, sharding=whole) for operand in request["operands"]]
    compiled = jax.jit(lambda *args: call(*args)).lower(*operands).compile()
    program = parse(compiled.as_text())
    for computation in program.computations.values():
        for instruction in computation.instructions:
            if instruction.target == "tpu_custom_call":
                return instruction.name
    raise RuntimeError("the kernel is not in its own program")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
