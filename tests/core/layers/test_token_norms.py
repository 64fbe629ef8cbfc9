"""Norms of a joint sequence as kernels, each device on its tokens, beside XLA's."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from tests.core.layers.sequences import active_on, by_both
from tests.sweeps import sweep
from tests.tolerances import TOLERANCES
from tpuport.core.layers import token_norms
from tpuport.core.layers.joint_sequence import JointSequence
from tpuport.core.layers.token_norms import HeadNorm, layer_norm

#: Tokens of three devices, all but the last four of which count.
TOKENS, COUNTED = 384, 380
MESHES = ["dp=1", "dp=2,sp=3", "sp=3,tp=2"]


@pytest.fixture(autouse=True)
def tokens_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JointSequence, "feature_major", property(lambda self: True))


def both(monkeypatch: pytest.MonkeyPatch, run: Any) -> list[np.ndarray]:
    """What XLA makes, and what the kernels do."""
    return by_both(monkeypatch, token_norms, "tpuport_norm", run)


def drawn(*shape: int) -> jax.Array:
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(rng.standard_normal(shape, np.float32))


# Text on the first device, over an edge between two, on all; and at the end.
TEXTS = [(20, True), (130, True), (300, True), (130, False)]


@pytest.mark.parametrize(
    ("mesh", "batch", "text", "text_first"),
    sweep(
        [
            ("dp=1", 2, 130, False),
            ("dp=2,sp=3", 1, 20, True),
            ("dp=2,sp=3", 2, 130, True),
            ("dp=2,sp=3", 2, 130, False),
            ("sp=3,tp=2", 1, 300, True),
        ],
        ((*one, *text) for one in itertools.product(MESHES, [1, 2]) for text in TEXTS),
    ),
)
def test_each_token_takes_its_own_modulation(
    mesh: str, batch: int, text: int, text_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One item too, which dp does not divide."""
    sequence = JointSequence(active_on(mesh), text, COUNTED, TOKENS, text_first)
    x, weight, bias = drawn(batch, TOKENS, 256), drawn(256), drawn(256) + 1
    words, video = ((drawn(batch, 256) + n, drawn(batch, 256) - n) for n in (2, 5))

    def run() -> jax.Array:
        return token_norms.modulated_norm(
            sequence, x, weight=weight, bias=bias, eps=1e-5, text=words, video=video
        )

    plain, kernel = both(monkeypatch, run)
    assert np.abs(plain - kernel).max() <= TOLERANCES["norm float32"]


@pytest.mark.parametrize(
    ("mesh", "batch", "turns"),
    sweep(
        [
            ("dp=1", 1, False),
            ("dp=2,sp=3", 1, True),
            ("dp=2,sp=3", 2, False),
            ("sp=3,tp=2", 2, True),
        ],
        itertools.product(MESHES, [1, 2], [True, False]),
    ),
)
def test_each_token_is_turned_by_its_own_angle(
    mesh: str, batch: int, turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = JointSequence(active_on(mesh), 20, COUNTED, TOKENS)
    x = drawn(batch, 4, 64, TOKENS)
    norm = HeadNorm(drawn(64), None, 1e-6, centre=turns)
    angles = drawn(64, TOKENS)
    tables = (jnp.cos(angles), jnp.sin(angles)) if turns else None

    def run() -> jax.Array:
        return token_norms.turned(sequence, x, norm, tables, jnp.float32)

    plain, kernel = both(monkeypatch, run)
    assert np.abs(plain - kernel).max() <= TOLERANCES["norm float32"]


def test_shapes_of_arrays_are_checked_in_tests() -> None:
    x, weight = jnp.zeros((2, 4)), jnp.ones(4)
    assert layer_norm(x, weight, None, 1e-6).shape == x.shape
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'weight'"):
        layer_norm(x, jnp.ones(1), None, 1e-6)
    with pytest.raises(jaxtyping.TypeCheckError, match="parameter 'x'"):
        layer_norm(x.astype(jnp.int32), weight, None, 1e-6)
