"""The convolution kernel against XLA's convolution, in interpret mode."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.sweeps import sweep
from tests.tolerances import TOLERANCES
from tpuport.kernels.convolution import conv
from tpuport.kernels.convolution.conv import (
    MARGIN_BYTES,
    EdgedVideo,
    block_rows,
    edged_convolution,
    output_parts,
    video_convolution,
    vmem_bytes,
)
from tpuport.kernels.convolution.conv_kernel import pitch_of
from tpuport.kernels.padding import round_up

LIMIT = 100 * 2**20


def _case(
    taps: int, frames: int, rows: int, columns: int, channels: int, outputs: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, frames + taps - 1, rows + 2, pitch_of(columns), channels))
    weight = (
        rng.normal(size=(taps, 3, 3, channels, outputs)) / (9 * taps * channels) ** 0.5
    )
    return tuple(a.astype(np.float32) for a in (x, weight, rng.normal(size=outputs)))  # type: ignore[return-value]


def _expected(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, columns: int
) -> np.ndarray:
    out = jax.lax.conv_general_dilated(
        x[:, :, :, : columns + 2],
        weight,
        (1, 1, 1),
        [(0, 0)] * 3,
        dimension_numbers=("NTYXC", "TYXIO", "NTYXC"),
        precision="highest",
    )
    return np.asarray(out) + np.asarray(bias)


def on_jax(tree: Any) -> Any:
    """NumPy's arrays in it as JAX's, which is what kernels take."""
    return jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree
    )


def edged(**given: Any) -> jax.Array:
    """``edged_convolution`` of the parts of its video by name."""
    given = on_jax(given)
    parts = {name: given.pop(name) for name in EdgedVideo._fields if name in given}
    return edged_convolution(EdgedVideo(**parts), **given)


def run(
    x: Any, before: Any, sides: Any, ends: Any, *arrays: Any, **options: Any
) -> jax.Array:
    """``edged_convolution`` of interpreted kernels, as one program."""
    call = functools.partial(
        edged_convolution, **{"vmem_limit": LIMIT, **on_jax(options)}, interpret=True
    )
    return jax.jit(call)(EdgedVideo(x, before, sides, ends), *arrays)


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
    x, weight, bias = _case(taps, frames, rows, columns, channels, outputs)
    found = video_convolution(
        jnp.asarray(x),
        jnp.asarray(weight),
        jnp.asarray(bias),
        columns,
        vmem_limit=LIMIT,
        interpret=True,
    )
    wanted = _expected(x, weight, bias, columns)
    assert found.shape == wanted.shape == (2, frames, rows, columns, outputs)
    assert jnp.abs(found - wanted).max() <= TOLERANCES["module float32"]


# Frames, rows, columns and outputs.
SIZES = [(1, 6, 16, 128), (3, 4, 20, 256), (2, 1, 47, 3), (1, 2, 5, 128)]


@pytest.mark.parametrize(
    ("sizes", "taps", "dtype", "added", "zeros"),
    sweep(
        [
            (SIZES[0], 3, jnp.float32, True, False),
            (SIZES[0], 1, jnp.bfloat16, False, True),
            (SIZES[1], 1, jnp.bfloat16, True, False),
            (SIZES[1], 3, jnp.float32, False, True),
            (SIZES[2], 3, jnp.bfloat16, False, False),
            (SIZES[2], 1, jnp.float32, True, True),
            (SIZES[3], 3, jnp.bfloat16, True, True),
            (SIZES[3], 1, jnp.float32, False, False),
        ],
        itertools.product(
            SIZES, [1, 3], [jnp.float32, jnp.bfloat16], [False, True], [False, True]
        ),
    ),
)
def test_surroundings_may_come_by_themselves(
    sizes: tuple[int, ...], taps: int, dtype: Any, added: bool, zeros: bool
) -> None:
    frames, rows, columns, outputs = sizes
    channels, lag = 128, taps - 1
    x, weight, bias = _case(taps, frames, rows, columns, channels, outputs)
    if zeros:
        # As where rows are not split: nothing above the first and below the last.
        x[:, :, :: rows + 1] = 0
    whole, kernel = x.astype(dtype), weight.astype(dtype)
    # In float32 of the rounded operands: the result is rounded once.
    exact = [np.asarray(a, np.float32) for a in (whole, kernel)]
    wanted = _expected(exact[0], exact[1], bias, columns)
    inner = whole[:, :, 1:-1, 1 : columns + 1]
    residual = np.random.default_rng(1).normal(size=wanted.shape)
    residual = residual.astype(np.float32).astype(dtype)
    found = run(
        inner[:, lag:],
        inner[:, :lag] if lag else None,
        (whole[..., 0, :], whole[..., columns + 1, :]),
        None if zeros else whole[:, :, :: rows + 1, 1 : columns + 1],
        kernel,
        bias,
        residual if added else None,
    )
    assert found.shape == (2, frames, rows, columns, outputs)
    if added:
        wanted = wanted + residual.astype(np.float32)
    # Half a unit in the last place of eight bits.
    bound = 2**-8 * np.abs(wanted) if dtype == jnp.bfloat16 else 0
    error = np.abs(np.asarray(found, np.float32) - wanted)
    assert (error <= bound + TOLERANCES["module float32"]).all()


def test_bfloat16_is_rounded_once() -> None:
    x, weight, bias = _case(3, 2, 6, 20, 128, 128)
    low = [jnp.asarray(a, jnp.bfloat16) for a in (x, weight)]
    found = video_convolution(
        low[0], low[1], jnp.asarray(bias), 20, vmem_limit=LIMIT, interpret=True
    )
    exact = [np.asarray(a, np.float32) for a in low]
    wanted = _expected(exact[0], exact[1], bias, 20)
    # Half a unit in the last place of eight bits, and the order of a float32 sum.
    error = jnp.abs(found.astype(jnp.float32) - wanted)
    assert (error <= jnp.abs(wanted) * 2**-8 + TOLERANCES["module float32"]).all()


def test_what_is_beside_the_picture_does_not_count() -> None:
    x, weight, bias = _case(3, 2, 4, 10, 8, 8)
    other = x.copy()
    other[:, :, :, 12:] = 1e6
    runs = [
        video_convolution(
            jnp.asarray(a),
            jnp.asarray(weight),
            None,
            10,
            vmem_limit=LIMIT,
            interpret=True,
        )
        for a in (x, other)
    ]
    assert (runs[0] == runs[1]).all()
    assert np.isfinite(bias).all()


@pytest.mark.parametrize(
    ("rows", "pitch", "wanted"), [(90, 32, 45), (720, 176, 8), (67, 48, 23), (1, 16, 1)]
)
def test_blocks_divide_the_rows_where_they_can(
    rows: int, pitch: int, wanted: int
) -> None:
    assert block_rows(rows, pitch, 128) == wanted
    assert block_rows(rows, pitch, 512) <= wanted


def test_what_it_cannot_do_is_refused() -> None:
    x, weight, _ = _case(3, 1, 3, 3, 4, 4)
    arrays = jnp.asarray(x), jnp.asarray(weight)
    with pytest.raises(NotImplementedError, match="bytes of VMEM"):
        video_convolution(*arrays, None, 3, vmem_limit=2**20)
    with pytest.raises(NotImplementedError, match="5"):
        video_convolution(
            arrays[0], jnp.zeros((3, 5, 5, 4, 4)), None, 3, vmem_limit=LIMIT
        )
    with pytest.raises(ValueError, match="columns"):
        video_convolution(*arrays, None, 20, vmem_limit=LIMIT)


@pytest.mark.parametrize(
    ("outputs", "parts"), sweep([(384, 3), (1000, 4)], [(1024, 2), (1000, 4), (384, 3)])
)
def test_where_vmem_is_short_outputs_are_made_in_parts(
    outputs: int, parts: int
) -> None:
    frames, rows, columns, channels = 2, 4, 16, 128
    x, weight, bias = _case(3, frames, rows, columns, channels, outputs)
    whole, kernel = x, weight
    sizes = (rows, columns, channels)
    each = round_up(outputs, 128) // parts
    limit = vmem_bytes(*sizes, each, 3, 4) + MARGIN_BYTES
    assert output_parts(*sizes, outputs, 3, 4, limit) == parts
    assert output_parts(*sizes, outputs, 3, 4, LIMIT) == 1
    residual = np.random.default_rng(1).normal(size=(2, frames, rows, columns, outputs))
    inner = whole[:, :, 1:-1, 1 : columns + 1]
    wanted = _expected(x, weight, bias, columns)
    padded = video_convolution(
        *on_jax((whole, kernel, bias)), columns, vmem_limit=limit, interpret=True
    )
    assert np.abs(padded - wanted).max() <= TOLERANCES["module float32"]
    beside = run(
        inner[:, 2:],
        inner[:, :2],
        (whole[..., 0, :], whole[..., columns + 1, :]),
        whole[:, :, :: rows + 1, 1 : columns + 1],
        kernel,
        bias,
        residual.astype(np.float32),
        vmem_limit=limit,
    )
    assert np.abs(beside - wanted - residual).max() <= TOLERANCES["module float32"]


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.float32)


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
        "vmem_limit": LIMIT,
        "interpret": True,
    }


@pytest.mark.parametrize(
    ("sizes", "change", "message"),
    [
        ({"channels": 64}, {}, "64 channels"),
        ({"rows": 67, "columns": 32}, {}, "67 rows in blocks of 23"),
        ({}, {"weight": _zeros((3, 5, 5, 128, 128))}, r"a kernel of \(3, 5, 5\)"),
        ({}, {"weight": _zeros((2, 3, 3, 128, 128))}, r"a kernel of \(2, 3, 3\)"),
        ({}, {"vmem_limit": 2**20}, "bytes of VMEM; there are 1,048,576"),
    ],
    ids=["channels", "rows", "5 x 5", "2 frames", "vmem"],
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
    ],
    ids=["none", "before", "frames", "right", "left", "ends", "residual"],
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
        video_convolution(
            *on_jax((_zeros(shape), _zeros(weight))), None, 3, vmem_limit=LIMIT
        )


@pytest.mark.parametrize(
    ("taps", "deep", "outputs", "dtype"),
    sweep(
        [(3, 256, 128, jnp.bfloat16), (1, 128, 256, jnp.float32)],
        (
            (*sizes, dtype)
            for sizes in ((3, 256, 128), (1, 128, 256))
            for dtype in (jnp.float32, jnp.bfloat16)
        ),
    ),
)
def test_a_shortcut_is_added_before_the_result_is_rounded(
    taps: int, deep: int, outputs: int, dtype: Any
) -> None:
    frames, rows, columns, channels, lag = 2, 4, 16, 128, taps - 1
    x, weight, bias = _case(taps, frames, rows, columns, channels, outputs)
    rng = np.random.default_rng(1)
    short = rng.normal(size=(2, frames, rows, columns, deep)).astype(dtype)
    matrix = (rng.normal(size=(deep, outputs)) / deep**0.5).astype(dtype)
    whole, kernel = x.astype(dtype), weight.astype(dtype)
    inner = whole[:, :, 1:-1, 1 : columns + 1]
    given: dict[str, Any] = {
        "x": inner[:, lag:],
        "before": inner[:, :lag] if lag else None,
        "sides": (whole[..., 0, :], whole[..., columns + 1, :]),
        "ends": whole[:, :, :: rows + 1, 1 : columns + 1],
        "weight": kernel,
        "bias": bias,
    }
    call = functools.partial(edged, vmem_limit=LIMIT, interpret=True)
    found = jax.jit(call)(**given, shortcut=(short, matrix))
    exact = [np.asarray(a, np.float32) for a in (whole, kernel, short, matrix)]
    wanted = _expected(exact[0], exact[1], bias, columns) + exact[2] @ exact[3]
    bound = 2**-8 * np.abs(wanted) if dtype == jnp.bfloat16 else 0
    error = np.abs(np.asarray(found, np.float32) - wanted)
    assert (error <= bound + TOLERANCES["module float32"]).all()
    with pytest.raises(ValueError, match="matrix of"):
        call(**given, shortcut=(short, matrix[:-1]))
    with pytest.raises(NotImplementedError, match="shortcut of 16 columns, 64"):
        call(**given, shortcut=(short[..., :64], matrix[:64]))


# Frames, rows, columns, outputs and copies.
ENLARGED = [(2, 6, 16, 128, 2), (1, 14, 5, 256, 1)]


@pytest.mark.parametrize(
    ("sizes", "dtype", "zeros"),
    sweep(
        [
            (ENLARGED[0], jnp.float32, False),
            (ENLARGED[1], jnp.bfloat16, False),
            (ENLARGED[1], jnp.float32, True),
        ],
        itertools.product(ENLARGED, [jnp.float32, jnp.bfloat16], [False, True]),
    ),
)
def test_a_video_is_enlarged_on_the_way(
    sizes: tuple[int, ...], dtype: Any, zeros: bool
) -> None:
    frames, rows, columns, outputs, copies = sizes
    x, weight, bias = _case(1, frames, rows, columns, 128, outputs)
    if zeros:
        x[:, :, :: rows + 1] = 0
    whole = x.astype(dtype)[..., : columns + 2, :]
    kernel = weight.astype(dtype)
    found = run(
        whole[:, :, 1:-1, 1:-1],
        None,
        (whole[..., 0, :], whole[..., -1, :]),
        None if zeros else whole[:, :, :: rows + 1, 1:-1],
        kernel,
        bias,
        scale=2,
        copies=copies,
    )
    # What lies around is enlarged as well; one row and column of it is beside.
    wide = np.asarray(whole, np.float32).repeat(2, 2).repeat(2, 3)[:, :, 1:-1, 1:-1]
    wanted = _expected(wide, np.asarray(kernel, np.float32), bias, 2 * columns)
    wanted = wanted.repeat(copies, 1)
    assert found.shape == (2, copies * frames, 2 * rows, 2 * columns, outputs)
    bound = 2**-8 * np.abs(wanted) if dtype == jnp.bfloat16 else 0
    error = np.abs(np.asarray(found, np.float32) - wanted)
    assert (error <= bound + TOLERANCES["module float32"]).all()


def test_more_than_one_frame_is_not_enlarged() -> None:
    with pytest.raises(NotImplementedError, match="3 frames, enlarged 2 times"):
        edged(**_edged(), scale=2)


SEVERAL = {
    "planes": {"taps": 3, "rows": 24, "outputs": 3},
    "planes, nothing around": {"taps": 3, "rows": 16, "outputs": 3, "ends": False},
    "packed": {"taps": 3, "rows": 12, "outputs": 3, "step": 128},
    "residual": {"taps": 3, "rows": 8, "outputs": 128, "step": 128, "added": True},
    "shortcut": {"taps": 1, "rows": 8, "outputs": 256, "step": 128, "deep": 256},
    "enlarged": {"taps": 1, "rows": 24, "outputs": 128, "scale": 2},
    "enlarged, nothing around": {
        "taps": 1,
        "rows": 16,
        "outputs": 384,
        "scale": 2,
        "copies": 2,
        "step": 128,
        "ends": False,
    },
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    sweep(
        # In bfloat16: test_conv_phantoms.py.
        [(name, jnp.float32) for name in SEVERAL],
        itertools.product(SEVERAL, [jnp.float32, jnp.bfloat16]),
    ),
)
def test_blocks_of_rows_meet(
    name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks in every form: the first, those between and the last one."""
    chosen: dict[str, Any] = {"step": 256, "ends": True, "scale": 1, "copies": 1}
    chosen |= SEVERAL[name]
    monkeypatch.setattr(conv, "STEP_PRODUCTS", chosen["step"] * 128 * 128)
    taps, rows, outputs, scale = (
        chosen[key] for key in ("taps", "rows", "outputs", "scale")
    )
    frames, columns, channels, lag = 2, 16, 128, taps - 1
    height, width = rows // scale, columns // scale
    x, weight, bias = _case(taps, frames, height, width, channels, outputs)
    x = x[..., : width + 2, :]
    if not chosen["ends"]:
        x[:, :, :: height + 1] = 0
    whole, kernel = x.astype(dtype), weight.astype(dtype)
    pitch = scale * pitch_of(columns)
    assert height > scale * block_rows(height, pitch, channels)
    wide = np.asarray(whole, np.float32)
    if scale == 2:
        wide = wide.repeat(2, 2).repeat(2, 3)[:, :, 1:-1, 1:-1]
    wanted = _expected(wide, np.asarray(kernel, np.float32), bias, columns)
    rng = np.random.default_rng(1)
    more: dict[str, Any] = {}
    if "added" in chosen:
        more["residual"] = rng.normal(size=wanted.shape).astype(dtype)
        wanted = wanted + more["residual"].astype(np.float32)
    if "deep" in chosen:
        short = rng.normal(size=(*wanted.shape[:4], chosen["deep"]))
        matrix = rng.normal(size=(chosen["deep"], outputs)) / 16
        more["shortcut"] = short.astype(dtype), matrix.astype(dtype)
        exact = [np.asarray(a, np.float32) for a in more["shortcut"]]
        wanted = wanted + exact[0] @ exact[1]
    found = run(
        whole[:, lag:, 1:-1, 1:-1],
        whole[:, :lag, 1:-1, 1:-1] if lag else None,
        (whole[..., 0, :], whole[..., -1, :]),
        whole[:, :, :: height + 1, 1:-1] if chosen["ends"] else None,
        kernel,
        bias,
        scale=scale,
        copies=chosen["copies"],
        **more,
    )
    wanted = wanted.repeat(chosen["copies"], 1)
    assert found.shape == wanted.shape
    bound = 2**-8 * np.abs(wanted) if dtype == jnp.bfloat16 else 0
    error = np.abs(np.asarray(found, np.float32) - wanted)
    assert (error <= bound + TOLERANCES["module float32"]).all()
