"""The convolution kernel where the last rows and columns are not of the picture.

Whatever is in them, the others come as if there were zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.convolution.test_conv import (
    LIMIT,
    SEVERAL,
    _case,
    _edged,
    _expected,
    edged,
)
from tests.processes import needs_libtpu, run_json
from tests.sweeps import sweep
from tests.tolerances import TOLERANCES
from tpuport.kernels.convolution import conv
from tpuport.kernels.convolution.conv import block_rows
from tpuport.kernels.convolution.conv_kernel import pitch_of

#: Of the result: three tiles of them, or one and a half before it is enlarged.
COLUMNS = 48


class Form:
    """A form of the kernel, with several blocks of rows, and what it is given."""

    def __init__(self, name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        chosen: dict[str, Any] = {"step": 256, "ends": True, "scale": 1, "copies": 1}
        self.chosen = chosen = chosen | SEVERAL[name]
        # As many rows as with a third of the columns.
        step = 3 * chosen["step"] * 128 * 128
        monkeypatch.setattr(conv, "STEP_PRODUCTS", step)
        self.dtype, self.scale, self.taps = dtype, chosen["scale"], chosen["taps"]
        self.rows, self.columns = chosen["rows"] // self.scale, COLUMNS // self.scale
        self.block = block_rows(self.rows, self.scale * pitch_of(COLUMNS), 128)
        assert self.rows > self.block > 1
        outputs = chosen["outputs"]
        x, kernel, bias = _case(self.taps, 2, self.rows, self.columns, 128, outputs)
        # One video: that there may be two is seen to without phantoms.
        self.x = x[:1, ..., : self.columns + 2, :].astype(dtype)
        self.kernel, self.bias = kernel.astype(dtype), bias
        rng = np.random.default_rng(1)
        size = (1, 2, chosen["rows"], COLUMNS)
        self.more: dict[str, np.ndarray] = {}
        if "added" in chosen:
            self.more["residual"] = rng.normal(size=(*size, outputs)).astype(dtype)
        if "deep" in chosen:
            deep = chosen["deep"]
            self.more["short"] = rng.normal(size=(*size, deep)).astype(dtype)
            matrix = rng.normal(size=(deep, outputs)) / 16
            self.more["matrix"] = matrix.astype(dtype)

    def wanted(self, rows: int, columns: int) -> np.ndarray:
        """Of a picture of so many rows and columns, before frames are copied."""
        x = self.zeroed(rows, columns).astype(np.float32)
        if self.scale == 2:
            x = x.repeat(2, 2).repeat(2, 3)[:, :, 1:-1, 1:-1]
        out = _expected(x, self.kernel.astype(np.float32), self.bias, COLUMNS)
        more = {name: np.asarray(v, np.float32) for name, v in self.more.items()}
        if "residual" in more:
            out = out + more["residual"]
        if "short" in more:
            out = out + more["short"] @ more["matrix"]
        return out[:, :, : self.scale * rows, : self.scale * columns]

    def zeroed(self, rows: int, columns: int) -> np.ndarray:
        """What is convolved, with zeros for what lies beyond the picture."""
        x = self.x.copy()
        if not self.chosen["ends"]:
            x[:, :, :: self.rows + 1] = 0
        if rows < self.rows:
            x[:, :, rows + 1 :] = 0
        if columns < self.columns:
            x[:, :, :, columns + 1 :] = 0
        return x

    def given(self, rows: int, columns: int) -> dict[str, Any]:
        """The same for the kernel, with anything in phantom rows and columns."""
        zeroed = self.zeroed(rows, columns)
        x = zeroed.copy()
        x[:, :, rows + 1 : -1] = np.nan
        x[:, :, :, columns + 1 : -1] = 1e30
        lag = self.taps - 1
        return {
            "x": x[:, lag:, 1:-1, 1:-1],
            "before": x[:, :lag, 1:-1, 1:-1] if lag else None,
            "sides": (zeroed[..., 0, :], zeroed[..., -1, :]),
            "ends": x[:, :, :: self.rows + 1, 1:-1] if self.chosen["ends"] else None,
        }

    def kernel_of(self, *some: bool) -> Callable[..., jax.Array]:
        """Of what is given and two numbers, of which those of ``some`` may be any."""
        added: dict[str, Any] = {}
        if "residual" in self.more:
            added["residual"] = self.more["residual"]
        if "short" in self.more:
            added["shortcut"] = self.more["short"], self.more["matrix"]

        def run(given: dict[str, Any], *real: Any) -> jax.Array:
            sides = (self.rows, self.columns)
            counts = [
                n if any_ else side
                for n, side, any_ in zip(real, sides, some, strict=True)
            ]
            return edged(
                **given,
                weight=self.kernel,
                bias=self.bias,
                scale=self.scale,
                copies=self.chosen["copies"],
                real=(counts[0], counts[1]),
                vmem_limit=LIMIT,
                interpret=True,
                **added,
            )

        return jax.jit(run)

    def is_alone(self, found: jax.Array, rows: int, columns: int) -> bool:
        """Whether real elements are what they would be alone."""
        wanted = self.wanted(rows, columns).repeat(self.chosen["copies"], 1)
        real = np.asarray(found, np.float32)
        real = real[:, :, : wanted.shape[2], : wanted.shape[3]]
        bound = 2**-8 * np.abs(wanted) if self.dtype == jnp.bfloat16 else 0
        close = np.abs(real - wanted) <= bound + TOLERANCES["module float32"]
        return real.shape == wanted.shape and bool(close.all())


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
    form = Form(name, dtype, monkeypatch)
    run = form.kernel_of(True, True)
    # The last row of a block, the first and the second one; one before, in and after
    # the first column of a tile; one of all, and all of them.
    blocks = [1, form.block - 1, form.block, form.block + 1, form.rows - 1, form.rows]
    tiles = [15, 1, 16, form.columns, 17, form.columns - 1]
    for rows, columns in zip(blocks, tiles, strict=True):
        found = run(form.given(rows, columns), rows, columns)
        assert form.is_alone(found, rows, columns), (rows, columns)
    if dtype == jnp.bfloat16:
        # Where all are real nothing changes.
        sides = (form.rows, form.columns)
        given = form.given(*sides)
        even = form.kernel_of(False, False)
        assert (run(given, *sides) == even(given, *sides)).all()


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
    form = Form(name, jnp.float32, monkeypatch)
    rows = form.block if some[0] else form.rows
    columns = 17 if some[1] else form.columns
    found = form.kernel_of(*some)(form.given(rows, columns), rows, columns)
    assert form.is_alone(found, rows, columns)


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
