"""The convolution kernel where the last rows and columns are not of the picture.

Whatever is in them, the others come as if there were zeros.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import pytest

from tests.kernels.convolution.forms import SEVERAL, Form, edged
from tests.kernels.convolution.test_conv import _edged
from tests.processes import needs_libtpu, run_json
from tests.sweeps import sweep
from tpuport.kernels.convolution import conv

#: Of the result: three tiles of them, or one and a half before it is enlarged.
COLUMNS = 48


def form_of(name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> Form:
    """A form of the kernel with several blocks of rows."""
    step, fields = SEVERAL[name]
    # As many rows as with a third of the columns.
    monkeypatch.setattr(conv, "STEP_PRODUCTS", 3 * step * 128 * 128)
    # One video: that there may be two is seen to without phantoms.
    form = Form(**fields, columns=COLUMNS, videos=1, dtype=dtype)
    assert form.sides[0] > form.block > 1
    return form


@pytest.mark.parametrize(
    ("name", "dtype"),
    sweep(
        [(name, jnp.bfloat16) for name in SEVERAL],
        itertools.product(SEVERAL, [jnp.float32, jnp.bfloat16]),
    ),
)
def test_what_is_in_phantoms_does_not_count(
    name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = form_of(name, dtype, monkeypatch)
    run, (height, width) = form.kernel(True, True), form.sides
    # The last row of a block, the first and the second one; one before, in and after
    # the first column of a tile; one of all, and all of them.
    blocks = [1, form.block - 1, form.block, form.block + 1, height - 1, height]
    tiles = [15, 1, 16, width, 17, width - 1]
    for real in zip(blocks, tiles, strict=True):
        assert form.is_right(run(form.video(*real), *real), *real), real
    if dtype == jnp.bfloat16:
        # Where all are real nothing changes.
        video, even = form.video(height, width), form.kernel(False, False)
        assert (run(video, height, width) == even(video, height, width)).all()


@pytest.mark.parametrize(
    ("name", "some"),
    sweep(
        [
            ("planes", (True, False)),
            ("residual", (False, True)),
            ("enlarged", (True, False)),
            ("enlarged", (False, True)),
        ],
        itertools.product(
            ["planes", "residual", "enlarged"], [(True, False), (False, True)]
        ),
    ),
)
def test_one_side_may_be_even(
    name: str, some: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    form = form_of(name, jnp.float32, monkeypatch)
    rows = form.block if some[0] else form.sides[0]
    columns = 17 if some[1] else form.sides[1]
    found = form.kernel(*some)(form.video(rows, columns), rows, columns)
    assert form.is_right(found, rows, columns)


def test_a_number_for_every_device_is_that_of_the_side() -> None:
    for real in ((3, 16), (4, 15)):
        with pytest.raises(ValueError, match="for every device"):
            edged(**_edged(), real=real)


PROGRAM = r"""
import json
import jax, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tpuport.core.mesh.chips import CHIPS
from tpuport.kernels.convolution.conv import EdgedVideo, edged_convolution

devices = topologies.get_topology_desc(topology_name="v6e:2x4", platform="tpu").devices
mesh = Mesh(np.array(devices[:1]), ("one",))
whole = NamedSharding(mesh, PartitionSpec())
limit = CHIPS["v6e"].vmem_bytes * 7 // 8
kernels = []
# Two tiles of columns, of which the second one is not whole, and blocks of rows.
forms = ((3, 256, 1, "bfloat16"), (3, 3, 1, "bfloat16"), (1, 128, 2, "bfloat16"))
for taps, outputs, scale, dtype in (*forms, (3, 128, 1, "float32")):
    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    lag = taps - 1
    side = array(1, 2 + lag, 92, 128)
    given = {
        "x": array(1, 2, 90, 22, 128),
        "before": array(1, lag, 90, 22, 128) if lag else None,
        "sides": (side, side),
        "ends": array(1, 2 + lag, 2, 22, 128),
    }
    weight = array(taps, 3, 3, 128, outputs)

    def run(given, weight, real):
        video = EdgedVideo(**given, real=(real[0], real[1]))
        return edged_convolution(video, weight, None, scale=scale, vmem_limit=limit)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(run).trace(given, weight, array(2, dtype="int32"))
    text = traced.lower().compile().as_text()
    kernels.append(text.count('custom_call_target="tpu_custom_call"'))
print(json.dumps({"kernels": kernels}))
"""


@needs_libtpu
def test_it_compiles_for_a_chip() -> None:
    """12 CPU seconds: four kernels compiled for a TPU."""
    assert run_json(PROGRAM)["kernels"] == [1, 1, 1, 1]
