"""Our splash kernel is no less accurate than jax's, both as a TPU would run them.

Interpreted on a CPU, jax's kernel multiplies its float32 weights as they are. On a TPU
the matrix unit rounds them to bfloat16 first; ``as_on_tpu`` does that here too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from tests.kernels.attention.oracle import Case, inputs, numpy_attention
from tpuport.core.cost.attention_case import Blocks
from tpuport.core.cost.kernel_worker import jax_splash
from tpuport.kernels.attention.splash import SplashBlocks, splash_attention

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def with_key(k: np.ndarray, at: int, key: np.ndarray) -> np.ndarray:
    """``k`` with another key in one place."""
    k = k.copy()
    k[:, :, at] = key
    return k


INPUTS: dict[str, Callable[..., Arrays]] = {
    "random": lambda q, k, v: (q, k, v),
    "large": lambda q, k, v: (q * 8, k * 8, v),
    # A few keys take most of the weight.
    "peaked": lambda q, k, v: (q * 1.5, k * 1.5, v),
    "small": lambda q, k, v: (q * 0.1, k * 0.1, v),
    "equal": lambda q, k, v: (q, k * 0 + k[:, :, :1], v),
    "dominant": lambda q, k, v: (q, with_key(k, 7, 3 * q[:, :, 5]), v),
    "offset": lambda q, k, v: (q, k, abs(v) + 5),
    "one of many": lambda q, k, v: (q * 0.3, with_key(k, 9, 0.55 * q[:, :, 3]), v),
}
# Both round weights alike, to 8 bits, at most at other keys. Seen: 0.06 to 1.008 times
# the error.
MOST = 1.01


class _OnePass:
    """``jax.lax`` whose products take float32 in one bfloat16 pass, as a TPU does."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax.lax, name)

    def dot_general(self, a: jax.Array, b: jax.Array, *args: Any, **kw: Any) -> Any:
        a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
        return jax.lax.dot_general(
            a, b, *args, **{**kw, "preferred_element_type": jnp.float32}
        )


Kernels = dict[str, Callable[..., jax.Array]]


def kernels() -> Kernels:
    """Both kernels."""
    ours = SplashBlocks(q=256, kv=256, kv_compute=128)
    theirs = Blocks(q=256, kv=256, kv_compute=128)
    ours_run = functools.partial(splash_attention, blocks=ours, interpret=True)
    return {
        "ours": jax.jit(ours_run),
        "jax": jax.jit(functools.partial(jax_splash, blocks=theirs, interpret=True)),
    }


@pytest.fixture(scope="module", params=[64, 128])
def on_tpu(request: pytest.FixtureRequest) -> Iterator[tuple[int, Kernels]]:
    """A head dim and the kernels for it, jax's with its products as on a TPU."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splash_attention_kernel, "lax", _OnePass())
        yield request.param, kernels()
    jax.clear_caches()


def errors(found: Kernels, dtype: str, head_dim: int, name: str) -> dict[str, float]:
    """Root mean square errors of the kernels against float64."""
    case = Case(q_len=129, kv_len=700, head_dim=head_dim, dtype=dtype, batch=1)
    arrays, _ = inputs(case)
    q, k, v = (x.astype(dtype) for x in INPUTS[name](*arrays))
    want = numpy_attention(q, k, v)
    return {
        key: float(np.sqrt(np.mean((np.asarray(run(q, k, v), np.float64) - want) ** 2)))
        for key, run in found.items()
    }


@pytest.mark.parametrize("name", INPUTS)
def test_bfloat16(name: str, on_tpu: tuple[int, Kernels]) -> None:
    head_dim, found = on_tpu
    error = errors(found, "bfloat16", head_dim, name)
    assert error["ours"] <= error["jax"] * MOST
    if head_dim == 128 and name == "large":
        # jax's kernel wants a scale that is no power of two in q, which is rounded
        # for it; ours takes it in float32.
        assert error["ours"] < error["jax"] / 10


def test_float32() -> None:
    # All are within rounding of the truth; a pass in bfloat16 would be 1000 times off.
    found = kernels()
    for name in INPUTS:
        error = errors(found, "float32", 64, name)
        least = 1e-7
        assert error["ours"] <= max(error["jax"] * 2, least), name
