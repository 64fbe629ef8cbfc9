"""Sound in a video file: beside the pictures, which stay as they are."""

from __future__ import annotations

import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from tests.core.files.videos import read_back
from tpuport.core.files.video_file import VideoKind, VideoWriter
from tpuport.errors import VideoError

RATE = 16_000


def write(path: Path, kind: VideoKind, *, channels: int) -> None:
    """A second of ten frames, with a tone of 440 Hz in each channel."""
    writer = VideoWriter(path, kind, 10)
    writer.append(np.random.default_rng(0).random((10, 32, 48, 3), np.float32))
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    writer.add_sound(np.tile(tone.astype(np.float32), (channels, 1)), RATE)
    writer.finish()
    writer.publish(path, replace=False)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_a_video_has_its_sound(kind: VideoKind, channels: int, tmp_path: Path) -> None:
    path = tmp_path / f"tone.{kind}"
    write(path, kind, channels=channels)
    assert read_back(path)[:3] == (10, 32, 48)
    raw = ("-f", "f32le", "-ac", "1", "-ar", str(RATE), "-")
    decoded = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(path), *raw],
        capture_output=True,
        check=True,
    ).stdout
    samples = np.frombuffer(decoded, "<f4")
    assert abs(len(samples) / RATE - 1) < 0.1
    loudest = np.abs(np.fft.rfft(samples)).argmax() * RATE / len(samples)
    assert abs(loudest - 440) < 5
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_gif_holds_no_sound(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match="holds no sound"):
        write(tmp_path / "tone.gif", "gif", channels=1)
