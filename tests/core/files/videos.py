"""Writing a whole video at once, and reading one back."""

from __future__ import annotations

from pathlib import Path

import imageio.v3 as iio
import numpy as np

from tpuport.core.files.video_file import VideoKind, VideoWriter, video_kind


def write_video(
    path: str | Path, frames: np.ndarray, fps: float, *, kind: VideoKind | None = None
) -> None:
    """Write frames [T, Y, X, 3] as one video."""
    with VideoWriter(path, fps, kind=kind) as writer:
        writer.append(frames)


def read_back(path: str | Path) -> tuple[int, int, int, float]:
    """Frames, height, width and frames per second; a PNG folder's rate is 0.

    Every frame is decoded.
    """
    kind, target = video_kind(path), Path(path)
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
