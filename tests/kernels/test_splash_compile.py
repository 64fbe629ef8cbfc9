"""Splash attention compiles for a TPU v6e that is not there.

In a process of its own: the TPU compiler reads its environment once, and must not
see the settings of the tests or leave its own behind.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What jax.experimental.topologies and libtpu want where there is no TPU; the last one
# lets two compilers run on one machine.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
PROGRAM = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from tpuport.kernels.attention import attention

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

compile(64, False, jnp.bfloat16)
compile(128, False, jnp.bfloat16)
compile(64, True, jnp.bfloat16)
# Long enough for the largest blocks, which must fit VMEM.
compile(64, True, jnp.float32, 8191)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
def test_compiles_for_v6e() -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "compiled 64 False bfloat16",
        "compiled 128 False bfloat16",
        "compiled 64 True bfloat16",
        "compiled 64 True float32",
    ]
