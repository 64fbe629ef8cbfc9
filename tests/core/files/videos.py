"""Writing a whole video at once, and reading one back."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import cast

import imageio.v3 as iio
import imageio_ffmpeg
import numpy as np

from tpuport.core.files.video_file import VideoKind, VideoWriter


def write_video(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write bytes [T, Y, X, 3] as one video; a name without suffix is a folder."""
    writer = VideoWriter(path, kind_of(path), fps)
    try:
        writer.write(frames.astype(np.float32) / 255, None, 0)
        writer.publish(path, replace=True)
    finally:
        writer.discard()


def sound_of(path: Path, rate: int) -> np.ndarray:
    """The sound of a video at ``rate`` samples a second, [2, samples]."""
    raw = ("-vn", "-f", "f32le", "-ac", "2", "-ar", str(rate), "-")
    decoded = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), *raw],
        capture_output=True,
        check=True,
    ).stdout
    return np.frombuffer(decoded, "<f4").reshape(-1, 2).T


def kind_of(path: Path) -> VideoKind:
    """By the suffix."""
    return cast(VideoKind, path.suffix.removeprefix(".") or "png")


def read_back(path: str | Path) -> tuple[int, int, int, float]:
    """Frames, height, width and frames per second; a PNG folder's rate is 0.

    Every frame is decoded.
    """
    target = Path(path)
    kind = kind_of(target)
    if kind == "png":
        names = sorted(target.glob("frame-*.png"))
        shapes = [iio.imread(name, plugin="pillow").shape for name in names]
        fps = 0.0
    elif kind == "gif":
        shapes = [image.shape for image in iio.imiter(target, plugin="pillow")]
        metas = [
            iio.immeta(target, plugin="pillow", index=index)
            for index in range(len(shapes))
        ]
        fps = 1000 * len(shapes) / sum(int(meta["duration"]) for meta in metas)
    else:
        shapes = [image.shape for image in iio.imiter(target, plugin="FFMPEG")]
        fps = float(iio.immeta(target, plugin="FFMPEG")["fps"])
    return len(shapes), shapes[0][0], shapes[0][1], fps
