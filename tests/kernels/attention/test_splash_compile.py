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
from tpuport.core.cost.kernel_worker import _grids
from tpuport.kernels.attention.attention import attention, smooth_keys
from tpuport.kernels.attention.splash import splash_attention
from tpuport.kernels.attention.splash_blocks import SplashBlocks

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

def compile_all(dtype):
    def array(heads, length):
        shape = (1, heads, length, 80)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=device)
    blocks = SplashBlocks(q=256, kv=512, kv_compute=256)
    def call(q, k, v, n):
        return splash_attention(
            q, smooth_keys(k, n), v, kv_lengths=n, is_causal=True,
            window=(400, 100), blocks=blocks, chip="v6e",
        )
    keys = array(2, 2000)
    traced = jax.jit(call).trace(array(4, 1031), keys, keys, lengths)
    traced.lower().compile()
    print(*_grids(traced.jaxpr.jaxpr))

{calls}
"""


def lines_of(*calls: str) -> list[str]:
    program = PROGRAM.replace("{calls}", "\n".join(calls))
    return run_program(program, TPU_ACCELERATOR_TYPE="v6e-4")


@needs_libtpu
def test_compiles_for_v6e() -> None:
    """14 CPU seconds: compiles for a TPU, one of the largest blocks."""
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


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.aot)]
)
@needs_libtpu
def test_all_options_compile_together(dtype: str) -> None:
    # 256 queries see 656 keys, which never reach into more than two blocks.
    assert lines_of(f"compile_all(jnp.{dtype})") == ["(1, 4, 5, 2)"]
