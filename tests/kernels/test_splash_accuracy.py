"""Our splash kernel is no less accurate than jax's, both as a TPU would run them.

Interpreted on a CPU, jax's kernel multiplies its float32 weights as they are. On a TPU
the matrix unit rounds them to bfloat16 first; ``as_on_tpu`` does that here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from tests.kernels.oracle import Case, inputs, numpy_attention
from tpuport.kernels.jax_splash import BlockSizes, jax_splash_attention
from tpuport.kernels.splash import SplashBlocks, splash_attention

Arrays = tuple[jax.Array, jax.Array, jax.Array]
INPUTS: dict[str, Callable[..., Arrays]] = {
    "random": lambda q, k, v: (q, k, v),
    "large": lambda q, k, v: (q * 8, k * 8, v),
    "small": lambda q, k, v: (q * 0.1, k * 0.1, v),
    "equal": lambda q, k, v: (q, k * 0 + k[:, :, :1], v),
    "dominant": lambda q, k, v: (q, k.at[:, :, 7].set(3 * q[:, :, 5]), v),
    "offset": lambda q, k, v: (q, k, abs(v) + 5),
}
# Weights are rounded to 8 bits wherever they lie between two powers of two. With the
# maximum off, the largest are 1 or just below, where that costs least; without, they
# lie anywhere. Before the result's own rounding hides most of it, this is worth up to
# a factor of 1.35 where all weights are alike.
ANYWHERE = 1.35


class _OnePass:
    """``jax.lax`` whose products take float32 in one bfloat16 pass, as a TPU does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax.lax, name)

    def dot_general(self, a: jax.Array, b: jax.Array, *args: Any, **kw: Any) -> Any:
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        return jax.lax.dot_general(
            a, b, *args, **{**kw, "preferred_element_type": jnp.float32}
        )


@pytest.fixture
def as_on_tpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    jax.clear_caches()
    monkeypatch.setattr(splash_attention_kernel, "lax", _OnePass())
    yield
    monkeypatch.undo()
    jax.clear_caches()


def errors(dtype: str, head_dim: int, name: str) -> dict[str, float]:
    """Root mean square errors of both kernels against float64."""
    case = Case(q_len=129, kv_len=700, head_dim=head_dim, dtype=dtype, batch=1)
    arrays, _ = inputs(case)
    q, k, v = (x.astype(dtype) for x in INPUTS[name](*arrays))
    want = numpy_attention(q, k, v)
    ours = SplashBlocks(q=256, kv=256, kv_compute=128)
    theirs = BlockSizes(q=256, kv=256, kv_compute=128)
    results = {
        "maximum": splash_attention(
            q, k, v, blocks=ours, running_max=True, interpret=True
        ),
        "chosen": splash_attention(q, k, v, blocks=ours, interpret=True),
        "jax": jax_splash_attention(q, k, v, blocks=theirs, interpret=True),
    }
    return {
        key: float(np.sqrt(np.mean((np.asarray(got, np.float64) - want) ** 2)))
        for key, got in results.items()
    }


@pytest.mark.usefixtures("as_on_tpu")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", INPUTS)
def test_bfloat16(name: str, head_dim: int) -> None:
    found = errors("bfloat16", head_dim, name)
    assert found["maximum"] <= found["jax"] * 1.01
    assert found["chosen"] <= found["jax"] * ANYWHERE


@pytest.mark.parametrize("name", [name for name in INPUTS if name != "equal"])
def test_float32(name: str) -> None:
    # Both are within rounding of the truth; a pass in bfloat16 would be 1000 times off.
    found = errors("float32", 64, name)
    assert found["maximum"] <= found["jax"] * 2
    assert found["chosen"] <= found["jax"] * 2


@pytest.mark.usefixtures("as_on_tpu")
def test_a_scale_that_is_no_power_of_two_costs_nothing() -> None:
    # jax's kernel wants it in q, which is rounded for it; ours takes it in float32.
    found = errors("bfloat16", 128, "large")
    assert found["chosen"] < found["jax"] / 10
