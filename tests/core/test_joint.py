"""The joint sequence hands the kernel what it relies on."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.test_sequence_parallel import active_on
from tests.tolerances import TOLERANCES
from tpuport.core import joint, streams, token_norms
from tpuport.core.joint import JointSequence
from tpuport.core.token_norms import HeadNorm


@pytest.mark.parametrize("lengths", [None, (4, 7)])
@pytest.mark.parametrize("feature_major", [False, True])
def test_values_of_tokens_that_do_not_count_are_zero(
    feature_major: bool, lengths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def record(active: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
        given.update(options, v=np.asarray(v))
        return q

    monkeypatch.setattr(joint, "sequence_attention", record)
    monkeypatch.setattr(
        JointSequence, "feature_major", property(lambda self: feature_major)
    )
    sequence = JointSequence(active_on("dp=1"), text=2, length=9, padded=12)
    shape = (2, 3, 4, 12) if feature_major else (2, 3, 12, 4)
    x = jnp.ones(shape)
    kv_lengths = None if lengths is None else jnp.asarray(lengths)
    joint.attend(sequence, x, x, x, jnp.float32, kv_lengths=kv_lengths)
    counts = np.arange(12) < np.asarray(lengths or (9, 9))[:, None]
    at = counts[:, None, None, :] if feature_major else counts[:, None, :, None]
    np.testing.assert_array_equal(given["v"], np.broadcast_to(at, shape))
    assert given["kv_len"] == 9
    assert given["feature_major"] is feature_major


def vectors(dim: int) -> np.ndarray:
    """What a norm may be given: one-hot of both signs, constant, random; [L, dim]."""
    rng = np.random.default_rng(0)
    hot = np.eye(dim)
    return np.concatenate(
        [
            *(size * hot for size in (1.0, -1.0, 1e3, -1e3)),
            np.full((4, dim), [[1.0], [-1.0], [1e4], [0.1]]),
            rng.standard_normal((32, dim)),
            1e3 + rng.standard_normal((32, dim)),
        ]
    ).astype(np.float32)


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("given", ["neither", "weight", "bias", "both"])
@pytest.mark.parametrize("centre", [True, False], ids=["layer norm", "RMS norm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_normed_vector_is_longer_than_the_bound_and_some_nearly_are(
    dtype: str, centre: bool, given: str, dim: int
) -> None:
    rng = np.random.default_rng(dim)
    # The largest weight is a negative one.
    factors = rng.uniform(0.1, 1.5, dim)
    factors[dim // 3] = -2.5
    weight = jnp.asarray(factors, dtype) if given in ("weight", "both") else None
    offsets = rng.standard_normal(dim) * 0.3
    bias = jnp.asarray(offsets, dtype) if given in ("bias", "both") else None
    x = vectors(dim)
    count = len(x)
    angles = np.tile(rng.uniform(0, 7, (count, dim // 2)), 2)
    tables = jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))
    sequence = JointSequence(active_on("dp=1"), text=0, length=count, padded=count)
    norm = HeadNorm(weight, bias, 1e-6, centre)
    bound = float(token_norms.norm_bound(dim, weight, bias))
    for turn in (None, tables):
        out = token_norms.turned(
            sequence, jnp.asarray(x)[None, None], norm, turn, dtype
        )
        longest = np.linalg.norm(np.asarray(out, np.float64), axis=-1).max()
        assert longest <= bound <= 1.5 * longest


@pytest.mark.parametrize("two_streams", [False, True])
@pytest.mark.parametrize("feature_major", [False, True])
@pytest.mark.parametrize("bounds", [None, (3.0, 5.0)])
def test_no_score_exceeds_the_product_of_both_bounds(
    bounds: Any,
    feature_major: bool,
    two_streams: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {}

    def record(active: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
        given.update(options)
        return q

    for module in (joint, streams):
        monkeypatch.setattr(module, "sequence_attention", record)
    monkeypatch.setattr(
        JointSequence, "feature_major", property(lambda self: feature_major)
    )
    dim, text = 16, 2
    sequence = JointSequence(
        active_on("dp=1"), text=text, length=9, padded=12, text_first=not two_streams
    )

    def heads(tokens: int) -> Any:
        return jnp.ones((1, 3, dim, tokens) if feature_major else (1, 3, tokens, dim))

    both = None if bounds is None else tuple(jnp.float32(x) for x in bounds)
    x = heads(12)
    if two_streams:
        words = heads(text)
        streams.attend_streams(
            sequence,
            (x, x, x),
            (words, words, words),
            jnp.asarray([1]),
            jnp.float32,
            bounds=both,
        )
    else:
        joint.attend(sequence, x, x, x, jnp.float32, bounds=both)
    if bounds is None:
        assert given["score_bound"] is None
    else:
        # The kernel's scores are scaled by 1 / sqrt(16).
        assert float(given["score_bound"]) == pytest.approx(3.0 * 5.0 / 4.0)


def test_a_mean_far_from_zero_costs_a_norm_no_digits() -> None:
    x = (1e3 + np.random.default_rng(0).standard_normal((4, 512))).astype(np.float32)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    truth = centred / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    found = np.asarray(token_norms.normalise(jnp.asarray(x), 1e-6))
    assert np.abs(found - truth).max() <= TOLERANCES["norm float32 large mean"]
