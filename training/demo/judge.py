"""What a video of moving shapes shows, measured on its pixels; nothing is learned.

``judge(video)`` finds the coloured shapes in front of the background, and names the
motion of each by the path of its middle, its area, and how its outline changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from training.demo.shapes import COLOURS, SIDE

#: A pixel is in front where a channel differs so much from the background.
_IN_FRONT = 50
#: Of all that is in front, what a colour must have to be a shape.
_SHARE = 0.2
#: Pixels that a path must cover, of 128.
_STILL = 7.0 * SIDE / 128


@dataclass(frozen=True)
class Seen:
    """One shape: the name of its colour, and of its motion."""

    colour: str
    motion: str


def judge(
    video: np.ndarray, colours: Mapping[str, tuple[int, int, int]] = COLOURS
) -> list[Seen]:
    """The shapes of a video [frames, height, width, 3] of bytes, largest first."""
    pixels = video.astype(np.int32)
    edge = np.concatenate([pixels[:, :3].reshape(-1, 3), pixels[:, -3:].reshape(-1, 3)])
    background = np.median(edge, axis=0)
    in_front = np.abs(pixels - background).max(-1) > _IN_FRONT
    palette = np.array(list(colours.values()))
    distance = np.square(pixels[..., None, :] - palette).sum(-1)
    nearest = np.where(in_front, distance.argmin(-1), -1)
    counts = np.array([(nearest == n).sum() for n in range(len(palette))])
    found = []
    for n in np.argsort(-counts):
        if counts[n] < max(_SHARE * counts.sum(), 40):
            break
        found.append(Seen(list(colours)[n], motion(nearest == n)))
    return found


def motion(masks: np.ndarray) -> str:
    """The motion of a shape, from where it is in each frame [frames, height, width].

    Returns:
        a name of ``MOTIONS``, ``"still"``, or ``"none"`` where too few frames show it.
    """
    areas = masks.sum((1, 2)).astype(float)
    if (areas < 25).sum() > len(areas) // 4:
        return "none"
    masks, areas = masks[areas >= 25], areas[areas >= 25]
    rows, columns = np.arange(masks.shape[1]), np.arange(masks.shape[2])
    x = (masks.sum(1) * columns).sum(1) / areas
    y = (masks.sum(2) * rows).sum(1) / areas
    wide, high = np.ptp(x), np.ptp(y)
    if max(wide, high) < _STILL:
        if np.median(areas[-4:]) > 1.7 * np.median(areas[:4]):
            return "grow"
        return "spin" if _changes(masks, x, y) > 0.06 else "still"
    right, down = x[-3:].mean() - x[:3].mean(), y[-3:].mean() - y[:3].mean()
    if max(abs(right), abs(down)) > 0.6 * max(wide, high):
        if abs(right) > abs(down):
            return "right" if right > 0 else "left"
        return "down" if down > 0 else "up"
    return "circle" if wide > 0.5 * high else "bounce"


def _changes(masks: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """The part of a shape's outline that differs from the first frame's, at most."""

    def centred(n: int) -> np.ndarray:
        middle = (np.array(masks.shape[1:]) - 1) / 2
        shift = np.rint(middle - (y[n], x[n])).astype(int)
        return np.roll(masks[n], shift, axis=(0, 1))

    first = centred(0)
    shares = [(centred(n) ^ first).sum() / first.sum() for n in range(1, len(masks))]
    return float(np.quantile(shares, 0.75))
