"""The convolution kernel against XLA's convolution, in interpret mode."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.convolution.forms import (
    LIMIT,
    SEVERAL,
    Form,
    arrays_of,
    convolved,
    edged,
    is_close,
)
from tests.sweeps import sweep
from tpuport.kernels.convolution import conv
from tpuport.kernels.convolution.conv import (
    MARGIN_BYTES,
    block_rows,
    output_parts,
    video_convolution,
    vmem_bytes,
)
from tpuport.kernels.convolution.conv_kernel import pitch_of
from tpuport.kernels.padding import round_up


def padded(
    x: Any, weight: Any, bias: Any, columns: int, limit: int = LIMIT
) -> jax.Array:
    """``video_convolution`` interpreted."""
    arrays = [None if a is None else jnp.asarray(a) for a in (x, weight, bias)]
    return video_convolution(*arrays, columns, vmem_limit=limit, interpret=True)


@pytest.mark.parametrize(
    ("taps", "frames", "rows", "columns", "channels", "outputs"),
    sweep(
        [
            (3, 3, 5, 14, 8, 16),
            (1, 1, 4, 16, 130, 3),
            (3, 2, 3, 5, 256, 256),
            (3, 4, 67, 46, 4, 130),
        ],
        (
            (taps, *sizes)
            for taps in (1, 3)
            for sizes in (
                (3, 5, 14, 8, 16),
                (1, 4, 16, 130, 3),
                (2, 3, 5, 256, 256),
                (4, 67, 46, 4, 130),
            )
        ),
    ),
)
def test_it_is_the_convolution(
    taps: int, frames: int, rows: int, columns: int, channels: int, outputs: int
) -> None:
    arrays = arrays_of(taps, frames, rows, columns, channels, outputs)
    found = padded(*arrays, columns)
    assert found.shape == (2, frames, rows, columns, outputs)
    assert is_close(found, convolved(*arrays, columns))


def test_bfloat16_is_rounded_once() -> None:
    x, weight, bias = arrays_of(3, 2, 6, 20, 128, 128)
    low = [a.astype(jnp.bfloat16) for a in (x, weight)]
    assert is_close(padded(*low, bias, 20), convolved(*low, bias, 20))


def test_what_is_beside_the_picture_does_not_count() -> None:
    x, weight, _ = arrays_of(3, 2, 4, 10, 8, 8)
    found = padded(x, weight, None, 10)
    x[:, :, :, 12:] = 1e6
    assert (padded(x, weight, None, 10) == found).all()


# Frames, rows, columns and outputs.
SIZES = [(1, 6, 16, 128), (3, 4, 20, 256), (2, 1, 47, 3), (1, 2, 5, 128)]
#: Rows and columns are those of the result.
ENLARGED = [(2, 12, 32, 128, 2), (1, 28, 10, 256, 1)]
FLOATS = [jnp.float32, jnp.bfloat16]


def beside(
    sizes: tuple[int, ...], taps: int, dtype: Any, added: bool, ends: bool
) -> Form:
    """A form with nothing but surroundings, and perhaps a residual."""
    frames, rows, columns, outputs = sizes
    return Form(
        rows=rows, columns=columns, taps=taps, frames=frames, outputs=outputs,
        dtype=dtype, added=added, ends=ends,
    )  # fmt: skip


def enlarged(sizes: tuple[int, ...], dtype: Any, ends: bool) -> Form:
    frames, rows, columns, outputs, copies = sizes
    return Form(
        rows=rows, columns=columns, taps=1, frames=frames, outputs=outputs,
        dtype=dtype, ends=ends, scale=2, copies=copies,
    )  # fmt: skip


def shortcut(taps: int, deep: int, outputs: int, dtype: Any) -> Form:
    return Form(rows=4, taps=taps, outputs=outputs, deep=deep, dtype=dtype)


@pytest.mark.parametrize(
    "form",
    sweep(
        [
            beside(SIZES[0], 3, jnp.float32, True, True),
            beside(SIZES[0], 1, jnp.bfloat16, False, False),
            beside(SIZES[1], 1, jnp.bfloat16, True, True),
            beside(SIZES[1], 3, jnp.float32, False, False),
            beside(SIZES[2], 3, jnp.bfloat16, False, True),
            beside(SIZES[2], 1, jnp.float32, True, False),
            beside(SIZES[3], 3, jnp.bfloat16, True, False),
            beside(SIZES[3], 1, jnp.float32, False, True),
            enlarged(ENLARGED[0], jnp.float32, True),
            enlarged(ENLARGED[1], jnp.bfloat16, True),
            enlarged(ENLARGED[1], jnp.float32, False),
            shortcut(3, 256, 128, jnp.bfloat16),
            shortcut(1, 128, 256, jnp.float32),
        ],
        [
            *itertools.starmap(
                beside,
                itertools.product(SIZES, [1, 3], FLOATS, [False, True], [False, True]),
            ),
            *itertools.starmap(
                enlarged, itertools.product(ENLARGED, FLOATS, [False, True])
            ),
            *(shortcut(3, 256, 128, dtype) for dtype in FLOATS),
            *(shortcut(1, 128, 256, dtype) for dtype in FLOATS),
        ],
        single=True,
    ),
    ids=str,
)
def test_surroundings_may_come_by_themselves(form: Form) -> None:
    found = form.kernel()(form.video(*form.sides))
    assert form.is_right(found, *form.sides)


@pytest.mark.parametrize(
    ("name", "dtype"),
    sweep(
        # In bfloat16: test_conv_phantoms.py.
        [(name, jnp.float32) for name in SEVERAL],
        itertools.product(SEVERAL, FLOATS),
    ),
)
def test_blocks_of_rows_meet(
    name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks in every form: the first, those between and the last one."""
    step, fields = SEVERAL[name]
    monkeypatch.setattr(conv, "STEP_PRODUCTS", step * 128 * 128)
    form = Form(**fields, dtype=dtype)
    assert form.sides[0] > form.scale * form.block
    found = form.kernel()(form.video(*form.sides))
    assert form.is_right(found, *form.sides)


@pytest.mark.parametrize(
    ("rows", "pitch", "wanted"), [(90, 32, 45), (720, 176, 8), (67, 48, 23), (1, 16, 1)]
)
def test_blocks_divide_the_rows_where_they_can(
    rows: int, pitch: int, wanted: int
) -> None:
    assert block_rows(rows, pitch, 128) == wanted
    assert block_rows(rows, pitch, 512) <= wanted


def test_what_it_cannot_do_is_refused() -> None:
    x, weight, _ = arrays_of(3, 1, 3, 3, 4, 4)
    with pytest.raises(NotImplementedError, match="bytes of VMEM"):
        padded(x, weight, None, 3, 2**20)
    with pytest.raises(NotImplementedError, match="5"):
        padded(x, np.zeros((3, 5, 5, 4, 4)), None, 3)
    with pytest.raises(ValueError, match="columns"):
        padded(x, weight, None, 20)


@pytest.mark.parametrize(
    ("outputs", "parts"), sweep([(384, 3), (1000, 4)], [(1024, 2), (1000, 4), (384, 3)])
)
def test_where_vmem_is_short_outputs_are_made_in_parts(
    outputs: int, parts: int
) -> None:
    form = Form(rows=4, outputs=outputs, added=True)
    sizes = (form.rows, form.columns, 128)
    limit = vmem_bytes(*sizes, round_up(outputs, 128) // parts, 3, 4) + MARGIN_BYTES
    assert output_parts(*sizes, outputs, 3, 4, limit) == parts
    assert output_parts(*sizes, outputs, 3, 4, LIMIT) == 1
    arrays = arrays_of(3, 2, *sizes, outputs)
    assert is_close(padded(*arrays, 16, limit), convolved(*arrays, 16))
    found = form.kernel(vmem_limit=limit)(form.video(*form.sides))
    assert form.is_right(found, *form.sides)


def _zeros(shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def _edged(rows: int = 4, columns: int = 16, channels: int = 128) -> dict[str, Any]:
    """Arguments of a convolution of 3 x 3 x 3 with surroundings, two frames."""
    frames = 4
    return {
        "x": _zeros((1, 2, rows, columns, channels)),
        "before": _zeros((1, 2, rows, columns, channels)),
        "sides": (_zeros((1, frames, rows + 2, channels)),) * 2,
        "ends": _zeros((1, frames, 2, columns, channels)),
        "weight": _zeros((3, 3, 3, channels, 128)),
        "bias": None,
        "residual": _zeros((1, 2, rows, columns, 128)),
    }


def _short(deep: int, rows: int = 0) -> dict[str, Any]:
    """A shortcut of so many channels, by a matrix of as many rows or others."""
    return {"shortcut": (_zeros((1, 2, 4, 16, deep)), _zeros((rows or deep, 128)))}


@pytest.mark.parametrize(
    ("sizes", "change", "message"),
    [
        ({"channels": 64}, {}, "64 channels"),
        ({"rows": 67, "columns": 32}, {}, "67 rows in blocks of 23"),
        ({}, {"weight": _zeros((3, 5, 5, 128, 128))}, r"a kernel of \(3, 5, 5\)"),
        ({}, {"weight": _zeros((2, 3, 3, 128, 128))}, r"a kernel of \(2, 3, 3\)"),
        ({}, {"vmem_limit": 2**20}, "bytes of VMEM; there are 1,048,576"),
        ({}, _short(64), "shortcut of 16 columns, 64"),
        ({}, {"scale": 2}, "3 frames, enlarged 2 times"),
    ],
    ids=["channels", "rows", "5 x 5", "2 frames", "vmem", "shortcut", "enlarged"],
)
def test_with_surroundings_too_what_it_cannot_do_is_refused(
    sizes: dict[str, int], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        edged(**_edged(**sizes) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"before": None}, r"before of None; with \(1, 2, 4, 16, 128\) it is"),
        ({"before": _zeros((1, 1, 4, 16, 128))}, "before of"),
        ({"weight": _zeros((1, 3, 3, 128, 128))}, "left of"),
        ({"sides": (_zeros((1, 4, 6, 128)), _zeros((1, 4, 4, 128)))}, "right of"),
        ({"sides": (_zeros((1, 4, 4, 128)), _zeros((1, 4, 6, 128)))}, "left of"),
        ({"ends": _zeros((1, 4, 2, 18, 128))}, "ends of"),
        ({"residual": _zeros((1, 2, 4, 16, 64))}, "residual of"),
        (_short(128, 127), "matrix of"),
    ],
    ids=["none", "before", "frames", "right", "left", "ends", "residual", "matrix"],
)
def test_surroundings_that_do_not_fit_are_named(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        edged(**_edged() | change)


def test_frames_before_a_kernel_of_one_frame_are_refused() -> None:
    given = _edged() | {
        "weight": _zeros((1, 3, 3, 128, 128)),
        "sides": (_zeros((1, 2, 6, 128)),) * 2,
        "ends": _zeros((1, 2, 2, 16, 128)),
    }
    with pytest.raises(ValueError, match="before of"):
        edged(**given)
    assert edged(**given | {"before": None}).shape == (1, 2, 4, 16, 128)


@pytest.mark.parametrize(
    ("shape", "weight"),
    [
        ((1, 3, 5, pitch_of(3), 4), (3, 3, 3, 5, 4)),
        ((1, 2, 5, pitch_of(3), 4), (3, 3, 3, 4, 4)),
        ((1, 3, 5, pitch_of(3) + 16, 4), (3, 3, 3, 4, 4)),
    ],
    ids=["channels", "frames", "pitch"],
)
def test_a_padded_video_that_does_not_fit_is_refused(
    shape: tuple[int, ...], weight: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="3 columns"):
        padded(_zeros(shape), _zeros(weight), None, 3)
