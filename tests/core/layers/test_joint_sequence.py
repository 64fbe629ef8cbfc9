"""The joint sequence hands the kernel what it relies on."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.layers.sequences import active_on
from tests.tolerances import TOLERANCES
from tpuport.core.layers import joint_sequence as joint
from tpuport.core.layers import token_norms
from tpuport.core.layers.joint_sequence import JointSequence


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


def test_a_mean_far_from_zero_costs_a_norm_no_digits() -> None:
    x = (1e3 + np.random.default_rng(0).standard_normal((4, 512))).astype(np.float32)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    truth = centred / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    found = np.asarray(token_norms.normalise(jnp.asarray(x), 1e-6))
    assert np.abs(found - truth).max() <= TOLERANCES["norm float32 large mean"]
