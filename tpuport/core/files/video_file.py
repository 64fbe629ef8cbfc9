"""Frames into a video file, checked before.

Letters: N videos, T frames, Y rows, X columns; the last dimension is red, green, blue.

Four kinds of output: ``.mp4`` (H.264), ``.webm`` (VP9), ``.gif``, and a folder of PNGs,
which alone is exact. All appear under their name only when they are complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, cast, get_args

from tpuport.core.files.atomic import replacing, temporary_beside
from tpuport.core.files.encoders import Encoder, open_encoder
from tpuport.core.files.frames import FrameChecks, measure, to_uint8
from tpuport.errors import OutputError, VideoError

if TYPE_CHECKING:
    import numpy as np

VideoKind = Literal["mp4", "gif", "webm", "png"]

_FILE_KINDS = tuple(kind for kind in get_args(VideoKind) if kind != "png")
_FRAME_GLOB = "frame-*.png"


# --- frames


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

    shape = frames.shape
    if len(shape) != 5 or shape[-1] != 3 or 0 in shape:
        raise VideoError(f"frames must have shape [N, T, Y, X, 3], not {list(shape)}")
    if not np.issubdtype(frames.dtype, np.floating):
        raise VideoError(f"frames must be float in [0, 1], not {frames.dtype}")
    checks = FrameChecks()
    checks.add(0, shape, measure(frames))
    checks.check()


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
        the kind, for :class:`VideoWriter`.

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


class _Discarded(Exception):
    """Ends what is under way without a result."""


class VideoWriter:
    """Writes one video, frames as they come.

    Used in a ``with`` block it publishes the video at the end, and discards it when
    the block fails. Until it is published nothing is seen under its name.

    What each kind keeps:

    - mp4: H.264, yuv420p, BT.709, plays everywhere. yuv420p needs even sizes; an odd
      height or width gets its last row or column twice and is never rescaled.
    - webm: VP9, any size.
    - gif: 256 colours per frame, loops for ever. Frame times are whole hundredths of a
      second and at least two, spread so that the whole has the right length; rates
      above 50 become 50. A frame equal to the one before becomes a longer frame.
      All its frames are held as bytes until the end.
    - png: ``frame-00000.png`` and so on, exact. ``frame-*.png`` of an earlier video in
      that folder are removed; other files stay.

    Args:
        path: where to; missing folders are made.
        fps: frames per second.
        kind: as :func:`check_output` returned it; by default as ``path`` says.

    Raises:
        OutputError: the suffix is unknown, or ``fps`` is not above zero.
    """

    def __init__(
        self, path: str | Path, fps: float, *, kind: VideoKind | None = None
    ) -> None:
        if not 0 < fps < float("inf"):
            raise OutputError(f"{path}: {fps} frames per second cannot be written")
        self.path = path
        self.fps = fps
        self.kind = kind or video_kind(path)
        self.frames = 0
        self._stack = contextlib.ExitStack()
        self._encoder: Encoder | None = None
        self._finished = False

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.publish()
        else:
            self.discard()

    def append(self, frames: np.ndarray) -> None:
        """The next frames: uint8, or float in [0, 1], of shape [T, Y, X, 3].

        Raises:
            OutputError: they cannot be written.
            VideoError: they are not of that shape, or hold NaN.
        """
        if frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
            raise VideoError(
                f"frames must have shape [T, Y, X, 3], not {list(frames.shape)}"
            )
        with self._told():
            encoder = self._open()
            for frame in frames:
                encoder.add(to_uint8(frame))
                self.frames += 1

    def finish(self) -> None:
        """Complete the video, still under another name; no frame may follow.

        Raises:
            OutputError: it cannot be written.
            VideoError: it has no frames.
        """
        if self._finished:
            return
        if self._encoder is None:
            raise VideoError(f"{self.path}: there are no frames to write")
        with self._told():
            self._encoder.finish()
        self._finished = True

    def publish(self) -> None:
        """Complete the video and give it its name.

        Raises:
            OutputError, VideoError: as :meth:`finish`; what was there before still is.
        """
        try:
            self.finish()
        except BaseException:
            self.discard()
            raise
        with self._told():
            self._stack.close()

    def discard(self) -> None:
        """Let go of what was written; what was there before still is."""
        # An encoder may have died before, of the Ctrl-C that this is about.
        with contextlib.suppress(_Discarded, OSError):
            self._stack.__exit__(_Discarded, _Discarded(), None)

    def _open(self) -> Encoder:
        if self._encoder is None:
            target = Path(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            if self.kind == "png":
                made = self._stack.enter_context(_replacing_frames(target))
            else:
                made = self._stack.enter_context(
                    replacing(target, suffix=f".{self.kind}")
                )
            self._encoder = open_encoder(self.kind, made, self.fps)
            # Closed before what it writes to is renamed or removed.
            self._stack.callback(self._encoder.close)
        return self._encoder

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # imageio puts the command line and ffmpeg's output below the first line.
            reason = error.strerror or (str(error).splitlines() or [repr(error)])[0]
            raise OutputError(f"{self.path}: cannot be written: {reason}") from error


@contextlib.contextmanager
def _replacing_frames(folder: Path) -> Iterator[Path]:
    """A folder whose PNGs take the place of those of ``folder`` at the end."""
    # All frames are written before any old one goes, so that a failure in between
    # leaves the earlier video whole.
    scratch = temporary_beside(folder)
    scratch.mkdir()
    try:
        yield scratch
        folder.mkdir(exist_ok=True)
        for stale in folder.glob(_FRAME_GLOB):
            stale.unlink()
        for image in sorted(scratch.iterdir()):
            os.replace(image, folder / image.name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
