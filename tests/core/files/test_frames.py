"""Frames as bytes, and what is wrong with frames."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor

from tpuport.core.files.frames import check_frames, to_uint8
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


def check(frames: np.ndarray) -> None:
    for index, video in enumerate(frames):
        check_frames(index, video)


@pytest.mark.parametrize("damage", WORDS)
def test_what_is_no_video_is_refused(damage: Callable[[np.ndarray], None]) -> None:
    frames = good()
    check(frames)
    damage(frames)
    with pytest.raises(VideoError, match=WORDS[damage]):
        check(frames)


@pytest.mark.parametrize("damage", WORDS)
def test_plain_frames_will_do_where_asked(
    damage: Callable[[np.ndarray], None],
) -> None:
    frames = good()
    damage(frames)
    refused = pytest.raises(VideoError) if damage is not_finite else nullcontext()
    with refused:
        for index, video in enumerate(frames):
            check_frames(index, video, plain=True)


def test_no_frames_are_no_video() -> None:
    with pytest.raises(VideoError, match=r"video 0: has no frames \(\[0, 8, 8, 3\]\)"):
        check_frames(0, good()[0][:0])


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
    with pytest.raises(VideoError, match=r"video 4: 1 of \d+ values .* frame 2 on"):
        check_frames(4, frames[0])
