"""Text is written into the joint sequence and read out again, wherever devices part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.sweeps import sweep
from tpuport.core.layers.joint_sequence import JointSequence
from tpuport.core.layers.text_and_video import put_text, take_text, text_alone
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.tracing.context import Active, OpContext


def sequence(devices: int, video: int, text: int) -> JointSequence:
    context = OpContext(
        mesh=build_mesh(MeshSpec.parse((1, devices, 1))),
        platform="cpu",
        records=[],
    )
    active = Active(SimpleNamespace(), cast(Any, context))
    return JointSequence.of(
        active,
        text=text,
        length=video + text,
        batch=2,
        heads=3,
        head_dim=4,
        text_first=False,
    )


@pytest.mark.parametrize(
    ("devices", "video", "text"),
    sweep(
        # Text on part of one device, on several, on all but one, on a few of them.
        [(1, 16, 3), (4, 13, 30), (5, 2, 5), (8, 40, 1), (8, 13, 30), (3, 16, 3)],
        (
            (devices, *counts)
            for devices in (1, 2, 3, 4, 5, 8)
            for counts in ((16, 3), (13, 30), (2, 5), (40, 1))
        ),
    ),
)
def test_text_comes_back_and_all_else_stays(
    devices: int, video: int, text: int
) -> None:
    joined = sequence(devices, video, text)
    assert joined.padded % devices == 0
    rng = np.random.default_rng(0)
    xs, ts = [], []
    for dim in (2, 3):
        shape = [2, 3, 4, 4]
        shape[dim] = joined.padded
        xs.append(rng.normal(size=shape).astype(np.float32))
        shape[dim] = text
        ts.append(rng.normal(size=shape).astype(np.float32))

    @jax.jit
    def put_and_taken(xs: Any, ts: Any) -> Any:
        put = [put_text(joined, *one) for one in zip(xs, ts, (2, 3), strict=True)]
        return put, [take_text(joined, *one) for one in zip(put, (2, 3), strict=True)]

    put, taken = put_and_taken(xs, ts)
    for dim, x, words, found, back in zip((2, 3), xs, ts, put, taken, strict=True):
        expected = np.moveaxis(x.copy(), dim, 0)
        expected[video : video + text] = np.moveaxis(words, dim, 0)
        assert np.array_equal(np.moveaxis(np.asarray(found), dim, 0), expected)
        assert np.array_equal(np.asarray(back), words)


def test_text_alone_is_whole_and_without_padding() -> None:
    joined = sequence(3, 7, 4)
    alone = text_alone(joined)
    assert (joined.padded, alone.length, alone.padded) == (12, 4, 4)
    words = jax.jit(alone.split)(jnp.ones((1, 4, 2)))
    assert words.sharding.is_fully_replicated
    spread = jax.jit(joined.split)(jnp.ones((1, 12, 2)))
    assert not spread.sharding.is_fully_replicated
