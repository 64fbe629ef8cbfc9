"""What turns frames into a file, one frame after the other."""

from __future__ import annotations

import subprocess
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import imageio_ffmpeg

if TYPE_CHECKING:
    import numpy as np

_FRAME_NAME = "frame-{:05d}.png"

# Without a tag players guess the colour matrix from the height of the picture, and
# ffmpeg and browsers guess differently.
_BT709 = (
    "scale=out_color_matrix=bt709:out_range=tv,"
    "setparams=colorspace=bt709:color_primaries=bt709:color_trc=bt709:range=tv"
)
_ENCODERS: dict[str, tuple[str, list[str]]] = {
    # faststart puts the index first, so that a browser can play while it loads.
    "mp4": ("libx264", ["-crf", "17", "-movflags", "+faststart", "-vf", _BT709]),
    "webm": (
        "libvpx-vp9",
        ["-crf", "24", "-b:v", "0", "-row-mt", "1", "-cpu-used", "4", "-vf", _BT709],
    ),
}


class Encoder(Protocol):
    """Writes the frames of one video, uint8 of shape [Y, X, 3]."""

    def add(self, frame: np.ndarray) -> None:
        """The next frame.

        Raises:
            OSError: it cannot be written.
        """

    def finish(self) -> None:
        """Complete the file and look at it.

        Raises:
            OSError: it is not complete.
        """

    def close(self) -> None:
        """Let go of processes and memory; without effect after :meth:`finish`."""


def open_encoder(kind: str, path: Path, fps: float) -> Encoder:
    """An encoder to ``path``: a file, or for ``"png"`` a folder that is there."""
    if kind == "png":
        return _Pngs(path)
    if kind == "gif":
        return _Gif(path, fps)
    return _Ffmpeg(path, fps, kind)


#: Kind of file -> the codec of its sound.
_SOUND_CODECS = {"mp4": "aac", "webm": "libopus"}


def add_sound(path: Path, kind: str, samples: np.ndarray, rate: int) -> None:
    """Put sound into a video file; its pictures stay as they are.

    Args:
        path: the file, which is replaced.
        kind: ``"mp4"`` or ``"webm"``.
        samples: float in [-1, 1], [channels, samples].
        rate: samples a second.

    Raises:
        OSError: it cannot be written.
    """
    made = path.with_name(f"{path.stem}-sound{path.suffix}")
    raw = ("-f", "f32le", "-ar", str(rate), "-ac", str(len(samples)), "-i", "-")
    try:
        found = subprocess.run(
            [
                *(imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error"),
                *("-i", str(path), *raw, "-c:v", "copy", "-c:a", _SOUND_CODECS[kind]),
                str(made),
            ],
            input=samples.T.astype("<f4").tobytes(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
        if found.returncode:
            text = found.stderr.decode(errors="replace").strip().splitlines()
            raise OSError(text[-1] if text else f"ffmpeg ended with {found.returncode}")
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


class _Ffmpeg:
    """mp4 and webm, by an ffmpeg that reads frames from a pipe."""

    def __init__(self, path: Path, fps: float, kind: str) -> None:
        self._path, self._fps, self._kind = path, fps, kind
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0

    def add(self, frame: np.ndarray) -> None:
        import numpy as np

        odd_y, odd_x = frame.shape[0] % 2, frame.shape[1] % 2
        if self._kind == "mp4" and (odd_y or odd_x):
            frame = np.pad(frame, ((0, odd_y), (0, odd_x), (0, 0)), mode="edge")
        if self._process is None:
            self._process = self._open(frame.shape[0], frame.shape[1])
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(frame.tobytes())
        except BrokenPipeError:
            self._end()
            raise
        self._count += 1

    def _open(self, height: int, width: int) -> subprocess.Popen[bytes]:
        codec, options = _ENCODERS[self._kind]
        raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}")
        return subprocess.Popen(
            [
                *(imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *raw),
                *("-r", str(self._fps), "-i", "-", "-an", "-c:v", codec),
                *("-pix_fmt", "yuv420p", *options, str(self._path)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # A file that may not grow further is an error to tell, and no death.
            restore_signals=False,
            process_group=0,  # Ctrl-C is for this process, which closes the encoder
        )

    def finish(self) -> None:
        self._end()
        try:
            count, _ = imageio_ffmpeg.count_frames_and_secs(str(self._path))
        except RuntimeError as error:
            raise OSError("ffmpeg did not write a video that can be read") from error
        if count != self._count:
            raise OSError(f"ffmpeg wrote {count} of {self._count} frames")

    def _end(self) -> None:
        """Let ffmpeg complete the file; an error has the last reason that it gives."""
        process, self._process = self._process, None
        if process is None:
            return
        _, said = process.communicate()
        if process.returncode:
            lines = said.decode(errors="replace").splitlines()
            reasons = [line.rpartition(": ")[2] for line in lines if ": " in line]
            code = f"ffmpeg ended with code {process.returncode}"
            raise OSError(reasons[-1] if reasons else code)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


class _Gif:
    """Frames are kept as bytes: Pillow looks at all of them, and so do their times."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path, self._fps = path, fps
        self._frames: list[np.ndarray] = []

    def add(self, frame: np.ndarray) -> None:
        # A copy, or the chunk that it is a view of would stay as well.
        self._frames.append(frame.copy())

    def finish(self) -> None:
        import imageio.v3 as iio

        times = _gif_times(len(self._frames), self._fps)
        # To memory: Pillow does not let go of a file on a disk that is full.
        made = iio.imwrite(
            "<bytes>",
            self._frames,
            extension=".gif",
            plugin="pillow",
            is_batch=True,
            # Pillow takes no list for a single image.
            duration=times if len(times) > 1 else times[0],
            loop=0,
        )
        self._path.write_bytes(made)
        self.close()

    def close(self) -> None:
        self._frames.clear()


def _gif_times(count: int, fps: float) -> list[int]:
    """Milliseconds per frame: multiples of 10 whose sum is that of ``count / fps``."""
    rate = min(Fraction(50), Fraction(fps))
    ends = [round(index * 100 / rate) for index in range(count + 1)]
    return [10 * (end - start) for start, end in pairwise(ends)]


class _Pngs:
    """One file a frame, exact."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def add(self, frame: np.ndarray) -> None:
        import imageio.v3 as iio

        image = self._folder / _FRAME_NAME.format(self._count)
        made = iio.imwrite("<bytes>", frame, extension=".png", plugin="pillow")
        image.write_bytes(made)
        self._count += 1

    def finish(self) -> None:
        """Every frame is complete already."""

    def close(self) -> None:
        """Nothing is held."""
