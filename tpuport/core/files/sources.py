"""Images and videos that a video is made from: files of this machine, as PIL images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tpuport.core.files.atomic import one_line
from tpuport.errors import UsageError, quoted

if TYPE_CHECKING:
    from PIL.Image import Image

#: Sides below this are no picture: every model's patches are as large.
SMALLEST_SIDE = 16

#: What is read of a folder of frames.
_PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}


def read_image(name: str, what: str = "image") -> Image:
    """An image in RGB, rotated as its EXIF data says, as ``diffusers.utils.load_image``
    does.

    Args:
        name: a file.
        what: messages call it.

    Raises:
        UsageError: unreadable, or too small.
    """
    path = _there(what, name)
    from diffusers.utils import load_image
    from PIL import Image

    try:
        image = load_image(str(path))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"{what} {name} cannot be read: {one_line(error)}") from error
    _check_size(f"{what} {name}", image)
    return image


def read_video(name: str) -> list[Image]:
    """The frames of a video.

    Args:
        name: a file, or a folder of numbered images.

    Raises:
        UsageError: unreadable, empty, too small, or of frames of several sizes.
    """
    path = _there("video", name)
    if path.is_dir():
        files = [p for p in path.iterdir() if p.suffix.lower() in _PICTURES]
        frames = [read_image(str(p), "frame") for p in sorted(files, key=_by_number)]
    else:
        frames = _frames(path, name)
    if not frames:
        raise UsageError(f"video {name} holds no frame")
    if len({frame.size for frame in frames}) > 1:
        raise UsageError(f"video {name}: its frames must have one size")
    _check_size(f"video {name}", frames[0])
    return frames


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


def _there(what: str, name: str) -> Path:
    path = Path(here(name)).expanduser()
    if not path.exists():
        raise UsageError(f"{what} {name} does not exist")
    if not path.is_file() and not path.is_dir():
        raise UsageError(f"{what} {name} is a device or a pipe; name a file")
    return path


def _check_size(what: str, image: Image) -> None:
    if min(image.size) < SMALLEST_SIDE:
        raise UsageError(
            f"{what} is {image.width}x{image.height}; each side needs at least "
            f"{SMALLEST_SIDE} pixels"
        )


def _by_number(path: Path) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", path.name)
    return [(int(t), "") if t.isdigit() else (-1, t) for t in parts]


def _frames(path: Path, name: str) -> list[Image]:
    import imageio.v3 as iio
    from PIL import Image

    # ffmpeg's reader refuses what is a picture by its name.
    pictures = path.suffix.lower() in {".gif", ".webp", ".png", ".apng"}
    plugin = "pillow" if pictures else "FFMPEG"
    try:
        return [Image.fromarray(f[..., :3]) for f in iio.imiter(path, plugin=plugin)]
    except (OSError, ValueError, RuntimeError, IndexError) as error:
        raise UsageError(
            f"video {name} cannot be read: {_cause(error)}; give an mp4, webm or gif, "
            "or a folder of images"
        ) from error
