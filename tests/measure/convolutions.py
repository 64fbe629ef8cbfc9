"""What the kernels of autoencoders take on a chip, beside XLA's own convolution; the
first table of docs/log/2026-11-22-decode.md.

``python -m tests.measure.convolutions --chip v6e`` compiles the convolutions of
CogVideoX's decoder, and the statistics and the norm of its widest layer, each for one
of eight chips that share 720x1280 by columns. It prints the cycles of the compiler's
schedule, what the matrix units need at their peak, and what compiling took: CPU seconds
of all threads, which other work on the machine changes less than the time of the clock.
With ``--xla`` three of the convolutions are compiled as XLA's own too, half a minute
each on an idle machine, with the cycles that it estimates itself. Each is compiled in a
process of its own; no TPU is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tpuport.core.cost.kernel_schedule import KernelSchedule, dump_flags, read_dump
from tpuport.core.mesh.chips import CHIPS, Chip
from tpuport.core.mesh.slices import (
    TOPOLOGY_NAMES,
    compile_environment,
    parse_topology,
    topology_devices,
)

ROOT = Path(__file__).parents[2]
#: Seconds that one compile may take.
TIMEOUT = 550


class Shape(NamedTuple):
    """Of one device: channels in and out, frames, rows and columns."""

    inputs: int
    outputs: int
    frames: int
    rows: int
    columns: int

    @property
    def text(self) -> str:
        """For people."""
        return (
            f"{self.inputs} to {self.outputs} at {self.rows} x {self.columns}, "
            f"{self.frames} frames"
        )

    @property
    def flops(self) -> int:
        """Of a convolution of 3 x 3 x 3, padding of channels left out."""
        return 2 * 27 * math.prod(self)


#: Two latent frames of 90 x 160 on eight chips, and what is made of them.
SHAPES = {
    "512": Shape(512, 512, 2, 90, 20),
    "512-256": Shape(512, 256, 4, 180, 40),
    "256": Shape(256, 256, 4, 180, 40),
    "256-large": Shape(256, 256, 8, 360, 80),
    "256-128": Shape(256, 128, 8, 720, 160),
    "128": Shape(128, 128, 8, 720, 160),
    "128-3": Shape(128, 3, 8, 720, 160),
}
#: Of those, what XLA is asked to compile too.
BY_XLA = ("512", "256-large", "128")
#: What the kernels besides convolutions are measured at.
WIDEST = SHAPES["128"]
BESIDE = {
    "enlarged": "enlarging by 2 and 3 x 3",
    "sides": "outer columns",
    "moments": "statistics",
    "norm": "norm, modulation, SiLU",
}


def main(arguments: list[str]) -> int:
    """Print the table; 1 where a kernel does not compile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", choices=sorted(CHIPS), default="v6e")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--xla", action="store_true", help="XLA's own as well")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    chip = CHIPS[asked.chip]
    if asked.one:
        print(json.dumps(compiled(chip, *asked.one)))
        return 0
    print(f"| {chip.name} | form | cycles | peak | compile | XLA, cycles | compile |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    failed = False
    for name in asked.shapes:
        cells = [SHAPES[name].text, *kernel_cells(chip, "conv", name)]
        failed |= "no" in cells
        cells += xla_cells(chip, name) if asked.xla and name in BY_XLA else ["-"] * 2
        print(f"| {' | '.join(cells)} |", flush=True)
    for kind, what in BESIDE.items():
        cells = [
            f"{what} of {WIDEST.inputs} channels",
            *kernel_cells(chip, kind, "128"),
        ]
        failed |= "no" in cells
        print(f"| {' | '.join([*cells, '-', '-'])} |", flush=True)
    return int(failed)


def kernel_cells(chip: Chip, kind: str, name: str) -> list[str]:
    """Form, cycles, the peak's cycles and CPU seconds of one kernel."""
    with tempfile.TemporaryDirectory(prefix="tpuport-kernel-") as folder:
        answer = in_a_process(chip, kind, name, dump_flags(Path(folder)))
        if "error" in answer:
            return ["no", answer["error"], "-", "-"]
        found = read_dump(Path(folder), chip.name, only=answer["kernels"])
    (schedule,) = found.values()
    peak = SHAPES[name].flops / chip.flops_per_cycle if kind == "conv" else None
    return [
        answer["form"],
        millions(cycles_of(schedule, chip, answer["grid"])),
        "-" if peak is None else millions(peak),
        f"{answer['seconds']:.1f} s",
    ]


def cycles_of(schedule: KernelSchedule, chip: Chip, grid: list[int]) -> float:
    """Of the busier core; two share the first dim that has more than one step."""
    if chip.cores > 1:
        shared = next(i for i, n in enumerate(grid) if n > 1)
        grid[shared] = math.ceil(grid[shared] / chip.cores)
    return schedule.executions(grid=grid)[-1].cycles


def xla_cells(chip: Chip, name: str) -> list[str]:
    """Cycles that XLA estimates for its own convolution, and CPU seconds."""
    answer = in_a_process(chip, "xla", name, "")
    if "error" in answer:
        return [answer["error"], "-"]
    return [millions(answer["cycles"]), f"{answer['seconds']:.0f} s"]


def millions(cycles: float) -> str:
    """As the document has them."""
    return f"{cycles / 1e6:.2f} M"


def in_a_process(chip: Chip, kind: str, name: str, flags: str) -> dict[str, Any]:
    """What :func:`compiled` tells, from a process with libtpu's flags."""
    topology = parse_topology(topology_of(chip))
    environment = {
        **compile_environment(topology),
        "LIBTPU_INIT_ARGS": flags,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-m", "tests.measure.convolutions"]
    try:
        done = subprocess.run(
            [*command, "--chip", chip.name, "--one", kind, name],
            env=os.environ | environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not within {TIMEOUT} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": last[:200].replace("|", "/")}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def topology_of(chip: Chip) -> str:
    """Any slice of the chip."""
    return next(name for name in TOPOLOGY_NAMES if name.startswith(chip.name))


# --- in a process of its own


def compiled(chip: Chip, kind: str, name: str) -> dict[str, Any]:
    """Compile one kernel or XLA's convolution for one device of a chip.

    Returns:
        ``seconds`` of CPU time; of a kernel its ``form``, ``grid`` and name in
        ``kernels``; of XLA's own the ``cycles`` that it estimates.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh

    devices = topology_devices(parse_topology(topology_of(chip)))
    mesh = Mesh(np.array(devices[:1]), ("one",))
    forms = BUILD[kind](chip, SHAPES[name], mesh)
    refused: Exception | None = None
    for form, (run, arguments) in forms.items():
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                traced = jax.jit(run).trace(*arguments)
        except NotImplementedError as error:
            refused = error
            continue
        lowered = traced.lower()
        started = time.process_time()
        program = lowered.compile()
        seconds = time.process_time() - started
        text = program.as_text()
        names = re.findall(r"%(tpuport_[\w.\-]+) = [^\n]*custom-call\(", text)
        estimates = re.findall(r'"estimated_cycles":"(\d+)"', text)
        return {
            "seconds": seconds,
            "form": form,
            "grid": grid_of(traced.jaxpr.jaxpr),
            "kernels": names,
            "cycles": sum(map(int, estimates)),
        }
    raise NotImplementedError(str(refused))


def grid_of(jaxpr: Any) -> list[int]:
    """Of the one kernel in a program; empty where there is none."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            return list(equation.params["grid_mapping"].grid)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            found = grid_of(inner) if hasattr(inner, "eqns") else []
            if found:
                return found
    return []


Forms = dict[str, tuple[Callable[..., Any], list[Any]]]
"""What to try in order: functions and what they are given."""


def _arrays(mesh: Any) -> Callable[..., Any]:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    whole = NamedSharding(mesh, PartitionSpec())

    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    return array


def _options(chip: Chip) -> dict[str, Any]:
    from tpuport.core.tracing.kernel_options import VMEM_SHARE

    return {"vmem_limit": int(chip.vmem_bytes * VMEM_SHARE)}


def _convolution(chip: Chip, shape: Shape, mesh: Any) -> Forms:
    from tpuport.kernels.convolution.conv import (
        EdgedVideo,
        edged_convolution,
        video_convolution,
    )
    from tpuport.kernels.convolution.conv_kernel import pitch_of

    array, options = _arrays(mesh), _options(chip)
    inputs, outputs, frames, rows, columns = shape
    weights = [array(3, 3, 3, inputs, outputs), array(outputs, dtype="float32")]
    side = array(1, frames + 2, rows + 2, inputs)
    ends = array(1, frames + 2, 2, columns, inputs)

    def edged(
        x: Any, before: Any, left: Any, right: Any, ends: Any, *weights: Any
    ) -> Any:
        video = EdgedVideo(x, before, (left, right), ends)
        return edged_convolution(video, *weights, **options)

    def padded(x: Any, weight: Any, bias: Any) -> Any:
        return video_convolution(x, weight, bias, columns, **options)

    x = [array(1, n, rows, columns, inputs) for n in (frames, 2)]
    whole = array(1, frames + 2, rows + 2, pitch_of(columns), inputs)
    return {
        "in place": (edged, [*x, side, side, ends, *weights]),
        "padded": (padded, [whole, *weights]),
    }


def _enlarged(chip: Chip, shape: Shape, mesh: Any) -> Forms:
    from tpuport.kernels.convolution.conv import EdgedVideo, edged_convolution

    array, channels = _arrays(mesh), shape.inputs
    small = (1, shape.frames, shape.rows // 2, shape.columns // 2, channels)
    side = array(1, shape.frames, shape.rows // 2 + 2, channels)
    weights = [array(1, 3, 3, channels, channels), array(channels, dtype="float32")]

    def run(x: Any, left: Any, right: Any, *weights: Any) -> Any:
        video = EdgedVideo(x, None, (left, right), None)
        return edged_convolution(video, *weights, scale=2, **_options(chip))

    return {"in place": (run, [array(*small), side, side, *weights])}


def _sides(chip: Chip, shape: Shape, mesh: Any) -> Forms:
    from tpuport.kernels.convolution.conv_sides import outer_columns

    array = _arrays(mesh)
    x, before = (
        array(1, n, shape.rows, shape.columns, shape.inputs) for n in (shape.frames, 2)
    )
    return {"-": (lambda *given: outer_columns(*given, **_options(chip)), [x, before])}


def _moments(chip: Chip, shape: Shape, mesh: Any) -> Forms:
    from tpuport.kernels.norms.video_norm import channel_moments

    x = _arrays(mesh)(1, shape.frames, shape.rows, shape.columns, shape.outputs)
    return {"-": (lambda x: channel_moments(x, **_options(chip)), [x])}


def _norm(chip: Chip, shape: Shape, mesh: Any) -> Forms:
    from tpuport.kernels.norms.video_norm import apply_norm

    array, channels = _arrays(mesh), shape.outputs
    x = array(1, shape.frames, shape.rows, shape.columns, channels)
    vectors = [array(1, channels, dtype="float32")] * 3
    maps = array(1, 2, shape.rows // 8, shape.columns, 2 * channels)

    def run(*given: Any) -> Any:
        return apply_norm(*given, silu=True, **_options(chip))

    return {"-": (run, [x, *vectors, maps])}


def _xla(chip: Chip, shape: Shape, mesh: Any) -> Forms:
    from tpuport.patches.conv import plain_convolution

    array = _arrays(mesh)
    inputs, outputs, frames, rows, columns = shape
    x = array(1, inputs, frames + 2, rows + 2, columns + 2)
    weights = [array(outputs, inputs, 3, 3, 3), array(outputs)]

    def run(*given: Any) -> Any:
        return plain_convolution(*given, [1] * 3, [0] * 3, [1] * 3)

    return {"XLA": (run, [x, *weights])}


BUILD: dict[str, Callable[[Chip, Shape, Any], Forms]] = {
    "conv": _convolution,
    "enlarged": _enlarged,
    "sides": _sides,
    "moments": _moments,
    "norm": _norm,
    "xla": _xla,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
