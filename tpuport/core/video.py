"""Frames into a video file, checked before and after.

Letters: N videos, T frames, Y rows, X columns; the last dimension is red, green, blue.

Four kinds of output: ``.mp4`` (H.264), ``.webm`` (VP9), ``.gif``, and a folder of PNGs,
which alone is exact. All appear under their name only when they are complete.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from tpuport.core.files import replacing
from tpuport.errors import OutputError, VideoError

if TYPE_CHECKING:
    import numpy as np

VideoKind = Literal["mp4", "gif", "webm", "png"]

_FILE_KINDS = tuple(kind for kind in get_args(VideoKind) if kind != "png")
_FRAME_NAME = "frame-{:05d}.png"
_FRAME_GLOB = "frame-*.png"

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


# --- frames


def to_uint8(frames: np.ndarray) -> np.ndarray:
    """Frames in [0, 1] as bytes: ``rint(x * 255)``, values outside clipped.

    A tie goes to the even byte, as in upstream's ``VaeImageProcessor.numpy_to_pil``
    (diffusers ``image_processor.py``). Bytes come back as they are.

    Raises:
        VideoError: a value is NaN or infinite, or the frames are integers of another
            type.
    """
    import numpy as np

    if frames.dtype == np.uint8:
        return frames
    if not np.issubdtype(frames.dtype, np.floating):
        raise VideoError(f"frames must be float or uint8, not {frames.dtype}")
    if not np.isfinite(frames).all():
        raise VideoError("the frames hold NaN or infinite values")
    # float16 cannot tell the neighbours of 255 * x apart.
    wide = frames.astype(np.float32, copy=False)
    return np.rint(np.clip(wide, 0, 1) * 255).astype(np.uint8)


def check_frames(frames: np.ndarray) -> None:
    """Check that decoded frames can be a video at all.

    Args:
        frames: float of shape [N, T, Y, X, 3], in [0, 1].

    Raises:
        VideoError: a video has NaN or infinite values, is black throughout, or has one
            colour throughout (all pixels of all its frames within 1/255); or the array
            is not of that shape. The message has the index of the video.
    """
    import numpy as np

    if frames.ndim != 5 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise VideoError(
            f"frames must have shape [N, T, Y, X, 3], not {list(frames.shape)}"
        )
    if not np.issubdtype(frames.dtype, np.floating):
        raise VideoError(f"frames must be float in [0, 1], not {frames.dtype}")
    for index, video in enumerate(frames):
        broken = ~np.isfinite(video)
        if count := int(broken.sum()):
            first = int(np.argmax(broken.any(axis=(1, 2, 3))))
            raise VideoError(
                f"video {index}: {count} of {video.size} values are NaN or infinite,"
                f" from frame {first} on"
            )
        low, high = video.min(axis=(0, 1, 2)), video.max(axis=(0, 1, 2))
        if high.max() * 255 < 0.5:
            raise VideoError(
                f"video {index}: all {len(video)} frames are black"
                f" (largest value {high.max():.2g})"
            )
        # The margin is for 1/255 not being a float.
        if (high - low).max() <= 1 / 255 + 1e-6:
            colour = ", ".join(f"{value:.3f}" for value in (low + high) / 2)
            raise VideoError(
                f"video {index}: all pixels of its {len(video)} frames have the same"
                f" colour ({colour})"
            )


# --- where it goes


def video_kind(path: str | Path) -> VideoKind:
    """What a path asks for, by its suffix.

    ``.mp4``, ``.gif`` and ``.webm`` are files. No suffix, a trailing slash, or a folder
    that exists is a folder of PNGs. Only a string can have a trailing slash, since Path
    drops it.

    Raises:
        OutputError: another suffix; the message lists the known ones.
    """
    text = str(path)
    if text.endswith("/"):
        return "png"
    suffix = Path(text).suffix.lower()
    if suffix.removeprefix(".") in _FILE_KINDS:
        return cast(VideoKind, suffix.removeprefix("."))
    if not suffix or Path(text).is_dir():
        return "png"
    known = ", ".join(f".{kind}" for kind in _FILE_KINDS)
    raise OutputError(
        f"{text}: no video can be written as {suffix!r}; choose one of {known}, or a"
        " folder (a name without suffix, or with / at the end) for PNG frames"
    )


def output_paths(out: str | Path, count: int) -> list[Path]:
    """Where ``count`` videos go when ``out`` was asked for.

    One video goes to ``out`` itself. Several go to ``stem-000.mp4``, ``stem-001.mp4``
    and so on, or to the subfolders ``000``, ``001`` of a PNG folder.

    Raises:
        OutputError: the suffix is unknown, or ``count`` is below one.
    """
    if count < 1:
        raise OutputError(f"{out}: {count} videos cannot be written")
    kind, path = video_kind(out), Path(out)
    if count == 1:
        return [path]
    width = max(3, len(str(count - 1)))
    numbers = [f"{index:0{width}d}" for index in range(count)]
    if kind == "png":
        return [path / number for number in numbers]
    return [path.with_name(f"{path.stem}-{number}{path.suffix}") for number in numbers]


def check_output(path: str | Path) -> VideoKind:
    """Check, before the long work, that a video can be written to ``path``.

    Nothing is created: a nameless temporary file tells whether the folder, or the
    nearest one above it that exists, can be written.

    Returns:
        the kind, for :func:`write_video`.

    Raises:
        OutputError: the suffix is unknown, a file is asked for where a folder is or a
            folder where a file is, or the folder cannot be written.
    """
    kind, target = video_kind(path), Path(path)
    try:
        target.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # the second is reported below, with the part that is not a folder
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
    if kind == "png":
        if target.exists() and not target.is_dir():
            raise OutputError(
                f"{path}: is a file, and PNG frames need a folder; choose another name,"
                f" or one ending in .{' or .'.join(_FILE_KINDS)}"
            )
        folder = target
    else:
        if target.is_dir():
            raise OutputError(
                f"{path}: is a folder, and .{kind} is a file; choose another name"
            )
        folder = target.absolute().parent
    while not os.path.lexists(folder):
        folder = folder.absolute().parent
    if not folder.is_dir():
        raise OutputError(f"{path}: cannot be written: {folder} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written: {folder}: {error.strerror}"
        ) from error
    return kind


# --- writing


def write_video(
    path: str | Path, frames: np.ndarray, fps: float, *, kind: VideoKind | None = None
) -> None:
    """Write one video; it appears under its name when it is complete.

    What each kind keeps:

    - mp4: H.264, yuv420p, BT.709, plays everywhere. yuv420p needs even sizes; an odd
      height or width gets its last row or column twice and is never rescaled.
    - webm: VP9, any size.
    - gif: 256 colours per frame, loops for ever. Frame times are whole hundredths of a
      second and at least two, spread so that the whole has the right length; rates
      above 50 become 50. A frame equal to the one before becomes a longer frame.
    - png: ``frame-00000.png`` and so on, exact. ``frame-*.png`` of an earlier video in
      that folder are removed; other files stay.

    Args:
        path: where to; missing folders are made.
        frames: uint8, or float in [0, 1], of shape [T, Y, X, 3]; T may be one.
        fps: frames per second.
        kind: as :func:`check_output` returned it; by default as ``path`` says.

    Raises:
        OutputError: the suffix is unknown, ``fps`` is not above zero, or the file
            cannot be written; what was there before still is.
        VideoError: the frames are not of that shape, or hold NaN.
    """
    if frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise VideoError(
            f"frames must have shape [T, Y, X, 3], not {list(frames.shape)}"
        )
    if not 0 < fps < float("inf"):
        raise OutputError(f"{path}: {fps} frames per second cannot be written")
    kind = kind or video_kind(path)
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if kind == "png":
            _write_pngs(target, frames)
            return
        with replacing(target, suffix=f".{kind}") as temporary:
            if kind == "gif":
                _write_gif(temporary, frames, fps)
            else:
                _write_ffmpeg(temporary, frames, fps, kind)
    except OSError as error:
        # imageio puts the command line and ffmpeg's output below the first line.
        reason = error.strerror or (str(error).splitlines() or [repr(error)])[0]
        raise OutputError(f"{path}: cannot be written: {reason}") from error


def _write_ffmpeg(path: Path, frames: np.ndarray, fps: float, kind: str) -> None:
    import imageio.v2 as imageio
    import imageio_ffmpeg
    import numpy as np

    codec, options = _ENCODERS[kind]
    odd_y, odd_x = frames.shape[1] % 2, frames.shape[2] % 2
    writer = imageio.get_writer(
        path,
        format="FFMPEG",
        mode="I",
        fps=float(fps),
        codec=codec,
        quality=None,  # the options have the quality
        pixelformat="yuv420p",
        macro_block_size=1,  # anything else rescales
        ffmpeg_log_level="error",
        output_params=list(options),
    )
    try:
        for frame in frames:
            image = to_uint8(frame)
            if kind == "mp4" and (odd_y or odd_x):
                image = np.pad(image, ((0, odd_y), (0, odd_x), (0, 0)), mode="edge")
            writer.append_data(image)
    finally:
        writer.close()
    # imageio does not look at how ffmpeg ended; a full disk shows only here.
    try:
        count, _ = imageio_ffmpeg.count_frames_and_secs(str(path))
    except RuntimeError as error:
        raise OSError("ffmpeg did not write a video that can be read") from error
    if count != len(frames):
        raise OSError(f"ffmpeg wrote {count} of {len(frames)} frames")


def _gif_times(count: int, fps: float) -> list[int]:
    """Milliseconds per frame: multiples of 10 whose sum is that of ``count / fps``."""
    rate = min(Fraction(50), Fraction(fps))
    ends = [round(index * 100 / rate) for index in range(count + 1)]
    return [10 * (end - start) for start, end in pairwise(ends)]


def _write_gif(path: Path, frames: np.ndarray, fps: float) -> None:
    import imageio.v3 as iio

    times = _gif_times(len(frames), fps)
    # Pillow takes no list for a single image.
    duration = times if len(times) > 1 else times[0]
    images = to_uint8(frames)
    iio.imwrite(path, images, plugin="pillow", is_batch=True, duration=duration, loop=0)


def _write_pngs(folder: Path, frames: np.ndarray) -> None:
    import imageio.v3 as iio

    # All frames are written before any old one goes, so that a failure in between
    # leaves the earlier video whole.
    scratch = Path(tempfile.mkdtemp(prefix=".tpuport-", dir=folder.parent))
    try:
        for index, frame in enumerate(frames):
            image = scratch / _FRAME_NAME.format(index)
            iio.imwrite(image, to_uint8(frame), plugin="pillow")
        folder.mkdir(exist_ok=True)
        for stale in folder.glob(_FRAME_GLOB):
            stale.unlink()
        for image in sorted(scratch.iterdir()):
            os.replace(image, folder / image.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# --- reading back


def read_back(path: str | Path) -> tuple[int, int, int, float]:
    """Frames, height, width and frames per second of a written video.

    Every frame is decoded. A PNG folder has no rate and gives 0.0.

    Raises:
        OutputError: there is no such video, or it cannot be decoded.
    """
    import imageio.v3 as iio

    kind, target = video_kind(path), Path(path)
    try:
        if kind == "png":
            names = sorted(target.glob(_FRAME_GLOB))
            shapes = [iio.imread(name, plugin="pillow").shape for name in names]
            fps = 0.0
        elif kind == "gif":
            shapes = [image.shape for image in iio.imiter(target, plugin="pillow")]
            times = [_gif_time(iio, target, index) for index in range(len(shapes))]
            fps = 1000 * len(times) / sum(times)
        else:
            shapes = [image.shape for image in iio.imiter(target, plugin="FFMPEG")]
            fps = float(iio.immeta(target, plugin="FFMPEG")["fps"])
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise OutputError(f"{path}: cannot be read back: {reason}") from error
    if not shapes:
        raise OutputError(f"{path}: holds no frames")
    return len(shapes), shapes[0][0], shapes[0][1], fps


def _gif_time(iio: Any, path: Path, index: int) -> int:
    return int(iio.immeta(path, plugin="pillow", index=index)["duration"])
