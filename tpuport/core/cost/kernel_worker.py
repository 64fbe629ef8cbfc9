"""Compiles one kernel in a process of its own, and counts the cycles of its schedule.

Run as ``python -m tpuport.core.cost.kernel_worker FOLDER`` by
:mod:`tpuport.core.cost.kernel_cycles`, which puts ``request.json`` into the folder and
makes libtpu write its schedules to ``FOLDER/schedule``. Writes ``cost.json``, or
``refused.txt`` where the kernel or the compiler refuses what was asked.

The kernel is a custom call of a program, or one of the two of attention that ``bench
attention`` compares: ours, and as the baseline jax's splash, which no run takes.
Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq queries, Lk keys), D
head dim.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpuport.core.cost.attention_case import AttentionCase, Blocks
from tpuport.core.cost.hlo import parse
from tpuport.core.cost.kernel_schedule import ScheduleError, read_dump
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.slices import smallest_of, topology_devices
from tpuport.kernels.attention.splash import splash_feature_major
from tpuport.kernels.attention.splash_blocks import SplashBlocks
from tpuport.kernels.padding import ceil_div, pad_dim, round_up

# Far below any score and finite in bfloat16; exp(FAR - maximum) is 0.
FAR = -1e30
LANES = 128
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
    # The dearest way of all that the data may make it go: the data skips nothing.
    way = max(schedule.executions(scalars), key=lambda way: way.cycles)
    steps = math.prod(way.grid)
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
        "spills": way.used.get("VSTORE:SPILL", 0.0) / steps,
        "fills": way.used.get("VLOAD:FILL", 0.0) / steps,
        "conditions": [
            f"{'' if value else 'not '}({text})" for text, value in way.conditions
        ],
        "regions": way.regions,
        **rest,
    }
    (folder / "cost.json").write_text(json.dumps(cost, indent=1))
    for path in (folder / "schedule").iterdir():
        if f"-{names[0]}-" not in path.name:
            path.unlink()


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


# ------------------------------------------------------------- attention kernels


def build(
    case: AttentionCase,
) -> tuple[Callable[..., jax.Array], list[jax.ShapeDtypeStruct]]:
    """The call of a case whose blocks are chosen, and the arrays it takes.

    Raises:
        NotImplementedError: a dtype that is not costed of this kernel.
    """
    blocks = case.blocks
    assert blocks is not None
    q, k, v = (
        jax.ShapeDtypeStruct((1, case.heads, length, case.head_dim), case.dtype)
        for length in (case.q_len, case.kv_len, case.kv_len)
    )
    if case.implementation == "tpuport":
        tiles = SplashBlocks(**asdict(blocks))
        ours = functools.partial(splash_feature_major, blocks=tiles, chip=case.chip)
        return ours, [_turned(x) for x in (q, k, v)]
    if case.dtype != "bfloat16":
        raise NotImplementedError("of jax's splash only bfloat16 is costed")
    return functools.partial(jax_splash, blocks=blocks), [q, k, v]


def _turned(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """With features before tokens."""
    return jax.ShapeDtypeStruct((*x.shape[:2], x.shape[3], x.shape[2]), x.dtype)


def jax_splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: Blocks,
    *,
    interpret: bool = False,
) -> jax.Array:
    """jax's splash kernel on full attention, on lengths that its blocks do not divide.

    Keys of the padding get a score of ``FAR`` by one feature more, 1 in each query: the
    matrix unit adds it, which takes fewer bundles than the kernel's own masks.

    Args:
        q: of shape [B, H, Lq, D].
        k, v: of shape [B, Hkv, Lk, D].
        blocks: tokens of its tiles.
        interpret: run the kernel's program op by op, on any platform.

    Returns:
        of shape [B, H, Lq, D].
    """
    batch, heads, q_len, dim = q.shape
    q_whole, kv_whole = round_up(q_len, blocks.q), round_up(k.shape[2], blocks.kv)
    q = (q.astype(jnp.float32) * dim**-0.5).astype(q.dtype)
    if missing := kv_whole - k.shape[2]:
        q = jnp.concatenate([q, jnp.ones((*q.shape[:3], 1), q.dtype)], 3)
        far = jnp.zeros((*k.shape[:2], missing, dim + 1), k.dtype).at[..., -1].set(FAR)
        k = jnp.concatenate([pad_dim(k, 3, dim + 1), far], 2)

    def whole(x: jax.Array, length: int) -> jax.Array:
        """[B Hkv, L, D], with lengths and widths that the kernel takes."""
        width = 64 if x.shape[3] <= 64 else round_up(x.shape[3], LANES)
        x = x.reshape(-1, *x.shape[2:])
        return pad_dim(pad_dim(x, 1, length), 2, width)

    kernel = splash_attention_kernel.make_splash_mha_single_device(
        # One mask for all heads; the kernel never looks at how many there are.
        splash_attention_mask.MultiHeadMask(
            [splash_attention_mask.FullMask((q_whole, kv_whole))]
        ),
        block_sizes=splash_attention_kernel.BlockSizes(
            block_q=blocks.q,
            block_kv=blocks.kv,
            block_kv_compute=blocks.kv_compute,
        ),
        interpret=interpret,
    )
    out = kernel(whole(q, q_whole), whole(k, kv_whole), whole(v, kv_whole))
    return out.reshape(batch, heads, q_whole, -1)[:, :, :q_len, :dim]


def jax_blocks(case: AttentionCase) -> Blocks:
    """Large blocks that waste little padding and fit the VMEM that jax's kernel has.

    The maxima are those, of a few tried, with the fewest bundles on v6e.
    """
    computes: tuple[int, ...] = (1024, 512, 256, 128)
    most_q = most_kv = max(256, round_up(2048 // ceil_div(case.head_dim, LANES), 256))
    if case.head_dim <= 64:
        most_q, most_kv, computes = 3328, 2816, (256, 128)
    # Seen in the compiler's words; libtpu 0.0.42.1.
    limit = (32 if case.chip in ("v6e", "v7x") else 16) << 20
    while True:
        q = _even(case.q_len, most_q, LANES)
        kv = _even(case.kv_len, most_kv, LANES if case.kv_len <= LANES else 256)
        # Blocks that come and go and sums in float32; the compiler took 2.0 to 2.5
        # times as much (v5p).
        width, rows = (round_up(case.head_dim + more, LANES) for more in (1, 0))
        taken = 4 * (q + kv) * (width + rows) + 4 * q * (2 * LANES + rows)
        if 2.6 * taken <= limit or max(q, kv) <= 256:
            compute = next(size for size in computes if kv % size == 0)
            return Blocks(q=q, kv=kv, kv_compute=compute)
        most_q, most_kv = max(most_q - 256, 256), max(most_kv - 256, 256)


def _even(length: int, most: int, granule: int) -> int:
    """The smallest block of which as few cover a length as of ``most`` tokens."""
    return round_up(ceil_div(length, ceil_div(length, most)), granule)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
