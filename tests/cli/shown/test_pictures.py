"""Frames in terminals that show pictures, and as a PNG."""

from __future__ import annotations

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from tpuport.cli.shown.pictures import (
    Place,
    drawing,
    iterm,
    kitty,
    picture_of,
    place_of,
    png_of,
    sixel,
)

PICTURE = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
PLACE = Place(columns=18, rows=6, width=180, height=120)
ENVIRONMENTS = {
    kitty: (
        {"TERM": "xterm-kitty"},
        {"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"},
        {"TERM": "xterm-ghostty"},
    ),
    iterm: (
        {"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"},
        {"TERM": "xterm-256color", "LC_TERMINAL": "iTerm2"},
        {"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm"},
    ),
    sixel: ({"TERM": "foot"}, {"TERM": "mlterm"}, {"TERM": "xterm-sixel"}),
    None: (
        {},
        {"TERM": "xterm-256color"},
        {"TERM": "dumb"},
        {"TERM": "tmux-256color", "KITTY_WINDOW_ID": "1"},
        {"TERM": "xterm-256color", "TMUX": "/tmp/tmux", "TERM_PROGRAM": "iTerm.app"},
    ),
}


@pytest.mark.parametrize("draw", ENVIRONMENTS)
def test_the_environment_tells_what_a_terminal_draws(draw: object) -> None:
    for environment in ENVIRONMENTS[draw]:  # type: ignore[index]
        assert drawing(environment) is draw, environment


def opened(data: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


def test_kitty_gets_a_png_in_pieces_and_stays_silent() -> None:
    pieces = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", kitty(PICTURE, PLACE))
    heads = [dict(pair.split("=") for pair in head.split(",")) for head, _ in pieces]
    assert len(pieces) > 1
    assert all(len(data) <= 4096 for _, data in pieces)
    assert [head["m"] for head in heads] == ["1"] * (len(pieces) - 1) + ["0"]
    assert {head["q"] for head in heads} == {"2"}
    assert (heads[0]["c"], heads[0]["r"]) == ("18", "6")
    assert np.array_equal(opened("".join(data for _, data in pieces)), PICTURE)


def test_iterm_gets_a_png() -> None:
    found = re.fullmatch(r"\x1b\]1337;File=([^:]*):(.*)\x07", iterm(PICTURE, PLACE))
    assert found is not None
    assert "inline=1" in found[1]
    assert "width=18;height=6" in found[1]
    assert np.array_equal(opened(found[2]), PICTURE)


def drawn(text: str) -> np.ndarray:
    """What a terminal draws from Sixel."""
    found = re.fullmatch(r'\x1bP0;1q"1;1;(\d+);(\d+)(.*)\x1b\\', text)
    assert found is not None
    width, height = int(found[1]), int(found[2])
    pixels = np.full((height, width, 3), -1)
    colours: dict[int, list[float]] = {}
    colour = row = column = 0
    token = r"#(\d+);2;(\d+);(\d+);(\d+)|#(\d+)|!?(\d*)([?-~])|([$-])"
    for one in re.finditer(token, found[3]):
        if one[1]:
            colours[int(one[1])] = [int(one[n]) * 2.55 for n in (2, 3, 4)]
        elif one[5]:
            colour = int(one[5])
        elif one[7]:
            for _ in range(int(one[6] or 1)):
                for bit in range(6):
                    if (ord(one[7]) - 63) >> bit & 1:
                        pixels[row + bit, column] = colours[colour]
                column += 1
        else:
            column = 0
            row += 6 * (one[8] == "-")
    return pixels


def test_sixel_draws_every_pixel() -> None:
    smooth = Image.fromarray(PICTURE[:3, :4]).resize((90, 60), Image.Resampling.BICUBIC)
    found = drawn(sixel(np.asarray(smooth), PLACE))
    expected = np.asarray(smooth.resize((180, 120)), int)
    assert found.shape == expected.shape
    assert found.min() >= 0
    assert np.abs(found - expected).mean() < 16  # 32 colours


def test_a_picture_has_at_most_eight_frames_side_by_side() -> None:
    frames = np.arange(21, dtype=np.uint8)[:, None, None, None]
    frames = frames.repeat(10, 1).repeat(16, 2).repeat(3, 3)
    picture = picture_of(frames)
    times = picture.shape[1] // 64
    assert picture.shape == (20 * times, 64 * times, 3)
    cells = picture[:: 10 * times, :: 16 * times, 0].tolist()
    assert cells == [[0, 3, 6, 9], [11, 14, 17, 20]]
    assert picture_of(frames[:3]).shape[1] % (3 * 16) == 0
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png_of(picture)))), picture)


def test_a_picture_takes_a_third_of_the_rows_and_keeps_its_shape() -> None:
    assert place_of(PICTURE, (30, 100, 1000, 600)) == Place(30, 10, 300, 200)
    assert place_of(PICTURE, (30, 100, 0, 0)) == Place(30, 10, 300, 200)
    narrow = place_of(PICTURE, (30, 13, 130, 600))
    assert narrow == Place(12, 4, 120, 80)
