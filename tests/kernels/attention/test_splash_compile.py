"""Splash attention compiles for a TPU v6e that is not there.

In a process of its own: the TPU compiler reads its environment once, and must not
see the settings of the tests or leave its own behind.
"""

from __future__ import annotations

import pytest

from tests.processes import needs_libtpu, run_program

PROGRAM = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from tpuport.kernels.attention.attention import attention

topology = topologies.get_topology_desc(topology_name="v6e:2x2", platform="tpu")
device = jax.sharding.SingleDeviceSharding(topology.devices[0])

def compile(head_dim, is_causal, dtype, length=1031):
    def array(heads, dtype=dtype):
        shape = (2, heads, length, head_dim)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=device)
    def call(q, k, v, n):
        return attention(
            q, k, v, kv_lengths=n, is_causal=is_causal, platform="tpu",
            implementation="splash",
        )
    lowered = jax.jit(call).lower(array(4), array(2), array(2), lengths)
    text = lowered.compile().as_text()
    assert "tpu_custom_call" in text, "no Pallas kernel in the program"
    print("compiled", head_dim, is_causal, dtype.__name__)

{calls}
"""


def lines_of(*calls: str) -> list[str]:
    program = PROGRAM.replace("{calls}", "\n".join(calls))
    return run_program(program, timeout=300, TPU_ACCELERATOR_TYPE="v6e-4")


@needs_libtpu
def test_compiles_for_v6e() -> None:
    # Long enough for the largest blocks, which must fit VMEM.
    assert lines_of(
        "compile(64, True, jnp.bfloat16)", "compile(64, True, jnp.float32, 8191)"
    ) == ["compiled 64 True bfloat16", "compiled 64 True float32"]


@pytest.mark.aot
@needs_libtpu
def test_compiles_for_v6e_without_a_mask_and_at_the_other_head_dim() -> None:
    assert lines_of(
        "compile(64, False, jnp.bfloat16)", "compile(128, False, jnp.bfloat16)"
    ) == ["compiled 64 False bfloat16", "compiled 128 False bfloat16"]
