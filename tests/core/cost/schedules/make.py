"""Makes the recorded schedules beside this file; run without arguments.

A small kernel with all that the reader must follow: a grid of three axes, parts that
run at the first and at the last step of its last axis, an inner loop of four turns, one
whose turns only the data knows, and a choice of two by the data. Vector instructions
are cut from the programs, which the reader does not look at.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CHIPS = {"v6e": "v6e-1", "v7x": "v7x-2"}
KINDS = ("final_bundles", "final_hlo-static-per-bundle-utilization")
#: Instructions that decide nothing about the path.
VECTOR = re.compile(
    r"^(%(v|vm)?\d\w* = )?(%\w+ = )?(v\w+|vst\S*|%\d+ = v\S*)\b(?!.*sbr\.rel)"
)


def compile_example() -> None:
    """Compile the kernel; libtpu dumps its schedule where its flags say."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tpuport.core.mesh.slices import parse_topology, topology_devices

    def kernel(n_ref, x_ref, y_ref, o_ref, acc):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)

        def product(k, _):
            part = y_ref[pl.ds(k * 128, 128), :]
            acc[...] += jnp.dot(x_ref[...], part, preferred_element_type=jnp.float32)
            return 0

        lax.fori_loop(0, 4, product, 0)

        def by_data(k, _):
            acc[...] += jnp.exp(acc[...])
            return 0

        lax.fori_loop(0, n_ref[0], by_data, 0)

        def cheap():
            acc[...] = acc[...] * 2

        def dear():
            acc[...] = jnp.exp(jnp.exp(acc[...]))

        lax.cond(n_ref[1] > 3, cheap, dear)

        @pl.when(step == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc[...]

    def call(n, x, y):
        specs = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(2, 4, 3),
            in_specs=[
                pl.BlockSpec((None, 128, 128), lambda h, i, j, n: (h, i, j)),
                pl.BlockSpec((None, 512, 128), lambda h, i, j, n: (h, j, 0)),
            ],
            out_specs=pl.BlockSpec((None, 128, 128), lambda h, i, j, n: (h, i, 0)),
            scratch_shapes=[pltpu.VMEM((128, 128), jnp.float32)],
        )
        return pl.pallas_call(
            kernel,
            grid_spec=specs,
            out_shape=jax.ShapeDtypeStruct((2, 512, 128), jnp.float32),
            name="example",
        )(n, x, y)

    devices = topology_devices(parse_topology(sys.argv[1]))
    mesh = Mesh(np.array(devices[:1]), ("one",))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    arguments = array(2, dtype=jnp.int32), array(2, 512, 384), array(2, 1536, 128)
    jax.jit(call).lower(*arguments).compile()


def slim(text: str) -> str:
    """A program without its vector instructions and blanks at line ends."""
    lines = []
    for line in text.splitlines():
        head, brace, body = line.partition("{")
        if brace and re.match(r"^\s*(0x)?[0-9a-f]+\s.*:", head):
            body, _, tail = body.rpartition("}") if "}" in body else (body, "", "")
            kept = [p for p in body.split(";;") if not VECTOR.match(p.strip())]
            closing = "}" + tail if "}" in line else ""
            line = head + brace + ";;".join(kept) + closing
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


def main() -> None:
    from tpuport.core.cost.kernel_schedule import dump_flags
    from tpuport.core.mesh.slices import compile_environment, parse_topology

    for chip, topology in CHIPS.items():
        with tempfile.TemporaryDirectory() as folder:
            variables = {
                **compile_environment(parse_topology(topology)),
                "LIBTPU_INIT_ARGS": dump_flags(Path(folder)),
            }
            subprocess.run(
                [sys.executable, __file__, topology],
                env=os.environ | variables,
                check=True,
            )
            for kind in KINDS:
                (found,) = Path(folder).glob(f"*-example.1-*-{kind}.txt")
                text = found.read_text()
                (HERE / f"0-example.{chip}-0-{kind}.txt").write_text(
                    slim(text) if kind == KINDS[0] else text
                )


if __name__ == "__main__":
    compile_example() if len(sys.argv) > 1 else main()
