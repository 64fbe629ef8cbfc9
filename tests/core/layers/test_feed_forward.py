"""Products of a block by the kernel, each device with its tokens, beside XLA's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.layers.test_sequence_parallel import active_on
from tests.tolerances import TOLERANCES
from tpuport.core.layers import feed_forward
from tpuport.core.layers.joint_sequence import JointSequence

#: Tokens of three devices, all but the last four of which count.
TOKENS, COUNTED = 384, 380
WIDTH, INNER = 256, 512


@pytest.fixture(autouse=True)
def tokens_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JointSequence, "feature_major", property(lambda self: True))


def drawn(*shape: int, scale: float = 1.0) -> jax.Array:
    made = np.random.default_rng(sum(shape)).normal(0.0, scale, shape)
    return jnp.asarray(made, jnp.bfloat16)


def both(monkeypatch: pytest.MonkeyPatch, run: Any) -> tuple[np.ndarray, np.ndarray]:
    """What XLA makes, and what the kernel does; the kernel must not refuse."""
    monkeypatch.setattr(feed_forward, "KEPT_BY_XLA", 0)
    found = []
    for kernels in (False, True):
        monkeypatch.setattr(
            feed_forward, "has_kernels", lambda sequence, on=kernels: on
        )
        # A function of its own: jax keeps what it has traced of another.
        traced = jax.jit(lambda: run()).trace()
        assert ("tpuport_product" in str(traced.jaxpr)) is kernels
        found.append(np.asarray(traced.lower().compile()(), np.float64))
    return found[0], found[1]


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Within the rounding of the result, in both."""
    error = np.abs(found - wanted) / np.maximum(np.abs(wanted), 1)
    return bool(error.max() <= 2 * TOLERANCES["product bfloat16"])


MESHES = [("dp=1", 2), ("dp=2,sp=3", 1), ("dp=2,sp=3", 2)]


@pytest.mark.parametrize("gates", ["one", "text its own"])
@pytest.mark.parametrize(("mesh", "batch"), MESHES)
def test_a_feed_forward_layer_is_added(
    mesh: str, batch: int, gates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = JointSequence(active_on(mesh), 150, COUNTED, TOKENS)
    x, y = drawn(batch, TOKENS, WIDTH), drawn(batch, TOKENS, WIDTH, scale=0.9)
    first = drawn(INNER, WIDTH, scale=WIDTH**-0.5), drawn(INNER)
    last = drawn(WIDTH, INNER, scale=INNER**-0.5), None
    video = drawn(batch, WIDTH)
    text = video if gates == "one" else video + 1

    def run() -> jax.Array:
        return feed_forward.add_feed_forward(
            sequence, x, y, first, last, text=text, video=video
        )

    plain, kernel = both(monkeypatch, run)
    assert close(kernel, plain)


@pytest.mark.parametrize(("mesh", "batch"), MESHES)
def test_the_result_of_attention_is_added(
    mesh: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = JointSequence(active_on(mesh), 0, COUNTED, TOKENS)
    x, out = drawn(batch, TOKENS, WIDTH), drawn(batch, 4, 64, TOKENS)
    linear = drawn(WIDTH, WIDTH, scale=WIDTH**-0.5), drawn(WIDTH)
    gate = drawn(batch, WIDTH)

    def run() -> jax.Array:
        return feed_forward.add_from_heads(
            sequence, x, out, linear, text=gate, video=gate
        )

    plain, kernel = both(monkeypatch, run)
    assert close(kernel, plain)


@pytest.mark.parametrize("why", ["columns are split", "small", "a gate a token"])
def test_other_products_are_of_xla(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_forward, "has_kernels", lambda sequence: True)
    mesh = "sp=3,tp=2" if why == "columns are split" else "dp=2,sp=3"
    sequence = JointSequence(active_on(mesh), 0, COUNTED, TOKENS)
    if why != "small":
        monkeypatch.setattr(feed_forward, "KEPT_BY_XLA", 0)
    gate = drawn(2, TOKENS, WIDTH) if why == "a gate a token" else drawn(2, WIDTH)
    x, out = drawn(2, TOKENS, WIDTH), drawn(2, 4, 64, TOKENS)
    linear = drawn(WIDTH, WIDTH), None

    def run() -> jax.Array:
        return feed_forward.add_from_heads(
            sequence, x, out, linear, text=gate, video=gate
        )

    assert "tpuport_product" not in str(jax.make_jaxpr(run)())
