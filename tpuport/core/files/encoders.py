"""What turns the frames of a video into a file, or a folder of PNGs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import imageio_ffmpeg

if TYPE_CHECKING:
    import numpy as np

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
#: Kind of file -> the codec of its sound.
_SOUND_CODECS = {"mp4": "aac", "webm": "libopus"}


def encode(kind: str, path: Path, frames: Sequence[np.ndarray], fps: float) -> None:
    """Write a video.

    Args:
        path: the file, or for ``"png"`` a folder that is there.
        frames: uint8 [Y, X, 3], at least one.

    Raises:
        OSError: it cannot be written, or is not complete.
    """
    if kind == "png":
        _write_pngs(path, frames)
    elif kind == "gif":
        _write_gif(path, frames, fps)
    else:
        _write_film(kind, path, frames, fps)


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
    coded = ("-c:v", "copy", "-c:a", _SOUND_CODECS[kind])
    try:
        data = samples.T.astype("<f4").tobytes()
        _ffmpeg(["-i", str(path), *raw, *coded, str(made)], data)
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


def _write_film(
    kind: str, path: Path, frames: Sequence[np.ndarray], fps: float
) -> None:
    import numpy as np

    film = np.stack(frames)
    if kind == "mp4":
        odd = [(0, side % 2) for side in film.shape[1:3]]
        film = np.pad(film, ((0, 0), *odd, (0, 0)), mode="edge")
    count, height, width, _ = film.shape
    codec, options = _ENCODERS[kind]
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}")
    coded = ("-an", "-c:v", codec, "-pix_fmt", "yuv420p", *options)
    _ffmpeg([*raw, "-r", str(fps), "-i", "-", *coded, str(path)], film.data.cast("B"))
    try:
        found, _ = imageio_ffmpeg.count_frames_and_secs(str(path))
    except RuntimeError as error:
        raise OSError("ffmpeg did not write a video that can be read") from error
    if found != count:
        raise OSError(f"ffmpeg wrote {found} of {count} frames")


def _ffmpeg(words: Sequence[str], data: bytes | memoryview) -> None:
    """Run ffmpeg on ``data``; an error has the last reason that ffmpeg gives."""
    done = subprocess.run(
        [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *words],
        input=data,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # A file that may not grow further is an error to tell, and no death.
        restore_signals=False,
        process_group=0,  # Ctrl-C is for this process, which ends the encoder
        check=False,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        reasons = [line.rpartition(": ")[2] for line in lines if ": " in line]
        code = f"ffmpeg ended with code {done.returncode}"
        raise OSError(reasons[-1] if reasons else code)


def _write_gif(path: Path, frames: Sequence[np.ndarray], fps: float) -> None:
    import imageio.v3 as iio

    times = _gif_times(len(frames), fps)
    # To memory: Pillow does not let go of a file on a disk that is full.
    made = iio.imwrite(
        "<bytes>",
        frames,
        extension=".gif",
        plugin="pillow",
        is_batch=True,
        # Pillow takes no list for a single image.
        duration=times if len(times) > 1 else times[0],
        loop=0,
    )
    path.write_bytes(made)


def _gif_times(count: int, fps: float) -> list[int]:
    """Milliseconds per frame: multiples of 10 whose sum is that of ``count / fps``."""
    rate = min(Fraction(50), Fraction(fps))
    ends = [round(index * 100 / rate) for index in range(count + 1)]
    return [10 * (end - start) for start, end in pairwise(ends)]


def _write_pngs(folder: Path, frames: Sequence[np.ndarray]) -> None:
    """One file a frame, exact."""
    import imageio.v3 as iio

    for number, frame in enumerate(frames):
        made = iio.imwrite("<bytes>", frame, extension=".png", plugin="pillow")
        (folder / f"frame-{number:05d}.png").write_bytes(made)
