"""Images and videos that a video is made from: read, checked, as pixels.

Legend: N images or videos, F frames, Y rows, X columns.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.core.enums import Task
from tpuport.core.files.atomic import one_line
from tpuport.errors import UsageError, quoted

if TYPE_CHECKING:
    import numpy as np
    import torch

#: What a source of each kind makes the task.
TASK_OF = {"image": Task.IMAGE, "video": Task.VIDEO}

#: Sides below this are no picture: every model's patches are as large.
SMALLEST_SIDE = 16


@dataclass(frozen=True, kw_only=True)
class Source:
    """The images or the videos of a run.

    Attributes:
        kind: ``"image"`` or ``"video"``.
        pixels: uint8, [N, Y, X, 3] of images or [N, F, Y, X, 3] of videos; N is 1 where
            one serves all videos that are made.
        digests: sha256 of the pixels and their shape, one for each of N.
        files: where each came from; empty for what was given in memory.
        fps: of a video file, else ``None``.
    """

    kind: str
    pixels: torch.Tensor
    digests: tuple[str, ...]
    files: tuple[str, ...] = ()
    fps: float | None = None

    @property
    def task(self) -> Task:
        """What a run from this is."""
        return TASK_OF[self.kind]

    @property
    def size(self) -> tuple[int, int]:
        """(Y, X) in pixels."""
        return int(self.pixels.shape[-3]), int(self.pixels.shape[-2])

    def for_videos(self, count: int) -> torch.Tensor:
        """The pixels with one entry per video; a single one serves all.

        Raises:
            UsageError: there are neither one nor ``count``.
        """
        self.digests_for(count)
        return self.pixels.expand(count, *self.pixels.shape[1:])

    def digests_for(self, count: int) -> tuple[str, ...]:
        """One digest per video.

        Raises:
            UsageError: there are neither one nor ``count``.
        """
        if len(self.digests) not in (1, count):
            raise UsageError(
                f"{len(self.digests)} {self.kind}s were given for {count} videos; give "
                f"one, or {count}"
            )
        return self.digests * count if len(self.digests) == 1 else self.digests

    def first(self, frames: int) -> Source:
        """A video source cut to its first ``frames`` frames.

        Raises:
            UsageError: it has fewer.
        """
        found = int(self.pixels.shape[1])
        if found < frames:
            raise UsageError(
                f"{self._name()} has {found} frames and {frames} are asked for; ask "
                "for fewer with --frames, or give a longer video"
            )
        return _make(self.kind, self.pixels[:, :frames], self.files, self.fps)

    def _name(self) -> str:
        return f"video {self.files[0]}" if self.files else "the video"


def read_image(images: Any) -> Source:
    """An image, or one image per video.

    Args:
        images: a path, a PIL image or a uint8 array [Y, X, 3], or a sequence of those.
            A file is rotated as its EXIF data says, as ``diffusers.utils.load_image``
            does; all are converted to RGB.

    Raises:
        UsageError: unreadable, too small, or images of several sizes.
    """
    listed = list(images) if isinstance(images, list | tuple) else [images]
    if not listed:
        raise UsageError("no image was given; name at least one")
    arrays = [_image_array(image) for image in listed]
    if len({array.shape for array in arrays}) > 1:
        sizes = ", ".join(f"{a.shape[1]}x{a.shape[0]}" for a in arrays)
        raise UsageError(f"the images must have one size; they are {sizes}")
    return _make("image", _stacked(arrays), _files(listed), None)


def read_video(video: Any, limit: int | None = None) -> Source:
    """A video.

    Args:
        video: a path to a file or to a folder of numbered images, a list of PIL images,
            or a uint8 array [F, Y, X, 3].
        limit: frames to read at most, so that a long file is not held whole.

    Raises:
        UsageError: unreadable, empty, or too small.
    """
    import numpy as np

    fps = None
    if isinstance(video, str | Path):
        frames, fps = _video_file(Path(video).expanduser(), str(video), limit)
    elif isinstance(video, list | tuple):
        frames = [_image_array(frame, "frame") for frame in video[:limit]]
    else:
        array = _plain_array(video)
        if array.dtype != np.uint8 or array.ndim != 4 or array.shape[-1] != 3:
            raise UsageError(
                "a video must be a file, a list of PIL images or a uint8 array "
                f"[frames, rows, columns, 3]; got {array.dtype} {list(array.shape)}"
            )
        frames = [_image_array(frame, "frame") for frame in array[:limit]]
    if not frames:
        raise UsageError(f"video {_shown(video)} holds no frame")
    if len({frame.shape for frame in frames}) > 1:
        raise UsageError(f"video {_shown(video)}: its frames must have one size")
    return _make("video", _stacked([np.stack(frames)]), _files([video]), fps)


def to_images(pixels: torch.Tensor) -> list[Any]:
    """PIL images of [N, Y, X, 3] or the frames of one video [F, Y, X, 3]."""
    from PIL import Image

    return [Image.fromarray(array) for array in pixels.numpy()]


def parse_aspect_ratio(text: str) -> tuple[float, float]:
    """(height, width) of ``"16:9"``, which is width to height.

    Raises:
        UsageError: of another form.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*[:x/]\s*(\d+(?:\.\d+)?)\s*", str(text))
    if match is None or not float(match[1]) or not float(match[2]):
        raise UsageError(f"aspect ratio {text!r} is not WIDTH:HEIGHT, such as 16:9")
    return float(match[2]), float(match[1])


def here(name: str) -> str:
    """``name``, found to be no address: nothing is read or written elsewhere.

    Raises:
        UsageError: it is one, such as ``https://``, ``s3://`` or ``data:``.
    """
    if re.match(r"[a-z][a-z0-9+.-]*://|data:", name, re.IGNORECASE):
        raise UsageError(
            f"{quoted(name)} is an address; download it, and give a file or folder of "
            "this machine"
        )
    return name


def _cause(error: Exception) -> str:
    """The last line of a message: ffmpeg says there what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][-200:] if lines else type(error).__name__


def _make(
    kind: str, pixels: torch.Tensor, files: tuple[str, ...], fps: float | None
) -> Source:
    digests = []
    for entry in pixels.numpy():
        digest = hashlib.sha256(f"{kind} {entry.shape}".encode())
        digest.update(entry.tobytes())
        digests.append(digest.hexdigest())
    return Source(
        kind=kind, pixels=pixels, digests=tuple(digests), files=files, fps=fps
    )


def _stacked(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    import numpy as np
    import torch

    return torch.from_numpy(np.stack(arrays))


def _files(values: Sequence[Any]) -> tuple[str, ...]:
    if not all(isinstance(value, str | Path) for value in values):
        return ()
    return tuple(str(Path(value).expanduser().absolute()) for value in values)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, str | Path) else f"of {type(value).__name__}"


def _plain_array(value: Any) -> np.ndarray:
    import numpy as np

    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)


def _image_array(image: Any, what: str = "image") -> np.ndarray:
    """uint8 [Y, X, 3] of one image, which messages call ``what``."""
    import numpy as np
    from PIL import Image

    name = _shown(image)
    if isinstance(image, str | Path):
        image = _opened(Path(image).expanduser(), name)
    if isinstance(image, Image.Image):
        array = np.asarray(image.convert("RGB"))
    else:
        array = _plain_array(image)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] != 3:
            raise UsageError(
                f"the {what} must be a file, a PIL image or a uint8 array [rows, "
                f"columns, 3]; got {array.dtype} {list(array.shape)}"
            )
    _check_size(f"{what} {name}", array)
    return array


def _opened(path: Path, name: str) -> Any:
    """The PIL image of a file on this machine, in RGB."""
    _check_there("image", path, here(name))
    from diffusers.utils import load_image
    from PIL import Image

    try:
        return load_image(str(path))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"image {name} cannot be read: {one_line(error)}") from error


def _check_there(what: str, path: Path, name: str) -> None:
    if not path.exists():
        raise UsageError(f"{what} {name} does not exist")
    if not path.is_file() and not path.is_dir():
        raise UsageError(f"{what} {name} is a device or a pipe; name a file")


def _check_size(what: str, array: np.ndarray) -> None:
    if min(array.shape[:2]) < SMALLEST_SIDE:
        raise UsageError(
            f"{what} is {array.shape[1]}x{array.shape[0]}; each side needs at least "
            f"{SMALLEST_SIDE} pixels"
        )


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Sorts frame2.png before frame10.png."""
    parts = re.split(r"([0-9]+)", path.name)
    return [(int(t), "") if t.isdigit() else (-1, t) for t in parts]


def _video_file(
    path: Path, name: str, limit: int | None
) -> tuple[list[np.ndarray], float | None]:
    """The frames of a file or of a folder of images, and the rate of a file."""
    _check_there("video", path, here(name))
    import imageio.v3 as iio
    import numpy as np

    if path.is_dir():
        suffixes = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
        files = sorted(
            (p for p in path.iterdir() if p.suffix.lower() in suffixes), key=_by_number
        )
        return [_image_array(p) for p in files[:limit]], None
    # ffmpeg's reader refuses what is a picture by its name. ``load_video`` of diffusers
    # is not used: it holds all frames of a file, however few are wanted.
    pictures = path.suffix.lower() in {".gif", ".webp", ".png", ".apng"}
    plugin = "pillow" if pictures else "FFMPEG"
    try:
        fps = None if pictures else iio.immeta(path, plugin=plugin).get("fps")
        read = itertools.islice(iio.imiter(path, plugin=plugin), limit)
        frames = [np.asarray(frame)[..., :3] for frame in read]
    except (OSError, ValueError, RuntimeError, IndexError) as error:
        raise UsageError(
            f"video {name} cannot be read: {_cause(error)}; give an mp4, webm or gif, "
            "or a folder of images"
        ) from error
    if frames:
        _check_size(f"video {name}", frames[0])
    return frames, None if fps is None else float(fps)
