"""Frames as bytes, and what is wrong with frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor

from tpuport.core.files.frames import FrameChecks, measure, to_uint8
from tpuport.errors import VideoError


def one_video(values: Any) -> np.ndarray:
    """A flat array as frames of one video, padded with its last value."""
    flat = np.asarray(values, np.float32).ravel()
    count = -(-flat.size // 48) * 48
    flat = np.pad(flat, (0, count - flat.size), mode="edge")
    return flat.reshape(1, -1, 4, 4, 3)


def ties() -> np.ndarray:
    """Every half byte and its float32 neighbours, some of which are exact ties."""
    halves = ((np.arange(-2, 258) + 0.5) / 255).astype(np.float32)
    below = np.nextafter(halves, np.float32(-1))
    above = np.nextafter(halves, np.float32(2))
    return np.concatenate([halves, below, above])


def test_a_tie_goes_to_the_even_byte() -> None:
    """As in upstream's ``numpy_to_pil``."""
    values = ties()
    # There are exact ties among them, and they go both ways.
    products = np.clip(values, 0, 1) * np.float32(255)
    tied = products[products % 1 == 0.5]
    assert {int(np.rint(x)) - int(x) for x in tied} == {0, 1}
    frames = one_video(values)
    images = VaeImageProcessor.numpy_to_pil(np.clip(frames[0], 0, 1))
    assert np.array_equal(to_uint8(frames)[0], np.stack([np.array(x) for x in images]))


def test_bytes_are_rounded_and_clipped() -> None:
    values = [-1.0, 0.0, 0.4 / 255, 0.6 / 255, 127.5 / 255, 254.6 / 255, 1.0, 2.0]
    frames = np.array(values, np.float32)
    assert to_uint8(frames).tolist() == [0, 0, 0, 1, 128, 255, 255, 255]
    every = np.arange(256, dtype=np.uint8)
    assert np.array_equal(to_uint8(every.astype(np.float32) / 255), every)
    assert to_uint8(every) is every


def test_nan_and_other_integers_have_no_bytes() -> None:
    with pytest.raises(VideoError, match="NaN or infinite"):
        to_uint8(np.array([0.5, np.nan], np.float32))
    with pytest.raises(VideoError, match="must be float or uint8, not int64"):
        to_uint8(np.array([1]))


def good() -> np.ndarray:
    rng = np.random.default_rng(3)
    return rng.uniform(0, 1, (2, 6, 8, 8, 3)).astype(np.float32)


def black(frames: np.ndarray) -> None:
    frames[1] = 0.4 / 255


def one_colour(frames: np.ndarray) -> None:
    frames[0] = (0.9, 0.1, 0.5)


def not_finite(frames: np.ndarray) -> None:
    frames[1, 3, 0, 0, :] = np.nan
    frames[1, 5, 0, 0, 1] = np.nan


WORDS = {
    black: "video 1: all 6 frames are black",
    one_colour: r"video 0: .* same colour \(0.900, 0.100",
    not_finite: r"video 1: 4 of \d+ values .* from frame 3 on",
}


def check(frames: np.ndarray, chunk: int = 6) -> None:
    checks = FrameChecks()
    for start in range(0, frames.shape[1], chunk):
        part = frames[:, start : start + chunk]
        checks.add(0, part.shape, measure(part))
    checks.check()


@pytest.mark.parametrize("damage", WORDS)
@pytest.mark.parametrize("chunk", [1, 2, 6])
def test_chunks_are_refused_in_the_words_for_the_whole_video(
    damage: Callable[[np.ndarray], None], chunk: int
) -> None:
    frames = good()
    damage(frames)
    with pytest.raises(VideoError, match=WORDS[damage]):
        check(frames, chunk)


def test_colours_within_a_byte_are_one() -> None:
    frames = good()
    one_colour(frames)
    frames[0, 0, 0, 0] += np.float32(1 / 255)
    with pytest.raises(VideoError, match=r"video 0: .* same colour"):
        check(frames)
    frames[0, 0, 0, 0] += np.float32(0.5 / 255)
    check(frames)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_is_found(bad: float) -> None:
    frames = good()
    frames[0, 2, 1, 1, 0] = bad
    checks = FrameChecks()
    checks.add(4, frames.shape, measure(frames))
    with pytest.raises(VideoError, match=r"video 4: 1 of \d+ values .* frame 2 on"):
        checks.check()


def test_good_chunks_pass_and_are_counted() -> None:
    checks = FrameChecks()
    for first in (0, 2):
        for part in (good()[:, :1], good()[:, 1:]):
            checks.add(first, part.shape, measure(part))
    checks.check()
    assert [checks._videos[video].frames for video in range(4)] == [6, 6, 6, 6]
