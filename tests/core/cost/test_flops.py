"""Model FLOPs are those of the mathematics, however a program is split."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tpuport.kernels
from tpuport.core.cost.flops import ELEMENTWISE, PRODUCTS, attention_flops, model_flops
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.tracing.context import AttentionRecord


def record(**changes: object) -> AttentionRecord:
    values = {
        "query": (2, 4, 256, 64),
        "key": (2, 4, 512, 64),
        "implementation": "splash",
        "reason": "",
        "split": (None,) * 4,
    }
    return AttentionRecord(**{**values, **changes})  # type: ignore[arg-type]


def test_products_convolutions_and_loops() -> None:
    def f(x: jax.Array, w: jax.Array, image: jax.Array, filters: jax.Array) -> None:
        def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
            return carry @ w, None

        x, _ = jax.lax.scan(body, x, None, length=6)
        y = jax.lax.conv(image, filters, (1, 1), "VALID")
        return x, y

    traced = jax.jit(f).trace(
        jnp.zeros((8, 32)),
        jnp.zeros((32, 32)),
        jnp.zeros((1, 3, 9, 9)),
        jnp.zeros((16, 3, 3, 3)),
    )
    expected = 6 * 2 * 8 * 32 * 32 + 2 * 49 * 16 * 27
    assert model_flops(traced.jaxpr, ()) == expected


def test_every_kernel_that_is_no_attention_is_known() -> None:
    """One that is not would count as attention, in FLOPs and in time."""
    sources = Path(tpuport.kernels.__path__[0]).rglob("*.py")
    text = "".join(path.read_text() for path in sources)
    names = set(re.findall(r'name="(tpuport_(?!splash)\w+)"', text))
    assert len(names) > 3
    assert names == {*PRODUCTS, *ELEMENTWISE}


def test_a_program_split_over_devices_counts_once() -> None:
    mesh = build_mesh(MeshSpec(dp=2, tp=4))
    split = NamedSharding(mesh, PartitionSpec("dp", "tp"))
    whole = PartitionSpec("dp", "tp")

    def f(x: jax.Array) -> jax.Array:
        def part(x: jax.Array) -> jax.Array:
            return x @ x.T

        return jax.shard_map(
            part, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
        )(x)

    struct = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=split)
    traced = jax.jit(f).trace(struct)
    # Each device multiplies its own [8, 8] part.
    assert model_flops(traced.jaxpr, ()) == 8 * 2 * 8 * 8 * 8


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 1.0),
        ({"causal": True}, 0.5),
        ({"window": (31, 32)}, 64 / 512),
        ({"frame_tokens": 64}, 5 / 8),
    ],
    ids=["full", "causal", "window", "frames"],
)
def test_attention_counts_the_keys_that_queries_see(
    changes: dict[str, object], share: float
) -> None:
    assert attention_flops(record(**changes)) == pytest.approx(
        share * 4 * 2 * 4 * 256 * 512 * 64
    )
