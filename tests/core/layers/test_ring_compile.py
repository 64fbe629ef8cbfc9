"""A ring compiled for a TPU slice that is not there: its order, and what it moves."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes import needs_libtpu, run_json
from tpuport.core.mesh.slices import compile_environment, parse_topology

pytestmark = needs_libtpu

# Two heads on 16 devices: rings of 8, chunks of 512 tokens, which are short.
PROGRAM = """
import json
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from tpuport.core.layers import ring
from tpuport.core.tracing.context import Active
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.tracing.op_overrides import OpContext
from tpuport.core.cost.program_time import KernelCost
from tpuport.core.cost.program_time import account
from tpuport.core.cost.hlo import parse
from tpuport.core.cost.network import Network
from tpuport.core.layers.sequence_parallel import sequence_attention
from tpuport.core.mesh.slices import parse_topology, topology_devices

topology = parse_topology("v6e-16")
mesh = build_mesh(MeshSpec(sp=16), topology_devices(topology))
split = NamedSharding(mesh, P(None, None, None, "sp"))
x = jax.ShapeDtypeStruct((1, 2, 64, 4096), jnp.bfloat16, sharding=split)
found = {}
for way, least in (("passed", 0.0), ("gathered", ring.LEAST_HIDDEN)):
    ring.LEAST_HIDDEN = least
    context = OpContext(mesh=mesh, platform="tpu",
                        chip="v6e", records=[])
    active = Active(None, context)
    def call(q, k, v):
        return sequence_attention(active, q, k, v, kv_len=4000, feature_major=True)
    program = parse(jax.jit(call).lower(x, x, x).compile().as_text())
    network = Network(topology, chip("v6e"), list(mesh.devices.flat))
    cost = lambda *_: KernelCost(cycles=1e3, bound="MXU", flops=0.0)
    added = account(program, chip("v6e"), network, dict(mesh.shape), cost)
    bodies = []
    for computation in program.computations.values():
        order = []
        for one in computation.values():
            if one.opcode.startswith("collective-permute"):
                order.append(one.opcode.removeprefix("collective-permute-"))
            elif one.target == "tpu_custom_call":
                order.append("kernel")
        if order:
            bodies.append(order)
    record = context.records[0]
    found[way] = {
        "record": [record.ulysses, record.ring, record.ring_keys, record.reason],
        "moved": {use.kind: [use.axis, use.count, use.bytes]
                  for use in added.collectives()},
        "bodies": bodies,
        "notes": added.notes,
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    variables = compile_environment(parse_topology("v6e-16"))
    return run_json(PROGRAM, **variables)


def test_chunks_are_on_the_way_while_the_kernel_runs(found: Any) -> None:
    assert found["passed"]["record"][:3] == [2, 8, "passed"]
    kernels = 0
    for body in found["passed"]["bodies"]:
        under_way = 0
        for index, what in enumerate(body):
            if what == "kernel":
                kernels += 1
                # Of the very last chunk nothing is sent on.
                assert under_way == 2 or "start" not in body[index:]
            under_way += {"start": 1, "done": -1}.get(what, 0)
    # Two turns in the loop, the seventh, and the last.
    assert kernels == 4


def test_the_account_has_every_chunk_that_moves(found: Any) -> None:
    # Seven turns, keys and values: 512 tokens of 64 bfloat16 each.
    moved = found["passed"]["moved"]
    assert moved["collective-permute"] == ["sp", 14, 14 * 512 * 64 * 2]
    assert "all-gather" not in moved
    assert not found["passed"]["notes"]


def test_short_chunks_are_gathered_and_the_record_says_so(found: Any) -> None:
    ulysses, ring, way, reason = found["gathered"]["record"]
    assert (ulysses, ring, way) == (2, 8, "gathered")
    assert "chunk of 512 tokens" in reason
    moved = found["gathered"]["moved"]
    assert moved["all-gather"][:2] == ["sp", 2]
    assert "collective-permute" not in moved
