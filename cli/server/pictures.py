"""Pictures of a video: its first frame, and a sheet of frames."""

from __future__ import annotations

import io
from pathlib import Path

from tpuport.core.files.atomic import atomic_write_bytes
from tpuport.core.files.sources import read_video

THUMBNAIL, SHEET = ".webp", ".jpg"
#: Pixels of a picture's longer side, and frames of a sheet and of a row of it.
_SIDE, _FRAMES, _ROW = 320, 16, 4


def write_pictures(video: Path) -> None:
    """Write ``fox.webp`` and ``fox.jpg`` beside ``fox.mp4``."""
    from PIL import Image

    frames = read_video(str(video))
    count = min(len(frames), _FRAMES)
    last = max(count - 1, 1)
    taken = [frames[round(n * (len(frames) - 1) / last)].copy() for n in range(count)]
    for frame in taken:
        frame.thumbnail((_SIDE, _SIDE))
    across = min(count, _ROW)
    width, height = taken[0].size
    sheet = Image.new("RGB", (width * across, height * -(-count // across)))
    for number, frame in enumerate(taken):
        row, column = divmod(number, across)
        sheet.paste(frame, (column * width, row * height))
    for ending, picture in ((THUMBNAIL, taken[0]), (SHEET, sheet)):
        file = io.BytesIO()
        picture.save(file, {THUMBNAIL: "webp", SHEET: "jpeg"}[ending], quality=85)
        atomic_write_bytes(video.with_suffix(ending), file.getvalue())
