"""Images and videos that a video is made from: files of this machine, as PIL images."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
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
_EMPTY = "{} holds no frame; give an mp4, webm or gif, or a folder of images"


def check_image(name: str, what: str = "--image") -> Path:
    """The file of an image, found to be one; no more than its head is read.

    Args:
        what: messages call it.

    Raises:
        UsageError: there is none, or it is too small.
    """
    path = _there(what, name)
    if path.is_dir():
        raise UsageError(f"{what} {name} is a folder; name a PNG or JPEG file")
    from PIL import Image

    with _readable(f"{what} {name}"), Image.open(path) as image:
        _check_size(f"{what} {name}", image)
    return path


def read_image(name: str, what: str = "--image") -> Image:
    """An image in RGB, rotated as its EXIF data says, as ``diffusers.utils.load_image``
    does.

    Args:
        name: a file.
        what: messages call it.

    Raises:
        UsageError: unreadable, or too small.
    """
    path = check_image(name, what)
    from diffusers.utils import load_image

    with _readable(f"{what} {name}"):
        return load_image(str(path))


def check_video(name: str, what: str = "--video", *, opened: bool = True) -> None:
    """Refuse what is no video; of a file the first frame is read.

    Args:
        what: messages call it.
        opened: whether a file is read.

    Raises:
        UsageError: there is none, or it is too small.
    """
    path = _there(what, name)
    if path.is_dir():
        for first in _in_folder(path):
            check_image(str(first), f"{what}: frame")
            return
    elif not opened:
        return
    else:
        for frame in _frames(path, f"{what} {name}"):
            _check_size(f"{what} {name}", frame)
            return
    raise UsageError(_EMPTY.format(f"{what} {name}"))


def read_video(name: str, what: str = "--video") -> list[Image]:
    """The frames of a video.

    Args:
        name: a file, or a folder of numbered images.
        what: messages call it.

    Raises:
        UsageError: unreadable, empty, too small, or of frames of several sizes.
    """
    path = _there(what, name)
    if path.is_dir():
        frames = [read_image(str(p), f"{what}: frame") for p in _in_folder(path)]
    else:
        frames = list(_frames(path, f"{what} {name}"))
    if not frames:
        raise UsageError(_EMPTY.format(f"{what} {name}"))
    if len({frame.size for frame in frames}) > 1:
        raise UsageError(f"{what} {name}: its frames must have one size")
    _check_size(f"{what} {name}", frames[0])
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
        raise UsageError(f"{what} {name} does not exist; check the name")
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


def _in_folder(path: Path) -> list[Path]:
    """The frames of a folder, in order."""
    files = [p for p in path.iterdir() if p.suffix.lower() in _PICTURES]
    return sorted(files, key=_by_number)


@contextlib.contextmanager
def _readable(what: str) -> Iterator[None]:
    """What PIL raises, as one line."""
    from PIL import Image

    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(
            f"{what} cannot be read: {one_line(error)}; give a PNG or JPEG file"
        ) from error


def _frames(path: Path, what: str) -> Iterator[Image]:
    import imageio.v3 as iio
    from PIL import Image

    # ffmpeg's reader refuses what is a picture by its name.
    pictures = path.suffix.lower() in {".gif", ".webp", ".png", ".apng"}
    plugin = "pillow" if pictures else "FFMPEG"
    try:
        for frame in iio.imiter(path, plugin=plugin):
            yield Image.fromarray(frame[..., :3])
    except (OSError, ValueError, RuntimeError, IndexError) as error:
        raise UsageError(
            f"{what} cannot be read: {_cause(error)}; give an mp4, webm or gif, or a "
            "folder of images"
        ) from error
