"""Videos that upstream's pipelines made, recorded: the tests' oracle without its time.

A record holds what one upstream pipeline made of one request on one small checkpoint:

- the latents whole, in float32;
- of the frames every eleventh value or one of ``each`` others, in float32. The number
  divides no side of them, so the sample meets every frame, row, column and colour;
- of the frames the mean of each square of 8 x 8 pixels, by colour, in float32. What
  goes wrong between the values of the sample, at a seam or an edge, moves a mean.

Its metadata say what it was made from. A record of another request, of other weights
or of another release of diffusers is refused; the script that makes records is
``python -m tests.measure.references``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.tolerances import TOLERANCES

FOLDER = Path(__file__).parent / "records"
COMMAND = "python -m tests.measure.references"

#: The side of the squares of pixels whose means are kept.
SIDE = 8

ATOL = TOLERANCES["video float32"]
#: Of the means: what rounds up and what rounds down cancel.
MEANS_ATOL = ATOL / 10


def digest(data: bytes) -> str:
    """The start of a SHA-256, enough to tell inputs apart."""
    return hashlib.sha256(data).hexdigest()[:16]


def weights_digest(folder: Path) -> str:
    """Of the names, shapes and values of every tensor of a checkpoint."""
    found = []
    for path in sorted(folder.rglob("*.safetensors")):
        for name, value in sorted(load_file(path).items()):
            told = f"{path.relative_to(folder)} {name} {value.dtype}{value.shape}"
            found.append(f"{told} {digest(np.ascontiguousarray(value).tobytes())}")
    if not found:
        raise ValueError(f"{folder} has no weights")
    return digest("\n".join(found).encode())


def described(value: Any) -> Any:
    """A request as JSON has it: arrays and pictures by their digest."""
    if isinstance(value, Mapping):
        return {str(k): described(v) for k, v in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [described(v) for v in value]
    if value is None or isinstance(value, str | int | float):
        return value
    array = np.asarray(value)
    return f"{array.dtype}{list(array.shape)} {digest(array.tobytes())}"


def made_from(folder: Path, request: Mapping[str, Any]) -> dict[str, str]:
    """What a record must agree on, as the metadata of its file have it."""
    return {
        "request": json.dumps(described(request), sort_keys=True),
        "weights": weights_digest(folder),
        # Its last number is of mended releases; live tests hold them to the records.
        "diffusers": ".".join(diffusers.__version__.split(".")[:2]),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What is kept of videos.

    Attributes:
        latents: float32 [N, C, T, Y, X] as the pipeline gives them.
        size: of the frames, [N, F, Y, X, 3].
        each: of how many values of the frames one is in the sample.
        sample: every ``each``-th value of each video's frames, float32 [N, values].
        means: of squares of ``SIDE`` pixels, float32 [N, F, Y / SIDE, X / SIDE, 3].
    """

    latents: np.ndarray
    size: tuple[int, ...]
    each: int
    sample: np.ndarray
    means: np.ndarray

    @classmethod
    def of(cls, frames: Any, latents: Any, each: int = 11) -> Record:
        """Of frames [N, F, Y, X, 3] in [0, 1] and latents, both float32."""
        frames, latents = np.asarray(frames), np.asarray(latents)
        if {frames.dtype, latents.dtype} != {np.dtype(np.float32)}:
            raise ValueError(f"not float32: {frames.dtype}, {latents.dtype}")
        videos, count, rows, columns, colours = frames.shape
        squares = frames.reshape(
            videos, count, rows // SIDE, SIDE, columns // SIDE, SIDE, colours
        )
        return cls(
            latents=np.ascontiguousarray(latents),
            size=frames.shape,
            each=each,
            sample=np.ascontiguousarray(frames.reshape(videos, -1)[:, ::each]),
            # In a layout of their own, means would be written in that order.
            means=np.ascontiguousarray(
                squares.mean(axis=(3, 5), dtype=np.float64), np.float32
            ),
        )

    def write(self, name: str, source: Mapping[str, str]) -> Path:
        """Write it with what it was made from, and with the versions of libraries."""
        arrays = {"latents": self.latents, "sample": self.sample, "means": self.means}
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        path = FOLDER / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        layout = {"size": json.dumps(self.size), "each": str(self.each)}
        save_file(arrays, path, metadata={**source, **versions, **layout})
        return path

    @classmethod
    def read(cls, name: str, source: Mapping[str, str]) -> Record:
        """The record of a name, which must have been made from ``source``.

        Raises:
            AssertionError: there is none, or of something else.
        """
        path = FOLDER / f"{name}.safetensors"
        assert path.is_file(), f"no record of {name}; make it with {COMMAND} {name}"
        with safe_open(path, framework="numpy") as file:
            told = file.metadata()
            arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        for key, value in source.items():
            assert told[key] == value, (
                f"the record of {name} was made from {key} {told[key]}, not {value}; "
                f"make it anew with {COMMAND} {name}"
            )
        size = tuple(json.loads(told["size"]))
        return cls(size=size, each=int(told["each"]), **arrays)

    def check(self, frames: Any, latents: Any) -> None:
        """Hold other frames and latents to these.

        Raises:
            AssertionError: shapes differ, or values differ by more than is allowed.
        """
        self._compare(Record.of(frames, latents, self.each), ATOL, MEANS_ATOL)

    def check_live(self, live: Record) -> None:
        """Hold what upstream makes now to this: another processor rounds otherwise.

        Raises:
            AssertionError: shapes differ, or values differ by more than is allowed.
        """
        assert live.each == self.each
        atol = TOLERANCES["component float32"]
        self._compare(live, atol, atol)

    def _compare(self, found: Record, atol: float, means_atol: float) -> None:
        assert found.size == self.size
        assert found.latents.shape == self.latents.shape
        for name, most in (("latents", atol), ("sample", atol), ("means", means_atol)):
            off = float(np.abs(getattr(found, name) - getattr(self, name)).max())
            # Also where it is not a number.
            assert off <= most, f"{name} differ by {off:.2g}, over {most:.0e}"
