"""Products of a block by the kernel, each device with its tokens, beside XLA's."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.layers.sequences import active_on, by_both
from tests.tolerances import TOLERANCES
from tpuport.core.layers import feed_forward
from tpuport.core.layers.joint_sequence import JointSequence
from tpuport.core.layers.text_and_video import Stream
from tpuport.core.tracing.context import Active, activated

#: Tokens of three devices, all but the last four of which count.
TOKENS, COUNTED = 384, 380
WIDTH, INNER = 256, 512


@pytest.fixture(autouse=True)
def tokens_last(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules hold JAX arrays here."""
    monkeypatch.setattr(JointSequence, "feature_major", property(lambda self: True))
    with activated(Active(SimpleNamespace(t2j_iso=lambda tree: tree), None)):
        yield


def stream(mesh: str, text: int = 0) -> Stream:
    sequence = JointSequence(active_on(mesh), text, COUNTED, TOKENS)
    return Stream(sequence, sequence)


def layer(inputs: int, outputs: int, *, bias: bool = True) -> SimpleNamespace:
    weight = drawn(outputs, inputs, scale=inputs**-0.5)
    return SimpleNamespace(weight=weight, bias=drawn(outputs) if bias else None)


def drawn(*shape: int, scale: float = 1.0) -> jax.Array:
    made = np.random.default_rng(sum(shape)).normal(0.0, scale, shape)
    return jnp.asarray(made, jnp.bfloat16)


def both(monkeypatch: pytest.MonkeyPatch, run: Any) -> list[np.ndarray]:
    """What XLA makes, and what the kernel does."""
    monkeypatch.setattr(feed_forward, "KEPT_BY_XLA", 0)
    return by_both(monkeypatch, feed_forward, "tpuport_product", run)


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
    tokens = stream(mesh, text=150)
    x, y = drawn(batch, TOKENS, WIDTH), drawn(batch, TOKENS, WIDTH, scale=0.9)
    first = SimpleNamespace(proj=layer(WIDTH, INNER), approximate="tanh")
    ff = SimpleNamespace(net=[first, None, layer(INNER, WIDTH, bias=False)])
    video = drawn(batch, WIDTH)
    text = video if gates == "one" else video + 1

    def run() -> jax.Array:
        return tokens.add_feed_forward(x, ff, y, (text, video))

    plain, kernel = both(monkeypatch, run)
    assert close(kernel, plain)


@pytest.mark.parametrize(("mesh", "batch"), MESHES)
def test_the_result_of_attention_is_added(
    mesh: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, linear = stream(mesh), layer(WIDTH, WIDTH)
    x, out = drawn(batch, TOKENS, WIDTH), drawn(batch, 4, 64, TOKENS)
    gate = drawn(batch, WIDTH)

    def run() -> jax.Array:
        return tokens.add_output(x, linear, out, (gate, gate))

    plain, kernel = both(monkeypatch, run)
    assert close(kernel, plain)


@pytest.mark.parametrize("why", ["columns are split", "small", "a gate a token"])
def test_other_products_are_of_xla(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_forward, "has_kernels", lambda sequence: True)
    mesh = "sp=3,tp=2" if why == "columns are split" else "dp=2,sp=3"
    tokens, linear = stream(mesh), layer(WIDTH, WIDTH, bias=False)
    if why != "small":
        monkeypatch.setattr(feed_forward, "KEPT_BY_XLA", 0)
    gate = drawn(2, TOKENS, WIDTH) if why == "a gate a token" else drawn(2, WIDTH)
    x, out = drawn(2, TOKENS, WIDTH), drawn(2, 4, 64, TOKENS)

    def run() -> jax.Array:
        return tokens.add_output(x, linear, out, (gate, gate))

    assert "tpuport_product" not in str(jax.make_jaxpr(run)())
