"""Forms of the convolution kernel with surroundings, and what each should give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.tolerances import TOLERANCES
from tpuport.kernels.convolution.conv import EdgedVideo, block_rows, edged_convolution
from tpuport.kernels.convolution.conv_kernel import pitch_of

LIMIT = 100 * 2**20
CHANNELS = 128


def arrays_of(
    taps: int, frames: int, rows: int, columns: int, channels: int, outputs: int
) -> tuple[np.ndarray, ...]:
    """Two padded videos, a kernel and a bias, float32."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, frames + taps - 1, rows + 2, pitch_of(columns), channels))
    weight = rng.normal(size=(taps, 3, 3, channels, outputs))
    weight /= (9 * taps * channels) ** 0.5
    return tuple(a.astype(np.float32) for a in (x, weight, rng.normal(size=outputs)))


def convolved(x: Any, weight: Any, bias: Any, columns: int) -> np.ndarray:
    """What XLA makes of a padded video, in float32."""
    x, weight, bias = (np.asarray(array, np.float32) for array in (x, weight, bias))
    out = jax.lax.conv_general_dilated(
        x[:, :, :, : columns + 2],
        weight,
        (1, 1, 1),
        [(0, 0)] * 3,
        dimension_numbers=("NTYXC", "TYXIO", "NTYXC"),
        precision="highest",
    )
    return np.asarray(out) + bias


def is_close(found: Any, wanted: np.ndarray) -> bool:
    """Whether a result is right; one in bfloat16, if it was rounded once."""
    # Half a unit in the last place of eight bits, and the order of a float32 sum.
    bound = 2**-8 * np.abs(wanted) if found.dtype == jnp.bfloat16 else 0
    error = np.abs(np.asarray(found, np.float32) - wanted)
    same = found.shape == wanted.shape
    return same and bool((error <= bound + TOLERANCES["module float32"]).all())


def edged(**given: Any) -> jax.Array:
    """``edged_convolution`` of the parts of its video by name, interpreted."""
    given = jax.tree.map(
        lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x,
        {"vmem_limit": LIMIT, "interpret": True, **given},
    )
    parts = {name: given.pop(name) for name in EdgedVideo._fields if name in given}
    return edged_convolution(EdgedVideo(**parts), **given)


@dataclass(frozen=True, kw_only=True)
class Form:
    """A convolution of videos of 128 channels.

    Attributes:
        rows, columns: of the result.
        ends: whether there are rows above the first and below the last.
        added: whether there is a residual.
        deep: channels of a shortcut; 0 without one.
    """

    rows: int
    columns: int = 16
    taps: int = 3
    frames: int = 2
    outputs: int = 128
    videos: int = 2
    dtype: Any = jnp.float32
    ends: bool = True
    added: bool = False
    deep: int = 0
    scale: int = 1
    copies: int = 1

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of the video, before it is enlarged."""
        return self.rows // self.scale, self.columns // self.scale

    @property
    def block(self) -> int:
        """Rows of the video in a block."""
        pitch = self.scale * pitch_of(self.columns)
        return block_rows(self.sides[0], pitch, CHANNELS)

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The padded videos and all that is not of the picture."""
        rows, columns = self.sides
        sizes = (self.taps, self.frames, rows, columns, CHANNELS, self.outputs)
        x, weight, bias = arrays_of(*sizes)
        made = {"x": x[: self.videos, ..., : columns + 2, :], "weight": weight}
        if not self.ends:
            made["x"][:, :, :: rows + 1] = 0
        rng = np.random.default_rng(1)
        size = (self.videos, self.frames, self.rows, self.columns)
        if self.added:
            made["residual"] = rng.normal(size=(*size, self.outputs))
        if self.deep:
            made["short"] = rng.normal(size=(*size, self.deep))
            matrix = rng.normal(size=(self.deep, self.outputs))
            made["matrix"] = matrix / self.deep**0.5
        made = {name: array.astype(self.dtype) for name, array in made.items()}
        return made | {"bias": bias}

    def zeroed(self, rows: int, columns: int) -> np.ndarray:
        """The padded videos, with zeros for what lies beyond so large a picture."""
        x = self.arrays["x"].copy()
        if rows < self.sides[0]:
            x[:, :, rows + 1 :] = 0
        if columns < self.sides[1]:
            x[:, :, :, columns + 1 :] = 0
        return x

    def video(self, rows: int, columns: int) -> dict[str, Any]:
        """The parts of the kernel's video, anything in phantom rows and columns."""
        zeroed = self.zeroed(rows, columns)
        x, lag = zeroed.copy(), self.taps - 1
        x[:, :, rows + 1 : -1] = np.nan
        x[:, :, :, columns + 1 : -1] = 1e30
        return {
            "x": x[:, lag:, 1:-1, 1:-1],
            "before": x[:, :lag, 1:-1, 1:-1] if lag else None,
            "sides": (zeroed[..., 0, :], zeroed[..., -1, :]),
            "ends": x[:, :, :: self.sides[0] + 1, 1:-1] if self.ends else None,
        }

    def kernel(self, *some: bool, **options: Any) -> Callable[..., jax.Array]:
        """Of a video and two numbers, of which those of ``some`` may be any."""
        arrays, more = self.arrays, options
        more |= {"weight": arrays["weight"], "bias": arrays["bias"]}
        if self.added:
            more["residual"] = arrays["residual"]
        if self.deep:
            more["shortcut"] = arrays["short"], arrays["matrix"]

        def run(video: dict[str, Any], *real: Any) -> jax.Array:
            if some:
                counts = zip(real, self.sides, some, strict=True)
                video["real"] = tuple(n if any_ else side for n, side, any_ in counts)
            return edged(**video, **more, scale=self.scale, copies=self.copies)

        return jax.jit(run)

    def is_right(self, found: jax.Array, rows: int, columns: int) -> bool:
        """Whether the elements of so large a picture are what XLA makes of it alone."""
        arrays = self.arrays
        x = self.zeroed(rows, columns).astype(np.float32)
        if self.scale == 2:
            # What lies around is enlarged as well; one row and column of it is beside.
            x = x.repeat(2, 2).repeat(2, 3)[:, :, 1:-1, 1:-1]
        wanted = convolved(x, arrays["weight"], arrays["bias"], self.columns)
        if self.added:
            wanted = wanted + arrays["residual"].astype(np.float32)
        if self.deep:
            short, matrix = arrays["short"], arrays["matrix"]
            wanted = wanted + short.astype(np.float32) @ matrix.astype(np.float32)
        wanted = wanted.repeat(self.copies, 1)
        real = (slice(self.scale * rows), slice(self.scale * columns))
        whole = found.shape == wanted.shape
        return whole and is_close(found[:, :, *real], wanted[:, :, *real])


#: Forms with several blocks of rows, if a step has so many products of 128 x 128 x 128.
SEVERAL: dict[str, tuple[int, dict[str, Any]]] = {
    "planes": (256, {"rows": 24, "outputs": 3}),
    "planes, nothing around": (256, {"rows": 16, "outputs": 3, "ends": False}),
    "packed": (128, {"rows": 12, "outputs": 3}),
    "residual": (128, {"rows": 8, "added": True}),
    "shortcut": (128, {"taps": 1, "rows": 8, "outputs": 256, "deep": 256}),
    "enlarged": (256, {"taps": 1, "rows": 24, "scale": 2}),
    "enlarged, nothing around": (
        128,
        {
            "taps": 1,
            "rows": 16,
            "outputs": 384,
            "scale": 2,
            "copies": 2,
            "ends": False,
        },
    ),
}
