"""HunyuanVideo-1.5 decoded chunk by chunk: the frames of the whole video."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests.models.hunyuanvideo.vae.test_space import force, split_run
from tests.models.hunyuanvideo.vae.vaes import (
    frozen_vae,
    latents,
    shared_run,
    upstream_decode,
)
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy
from tpuport.core.mesh.spatial_split import SpatialLayout
from tpuport.core.programs.lowering import spread
from tpuport.core.tracing.chunk_state import chunk_lengths
from tpuport.core.tracing.ported_module import BoundModule
from tpuport.errors import PluginError
from tpuport.models.hunyuanvideo import vae as ours

ATOL = TOLERANCES["component float32"]


class Chunked:
    """Decodes chunk by chunk, on one device or eight; counts its programs."""

    def __init__(self, name: str, *, split: bool = False) -> None:
        self.bound = split_run(name) if split else shared_run(name)
        self.split = split
        self.traced = 0
        self.jitted: dict[Any, Any] = {}
        self.carry: Any = None

    def run(self, weights: Any, carry: Any, constants: Any, given: Any) -> Any:
        self.traced += 1
        model = BoundModule(self.bound.ported, weights)
        total = constants["frames"].shape[0]
        return ours.decode_chunk_15(
            model, carry, given["latents"], given["start"], total
        )

    def __call__(self, z: torch.Tensor, lengths: list[int]) -> np.ndarray:
        """Frames with phantom rows and columns."""
        assert sum(lengths) == z.shape[2]
        self.carry, outputs, start = None, [], 0
        constants = {"frames": np.arange(z.shape[2])}
        for length in lengths:
            chunk = to_numpy(z[:, :, start : start + length].contiguous())
            given = {"latents": chunk, "start": np.int32(start)}
            args = (self.carry, constants, given)
            shapes = str(jax.tree.map(np.shape, args))
            if shapes not in self.jitted:
                fn = self.run
                if self.split:
                    fn, _ = spread(fn, self.bound.runtime, CHUNK, args)
                self.jitted[shapes] = jax.jit(fn)
            self.carry, out = self.jitted[shapes](self.bound.weights, *args)
            outputs.append(np.asarray(out))
            start += length
        return np.concatenate(outputs, axis=2)


#: As in the stage, but for floats that no pixels were made of.
CHUNK = SpatialLayout(
    inputs=ours.CHUNK.inputs, carry=ours.CHUNK.carry, output=ours.TILE.output
)


def farthest(found: np.ndarray, expected: torch.Tensor) -> float:
    rows, columns = expected.shape[-2:]
    cut = found[..., :rows, :columns]
    assert cut.shape == expected.shape
    return float(np.abs(cut - expected.numpy()).max())


NAME = "15 small"
LENGTHS = [1, 2, 2]


@pytest.fixture(scope="module")
def video() -> tuple[torch.Tensor, torch.Tensor]:
    """Latents, and upstream's video of them."""
    vae = frozen_vae(NAME)
    z = latents(vae, 2, sum(LENGTHS), 3, 4)
    return z, upstream_decode(vae, z)


@pytest.fixture(scope="module")
def decoded(video: Any) -> tuple[Chunked, np.ndarray, int]:
    """What decodes, frames by LENGTHS, and how many programs it took."""
    run = Chunked(NAME)
    frames = run(video[0], LENGTHS)
    return run, frames, run.traced


def test_chunks_are_the_whole_video(video: Any, decoded: Any) -> None:
    _, frames, traced = decoded
    assert farthest(frames, video[1]) <= ATOL
    # One program for all chunks but the first.
    assert traced == 2


def test_a_longer_first_chunk(video: Any, decoded: Any) -> None:
    run, *_ = decoded
    assert farthest(run(video[0], [3, 2]), video[1]) <= ATOL


def test_what_is_kept_between_chunks(decoded: Any) -> None:
    run, *_ = decoded
    shapes = {name: array.shape for name, array in run.carry.items()}
    attention = "decoder.mid_block.attentions.0."
    # Of all frames, and of each convolution the last two.
    keys, values = (shapes.pop(attention + name) for name in ("keys", "values"))
    assert keys == values == (2, 8, sum(LENGTHS), 3, 4)
    assert shapes["decoder.conv_in.frames"] == (2, 4, 2, 3, 4)
    assert shapes["decoder.conv_out.frames"] == (2, 8, 2, 12, 16)
    convolutions = [n for n, m in frozen_vae(NAME).named_modules() if is_causal(m)]
    kept = {f"{n}.frames" for n in convolutions if n.startswith("decoder.")}
    assert set(shapes) == kept
    assert {shape[2] for shape in shapes.values()} == {2}


def is_causal(module: torch.nn.Module) -> bool:
    return type(module).__name__ == "HunyuanVideo15CausalConv3d"


@pytest.mark.parametrize("part", ["keys", "values", "conv_in.frames"])
def test_all_that_is_kept_counts(part: str, video: Any, decoded: Any) -> None:
    """Without one part of it the frames are others."""
    z, expected = video
    run, *_ = decoded
    first, following, *_ = run.jitted.values()
    constants = {"frames": np.arange(z.shape[2])}

    def given(start: int, stop: int) -> dict[str, Any]:
        chunk = to_numpy(z[:, :, start:stop].contiguous())
        return {"latents": chunk, "start": np.int32(start)}

    weights = run.bound.weights
    carry, _ = first(weights, None, constants, given(0, 1))
    (name,) = (name for name in carry if name.endswith(part))
    lost = {**carry, name: carry[name] * 0}
    outputs = [following(weights, c, constants, given(1, 3))[1] for c in (carry, lost)]
    errors = [farthest(np.asarray(out), expected[:, :, 1:9]) for out in outputs]
    assert errors[0] <= ATOL
    assert errors[1] > 100 * ATOL


def test_chunks_on_eight_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns do not divide, and some devices have none."""
    vae = frozen_vae(NAME)
    z = latents(vae, 1, 4, 3, 5)
    force(monkeypatch, 1, 2, 4)
    found = Chunked(NAME, split=True)(z, chunk_lengths(4, 2))
    assert farthest(found, upstream_decode(vae, z)) <= TOLERANCES["mesh float32"]


def test_the_first_chunk_takes_what_is_left_over() -> None:
    assert chunk_lengths(1, 2) == [1]
    assert chunk_lengths(2, 2) == [2]
    assert chunk_lengths(31, 2) == [1] + [2] * 15
    assert chunk_lengths(31, 4) == [3] + [4] * 7
    for frames in range(1, 40):
        for each in range(1, 6):
            first, *others = chunk_lengths(frames, each)
            assert 1 <= first <= each
            assert set(others) <= {each}
            assert first + sum(others) == frames


def test_a_carry_of_another_model_is_refused(decoded: Any) -> None:
    run, *_ = decoded
    frames = np.arange(sum(LENGTHS))
    given = {
        "latents": np.zeros((2, 4, 1, 3, 4), np.float32),
        "start": np.int32(1),
    }

    def refusal(carry: Any, frames: np.ndarray = frames) -> str:
        with pytest.raises(PluginError) as caught:
            jax.eval_shape(run.run, run.bound.weights, carry, {"frames": frames}, given)
        return str(caught.value)

    one = "decoder.conv_in.frames"
    missing = {name: array for name, array in run.carry.items() if name != one}
    assert refusal(missing) == f"the chunk before kept no {one!r}"
    more = {**run.carry, "decoder.odd.frames": run.carry[one]}
    assert refusal(more).endswith("not by the next: decoder.odd.frames")
    assert refusal(None, np.arange(0)) == "a chunk of 1 of 0 frames"
