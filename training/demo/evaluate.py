"""Ask a pipeline for held-out captions, and judge what it shows.

``python -m training.demo.evaluate FOLDER --captions 200``
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers import CogVideoXPipeline
from PIL import Image

from training.demo.judge import Seen, judge
from training.demo.loop import device
from training.demo.model import loaded
from training.demo.shapes import FRAMES, SIDE, Scene, scenes
from training.demo.vae import fast_convolutions

#: Upstream's default.
GUIDANCE = 6.0
_AT_ONCE = 25


def asked(count: int, seed: int = 7) -> tuple[list[Scene], list[str]]:
    """Held-out scenes and their captions.

    Some colours and motions have few combinations that are held out. At most one more
    than 15 % of the captions ask for each.
    """
    drawn, words, most = scenes(seed, held_out=True), random.Random(seed), 0.15 * count
    found: list[Scene] = []
    colours, motions = Counter[str](), Counter[str]()
    while len(found) < count:
        scene = next(drawn)
        [one] = scene.shapes
        if max(colours[one.colour], motions[one.motion]) <= most:
            colours[one.colour] += 1
            motions[one.motion] += 1
            found.append(scene)
    return found, [one.caption(words) for one in found]


def right(
    wanted: Sequence[Scene], seen: Sequence[Sequence[Seen]]
) -> tuple[float, float]:
    """The shares of videos whose shape has the colour, and the motion, asked for.

    Args:
        wanted: a scene for each video.
        seen: what ``judge`` says of each video.
    """
    colours = motions = 0
    for scene, shapes in zip(wanted, seen, strict=True):
        [one] = scene.shapes
        colours += bool(shapes) and shapes[0].colour == one.colour
        motions += bool(shapes) and shapes[0].motion == one.motion
    return colours / len(wanted), motions / len(wanted)


def by_chance(
    wanted: Sequence[Scene], seen: Sequence[Sequence[Seen]]
) -> tuple[float, float]:
    """``right`` of all videos, each held against the captions of all other videos."""
    turned = [[*wanted[n:], *wanted[:n]] for n in range(1, len(wanted))]
    shares = [right(scenes, seen) for scenes in turned]
    colours, motions = (statistics.mean(part) for part in zip(*shares, strict=True))
    return colours, motions


def shown(
    pipe: CogVideoXPipeline,
    texts: Sequence[str],
    steps: int,
    guidance: float = GUIDANCE,
    seed: int = 0,
) -> list[np.ndarray]:
    """A video [frames, height, width, 3] of bytes for each text."""
    made = []
    for start in range(0, len(texts), _AT_ONCE):
        frames = pipe(
            list(texts[start : start + _AT_ONCE]),
            height=SIDE,
            width=SIDE,
            num_frames=FRAMES,
            num_inference_steps=steps,
            guidance_scale=guidance,
            use_dynamic_cfg=True,
            generator=torch.Generator().manual_seed(seed + start),
            output_type="np",
        ).frames
        made.extend(np.rint(frames * 255).astype(np.uint8))
    return made


def sheet(videos: Sequence[np.ndarray]) -> Image.Image:
    """Every fourth frame of each video, a row a video."""
    return Image.fromarray(
        np.concatenate([np.concatenate(list(video[::4]), axis=1) for video in videos])
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--captions", type=int, default=200)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--guidance", type=float, default=GUIDANCE)
    parser.add_argument("--sheet", type=Path, help="a picture of eight of the videos")
    given = parser.parse_args()
    if device().type == "cpu":
        fast_convolutions()
    pipe = loaded(given.folder).to(device())
    pipe.set_progress_bar_config(disable=True)
    wanted, texts = asked(given.captions)
    videos = shown(pipe, texts, given.steps, given.guidance)
    seen = [judge(video) for video in videos]
    (colour, motion), chance = right(wanted, seen), by_chance(wanted, seen)
    print(
        f"steps {given.steps} guidance {given.guidance}: colour {colour:.1%}, motion "
        f"{motion:.1%}; by chance {chance[0]:.1%}, {chance[1]:.1%}"
    )
    if given.sheet:
        sheet(videos[:8]).save(given.sheet)
        print("\n".join(texts[:8]))


if __name__ == "__main__":
    main()
