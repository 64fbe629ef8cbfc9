"""Frames into a video file.

Letters: N videos, T frames, Y rows, X columns; the last dimension is red, green, blue.

Four kinds of output: ``.mp4`` (H.264), ``.webm`` (VP9), ``.gif``, and a folder of PNGs,
which alone is exact. All appear under their name only when they are complete.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

from tpuport.core.files.atomic import (
    cannot_write,
    flush,
    missing,
    no_room,
    remove_empty,
    temporary_beside,
)
from tpuport.core.files.encoders import add_sound, encode
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.frames import to_uint8
from tpuport.core.files.sealed_json import read_sidecar, sidecar_path
from tpuport.core.files.stores import AnyPath, StorePath, place
from tpuport.errors import ArtifactError, OutputError

if TYPE_CHECKING:
    import numpy as np

VideoKind = Literal["mp4", "gif", "webm", "png"]

_FILE_KINDS = tuple(kind for kind in get_args(VideoKind) if kind != "png")
_FRAME_GLOB = "frame-*.png"
#: Seconds. A gif counts hundredths in 16 bits, and one frame may stand for all that are
#: alike; an mp4 counts 1/16384 in 31 bits.
LONGEST: dict[VideoKind, int] = {"gif": 655, "mp4": 131_071}
#: The kinds that hold sound.
SOUNDING: tuple[VideoKind, ...] = ("mp4", "webm")


# --- where it goes


def output_of(out: str | Path) -> tuple[AnyPath, VideoKind]:
    """The place and the kind of video that ``out`` asks for.

    ``.mp4``, ``.gif`` and ``.webm`` are files, a name without suffix is an mp4, and a
    trailing slash is a folder of PNGs. Only a string can have a trailing slash, since
    Path drops it.

    Raises:
        OutputError: no name, or another suffix; the message lists the known ones.
        UsageError: an address of no known store.
    """
    text, path = str(out), place(str(out))
    if path.name in ("", "-", ".."):
        raise OutputError(
            f"{text!r} names no video; give a file such as fox.mp4, or a folder for "
            "PNG frames such as frames/"
        )
    if text.endswith("/"):
        return path, "png"
    suffix = path.suffix.lower().removeprefix(".")
    if isinstance(path, Path) and _is_device(path):
        raise OutputError(f"{text}: is a device or a pipe; a video needs a file")
    if not suffix:
        return path.with_name(f"{path.name}.mp4"), "mp4"
    if suffix in _FILE_KINDS:
        return path, cast(VideoKind, suffix)
    known = ", ".join(f".{kind}" for kind in _FILE_KINDS)
    raise OutputError(
        f"{text}: no video can be written as '.{suffix}'; choose one of {known}, or a "
        "folder (a name with / at the end) for PNG frames"
    )


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def numbered(path: AnyPath, kind: VideoKind, count: int) -> list[AnyPath]:
    """Where ``count`` videos go.

    One video goes to ``path`` itself. Several go to ``stem-000.mp4``, ``stem-001.mp4``
    and so on, or to the subfolders ``000``, ``001`` of a PNG folder.
    """
    if count == 1:
        return [path]
    width = max(3, len(str(count - 1)))
    numbers = [f"{index:0{width}d}" for index in range(count)]
    if kind == "png":
        return [path / number for number in numbers]
    return [path.with_name(f"{path.stem}-{number}{path.suffix}") for number in numbers]


def check_output(path: AnyPath, kind: VideoKind) -> None:
    """Check, before the long work, that a video can be written to ``path``.

    Nothing is created: a nameless temporary file tells whether the folder, or the
    nearest one above it that exists, can be written. Into a store an empty object is
    put, and removed.

    Raises:
        OutputError: a file is asked for where a folder is or a folder where a file is,
            or the folder cannot be written.
        StoreError: the store cannot be written.
    """
    if isinstance(path, StorePath):
        return path.parent.check_writable()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # the second is reported below, with the part that is not a folder
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error
    if kind == "png" and path.exists() and not path.is_dir():
        raise OutputError(
            f"{path}: is a file, and PNG frames need a folder; choose another name,"
            f" or one ending in .{' or .'.join(_FILE_KINDS)}"
        )
    if kind != "png" and path.is_dir():
        raise OutputError(
            f"{path}: is a folder, and .{kind} is a file; choose another name"
        )
    folder = path.absolute().parent
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise OutputError(f"{path}: cannot be written: {folder} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if no_room(error):
            raise cannot_write(path, error) from error
        raise OutputError(
            f"{path}: cannot be written: {folder}: {error.strerror}"
        ) from error


def check_length(path: AnyPath, kind: VideoKind, frames: int, fps: float) -> None:
    """Check that a video is not longer than its kind can hold.

    Raises:
        OutputError: what the kind can hold.
    """
    most, seconds = LONGEST.get(kind, float("inf")), frames / fps
    if seconds > most:
        least = Decimal(f"{1.06 * frames / most:.2g}")
        raise OutputError(
            f"{path}: {frames} frames at {fps:g} fps last {seconds:.0f} s, and .{kind} "
            f"holds {most} s; ask for --fps {least:f} or more, or for PNG frames"
        )


def free_output(path: AnyPath, kind: VideoKind, *, overwrite: bool) -> AnyPath:
    """``path``, or the first of ``stem-2``, ``stem-3`` that a video may take.

    A file or a sidecar that is there is taken only to ``overwrite`` it. A folder is
    taken when it is empty, or holds the frames of an earlier run and nothing else; in
    a store, frames are taken only to ``overwrite`` them.
    """
    free, number = path, 1
    while not _free(free, kind, overwrite and number == 1):
        number += 1
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return free


def _free(path: AnyPath, kind: VideoKind, overwrite: bool) -> bool:
    sidecar = sidecar_path(path)
    if isinstance(path, StorePath) and kind == "png":
        if overwrite:
            return all(fnmatch.fnmatch(name, _FRAME_GLOB) for name in path.files())
        return not path.files() and not sidecar.exists()
    if isinstance(path, Path) and kind == "png":
        return _may_hold_frames(path)
    return overwrite or not any(map(_there, (path, sidecar)))


def _there(path: AnyPath) -> bool:
    return os.path.lexists(path) if isinstance(path, Path) else path.exists()


def _may_hold_frames(folder: Path) -> bool:
    """Whether nothing is there, or what its sidecar says and nothing else."""
    sidecar = sidecar_path(folder)
    try:
        files = list(folder.iterdir()) if os.path.lexists(folder) else []
        if not os.path.lexists(sidecar):
            return not files
        output = read_sidecar(sidecar)["output"]
        named = all(file.match(_FRAME_GLOB) for file in files)
        same = not files or output["sha256"] == hash_output(folder)[0]
        return output["file"] == folder.name and named and same
    except (ArtifactError, OSError, KeyError, TypeError):
        return False


# --- writing


class VideoWriter:
    """Writes one video; until it is published nothing is seen.

    What each kind keeps:

    - mp4: H.264, yuv420p, BT.709, plays everywhere. yuv420p needs even sizes; an odd
      height or width gets its last row or column twice and is never rescaled.
    - webm: VP9, any size.
    - gif: 256 colours per frame, loops for ever. Frame times are whole hundredths of a
      second and at least two, spread so that the whole has the right length; rates
      above 50 become 50. A frame equal to the one before becomes a longer frame.
    - png: ``frame-00000.png`` and so on, exact.

    Args:
        path: where to; missing folders are made. What goes to a store is made in the
            folder for temporary files.
        kind: of video.
        fps: frames per second, above zero.

    Attributes:
        digest: sha256 and bytes of what was written, as
            :func:`~tpuport.core.files.fingerprint.hash_output` has them.
    """

    def __init__(self, path: AnyPath, kind: VideoKind, fps: float) -> None:
        self.path = path
        self.kind = kind
        self.fps = fps
        self.digest = "", 0
        self._made: Path | None = None
        self._earlier: Path | None = None
        self._new: list[Path] = []

    def write(self, frames: np.ndarray, sound: np.ndarray | None, rate: int) -> None:
        """Write the whole video, still under another name.

        Args:
            frames: float [T, Y, X, 3] in [0, 1].
            sound: float in [-1, 1], [channels, samples]; for the kinds of
                :data:`SOUNDING`.
            rate: samples a second.

        Raises:
            OutputError: it cannot be written.
        """
        png = self.kind == "png"
        try:
            if isinstance(self.path, StorePath):
                beside = Path(tempfile.gettempdir(), self.path.name)
            else:
                beside = self.path
                self._new = missing(beside.parent)
                beside.parent.mkdir(parents=True, exist_ok=True)
            made = temporary_beside(beside, "" if png else f".{self.kind}")
            self._made = made
            if png:
                made.mkdir()
            encode(self.kind, made, [to_uint8(frame) for frame in frames], self.fps)
            if sound is not None:
                add_sound(made, self.kind, sound, rate)
            for file in made.iterdir() if png else [made]:
                flush(file)
            self.digest = hash_output(made)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def publish(self, path: AnyPath, *, replace: bool) -> None:
        """Give the video, which is finished, a name.

        Args:
            replace: take the place of a file that is there.

        Raises:
            FileExistsError: there is one, and it may not be replaced.
            OutputError: it cannot be done; what was there before still is.
            StoreError: it cannot be put into the store.
        """
        if isinstance(path, StorePath):
            return self._upload(path, replace=replace)
        made, self._made = self._made, None
        assert made is not None
        earlier = temporary_beside(path)
        try:
            if self.kind == "png":
                if path.exists():
                    path.rename(earlier)
                    self._earlier = earlier
                made.rename(path)
            else:
                put_file(made, path, replace=replace)
        except BaseException as error:
            self._made = made
            if self._earlier is not None:
                self._earlier.rename(path)
                self._earlier = None
            if isinstance(error, OSError) and not isinstance(error, FileExistsError):
                raise cannot_write(path, error) from error
            raise

    def _upload(self, path: StorePath, *, replace: bool) -> None:
        """Put the video, object by object; :meth:`discard` removes what was made."""
        assert self._made is not None
        if self.kind != "png":
            path.put(self._made, replace=replace)
            return
        new = {file.name: file for file in sorted(self._made.iterdir())}
        for name in path.files().keys() - new.keys():
            (path / name).remove()
        for name, file in new.items():
            (path / name).put(file)

    def discard(self) -> None:
        """Let go of what was not published, and of what a published video replaced.

        Folders that were made for the video and are empty go too.
        """
        for left in (self._made, self._earlier):
            if left is not None and self.kind == "png":
                shutil.rmtree(left, ignore_errors=True)
            elif left is not None:
                left.unlink(missing_ok=True)
        remove_empty(self._new)


def put_file(made: Path, path: Path, *, replace: bool) -> None:
    """Rename a file that is whole; raises FileExistsError unless it may ``replace``."""
    if replace:
        os.replace(made, path)
        return
    try:
        os.link(made, path)
    except FileExistsError:
        raise
    except OSError:
        # Not every file system has links; that the name is free was looked up before.
        os.replace(made, path)
    else:
        made.unlink()
