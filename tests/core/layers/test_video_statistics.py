"""Statistics of a picture that devices share unevenly, by the kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.mesh.test_spatial_split import DIMS, SHAPES, pixels, split
from tests.tolerances import TOLERANCES
from tpuport.core.layers.video_layers import _channel_statistics
from tpuport.core.mesh.spatial_split import Space
from tpuport.core.tracing.context import AttentionPolicy, OpContext


def refused(*args: Any) -> Any:
    raise AssertionError("XLA's statistics")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_leaves_phantoms_out(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Space, "moments", refused)
    # Where a difference of squares would have lost a few digits.
    x = pixels(shape, mean=30.0)
    factors = 1 + np.arange(128, dtype=np.float32) / 128

    def run(space: Any, x: Any) -> dict[str, Any]:
        if x is None:
            return {"whole": None}
        context = OpContext(
            mesh=None,
            platform="tpu",
            attention=AttentionPolicy(),
            space=space,
            records=[],
        )
        real = space.mask(x.shape, DIMS)
        x = x if real is None else jnp.where(real, x, jnp.nan)
        # Its channels as frames, with channels of their own.
        found = _channel_statistics(context, x[..., None] * factors)
        return {"whole": jnp.concatenate(found, axis=1)}

    found = split(run, x)["whole"]
    wide = x.astype(np.float64)
    mean = wide.mean((1, 2, 3))[:, None] * factors
    variance = wide.var((1, 2, 3))[:, None] * factors**2
    assert found.shape == (shape[0], 256)
    assert np.abs(found[:, :128] / mean - 1).max() <= TOLERANCES["norm float32"]
    assert np.abs(found[:, 128:] / variance - 1).max() <= TOLERANCES["norm float32"]
