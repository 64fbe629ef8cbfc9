"""Frames as a picture: for a file, and in the bytes that terminals draw pictures from.

What a terminal draws is told from the environment. Nothing is asked of the terminal: an
answer would come among what the user types.

Protocols: Kitty's graphics (sw.kovidgoyal.net/kitty/graphics-protocol), iTerm2's inline
images (iterm2.com/documentation-images.html), and Sixel (VT340).
"""

from __future__ import annotations

import base64
import fcntl
import io
import os
import re
import struct
import sys
import termios
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

#: Frames in a picture, and in a row, at most.
_FRAMES, _ROW = 8, 4
#: Pixels of a picture's width, about: latents are small.
_WIDTH = 640
#: Colours of a Sixel picture; all terminals have as many.
_COLOURS = 32
#: Of Sixel, equal columns in a row that are shorter told by their number.
_RUN = re.compile(r"(.)\1{3,}")
#: Programs that draw iTerm2's inline images.
_ITERM = ("iTerm.app", "WezTerm", "mintty")
#: One number for all pictures of the process: the next one takes the place of the last.
_KITTY_NUMBER = 7_215

Draw = Callable[["np.ndarray", "Place"], str]


class Place(NamedTuple):
    """Where a picture goes: in cells of the terminal, and in pixels."""

    columns: int
    rows: int
    width: int
    height: int


def picture_of(frames: np.ndarray) -> np.ndarray:
    """Some frames, evenly taken, side by side.

    Args:
        frames: uint8 [F, Y, X, 3].

    Returns:
        uint8 [Y, X, 3], about as wide as a video; at most eight frames, in rows of
        four.
    """
    import numpy as np
    from PIL import Image

    count = min(len(frames), _FRAMES)
    taken = frames[np.linspace(0, len(frames) - 1, count).round().astype(int)]
    across = min(count, _ROW)
    empty = np.zeros((-count % across, *taken.shape[1:]), np.uint8)
    grid = np.concatenate([taken, empty]).reshape(-1, across, *taken.shape[1:])
    whole = grid.swapaxes(1, 2).reshape(-1, across * taken.shape[2], 3)
    times = max(1, _WIDTH // whole.shape[1])
    size = (whole.shape[1] * times, whole.shape[0] * times)
    return np.asarray(Image.fromarray(whole).resize(size, Image.Resampling.NEAREST))


def png_of(picture: np.ndarray) -> bytes:
    """A picture uint8 [Y, X, 3] as the bytes of a PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture).save(file, "png", compress_level=1)
    return file.getvalue()


def kitty(picture: np.ndarray, place: Place) -> str:
    """In Kitty's protocol: pieces of at most 4,096 bytes; the terminal stays silent."""
    data = base64.standard_b64encode(png_of(picture)).decode()
    pieces = [data[at : at + 4096] for at in range(0, len(data), 4096)]
    how = f"a=T,f=100,i={_KITTY_NUMBER},p=1,q=2,C=1,c={place.columns},r={place.rows},"
    heads = [how, *("q=2," for _ in pieces[1:])]
    return "".join(
        f"\x1b_G{head}m={int(more)};{piece}\x1b\\"
        for head, piece, more in zip(
            heads, pieces, [True] * (len(pieces) - 1) + [False], strict=True
        )
    )


def iterm(picture: np.ndarray, place: Place) -> str:
    """In iTerm2's protocol."""
    data = png_of(picture)
    how = f"inline=1;size={len(data)};width={place.columns};height={place.rows}"
    return f"\x1b]1337;File={how}:{base64.standard_b64encode(data).decode()}\x07"


def sixel(picture: np.ndarray, place: Place) -> str:
    """As Sixel: bands of six rows, and in each the pixels of one colour at a time."""
    import numpy as np
    from PIL import Image

    width = min(place.width, _WIDTH)
    height = max(6, place.height * width // place.width // 6 * 6)
    scaled = Image.fromarray(picture).resize((width, height))
    indexed = scaled.quantize(_COLOURS, dither=Image.Dither.NONE)
    palette = np.asarray(indexed.getpalette(), int).reshape(-1, 3) * 100 // 255
    found = [f'\x1bP0;1q"1;1;{width};{height}']
    found += [f"#{n};2;{r};{g};{b}" for n, (r, g, b) in enumerate(palette)]
    bits = (1 << np.arange(6, dtype=np.uint8))[:, None]
    for band in np.asarray(indexed).reshape(-1, 6, width):
        for colour in np.unique(band):
            columns = np.bitwise_or.reduce((band == colour) * bits, 0) + np.uint8(63)
            told = _RUN.sub(_shorter, columns.tobytes().decode())
            found.append(f"#{colour}{told}$")
        found.append("-")
    return "".join(found) + "\x1b\\"


def _shorter(run: re.Match[str]) -> str:
    return f"!{len(run[0])}{run[1]}"


def drawing(environment: Mapping[str, str]) -> Draw | None:
    """What draws pictures in a terminal; ``None`` where it is not known to.

    Args:
        environment: of the process. Multiplexers hand pictures on to no terminal.
    """
    term = environment.get("TERM", "")
    program = environment.get("TERM_PROGRAM", "")
    if "TMUX" in environment or term.startswith(("screen", "tmux", "dumb")):
        return None
    # A terminal that was started from another one has variables of both.
    if "KITTY_WINDOW_ID" in environment and term == "xterm-256color" and program:
        return iterm if program in _ITERM else None
    if "KITTY_WINDOW_ID" in environment or term in ("xterm-kitty", "xterm-ghostty"):
        return kitty
    remote = environment.get("LC_TERMINAL", "")  # what ssh hands on
    if program in _ITERM or (not program and remote == "iTerm2"):
        return iterm
    if "sixel" in term or term.startswith(("foot", "mlterm", "yaft")):
        return sixel
    return None


def drawing_here() -> Draw | None:
    """What draws pictures on stderr."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    return drawing(os.environ)


def place_of(picture: np.ndarray, window: tuple[int, int, int, int]) -> Place:
    """Where a picture goes in a terminal: at most a third of the rows.

    Args:
        window: rows, columns, and pixels across and down; 0 where they are not known.
    """
    lines, wide, across, down = window
    cell = (across // wide, down // lines) if across and down else (10, 20)
    height, width = picture.shape[:2]
    rows = max(lines // 3, 2)
    columns = round(rows * cell[1] * width / height / cell[0])
    if columns > wide - 1:
        columns = wide - 1
        rows = max(round(columns * cell[0] * height / width / cell[1]), 1)
    columns = max(columns, 1)
    return Place(columns, rows, columns * cell[0], rows * cell[1])


def window_here() -> tuple[int, int, int, int]:
    """Rows, columns and pixels of the terminal of stderr; the kernel knows."""
    asked = fcntl.ioctl(sys.stderr.fileno(), termios.TIOCGWINSZ, b"\0" * 8)
    lines, wide, across, down = struct.unpack("HHHH", asked)
    return lines or 24, wide or 80, across, down
