"""Videos written at once, and what is in a file that was written."""

from __future__ import annotations

from pathlib import Path

import imageio.v3 as iio
import numpy as np

from tpuport.core.files.video_file import VideoKind, VideoWriter, video_kind


def write_video(
    path: str | Path, frames: np.ndarray, fps: float, *, kind: VideoKind | None = None
) -> None:
    """Frames [T, Y, X, 3] as one video."""
    with VideoWriter(path, fps, kind=kind) as writer:
        writer.append(frames)


def read_back(path: str | Path) -> tuple[int, int, int, float]:
    """Frames, height, width and frames per second; every frame is decoded.

    A folder of PNGs has no rate and gives 0.0.
    """
    kind, target = video_kind(path), Path(path)
    if kind == "png":
        names = sorted(target.glob("frame-*.png"))
        shapes = [iio.imread(name, plugin="pillow").shape for name in names]
        fps = 0.0
    elif kind == "gif":
        shapes = [image.shape for image in iio.imiter(target, plugin="pillow")]
        times = [
            int(iio.immeta(target, plugin="pillow", index=index)["duration"])
            for index in range(len(shapes))
        ]
        fps = 1000 * len(times) / sum(times)
    else:
        shapes = [image.shape for image in iio.imiter(target, plugin="FFMPEG")]
        fps = float(iio.immeta(target, plugin="FFMPEG")["fps"])
    return len(shapes), shapes[0][0], shapes[0][1], fps
