"""Attention of a sequence that is split over devices, as tests call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuport.core.layers.sequence_parallel import sequence_attention
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.tracing.context import Active, OpContext
from tpuport.kernels.attention.choice import AttentionChoice


def active_on(
    mesh: str, implementation: str = "auto", devices: list[Any] | None = None
) -> Active:
    context = OpContext(
        mesh=build_mesh(MeshSpec.parse(mesh), devices),
        platform="cpu",
        implementation=AttentionChoice.parse(implementation),
        records=[],
    )
    return Active(None, context)


def arrays_of(
    batch: int, heads: int, padded: int, counts: Any, *, dtype: str = "float32"
) -> list[jax.Array]:
    """q, k, v [B, H, L, 8]; keys that do not count are 50 in k and 0 in v."""
    rng = np.random.default_rng(3)
    q, k, v = (
        rng.standard_normal((batch, heads, padded, 8), np.float32) for _ in range(3)
    )
    dead = (np.arange(padded) >= np.asarray(counts)[:, None])[:, None, :, None]
    k, v = np.where(dead, 50.0, k), np.where(dead, 0.0, v)
    return [jnp.asarray(x, dtype) for x in (q, k, v)]


def attend(
    active: Active,
    arrays: list[jax.Array],
    *,
    kv_len: int,
    lengths: Any = None,
    feature_major: bool = False,
) -> jax.Array:
    """Of all tokens, [B, H, L, 8]."""

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return sequence_attention(
            active,
            q,
            k,
            v,
            kv_len=kv_len,
            kv_lengths=None if lengths is None else jnp.asarray(lengths),
            feature_major=feature_major,
        )

    if not feature_major:
        return jax.jit(call)(*arrays)
    return jax.jit(call)(*(x.swapaxes(2, 3) for x in arrays)).swapaxes(2, 3)


def by_both(
    monkeypatch: pytest.MonkeyPatch, module: Any, kernel: str, run: Callable[[], Any]
) -> list[np.ndarray]:
    """What XLA makes, and what a kernel of layers does, which must not refuse."""
    found = []
    for kernels in (False, True):
        monkeypatch.setattr(module, "has_kernels", lambda sequence, on=kernels: on)
        # A function of its own: jax keeps what it has traced of another.
        traced = jax.jit(lambda: run()).trace()
        assert (kernel in str(traced.jaxpr)) is kernels
        found.append(np.asarray(traced.lower().compile()(), np.float64))
    return found
