"""Images and videos to start from: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
from PIL import Image

from tpuport.core.files.sources import check_video, read_image, read_video
from tpuport.core.spec.kinds import aspect_ratio
from tpuport.errors import UsageError


def pictures(count: int, rows: int = 32, columns: int = 48) -> np.ndarray:
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (count, rows, columns, 3), dtype=np.uint8)


def saved(folder: Path, frames: np.ndarray) -> Path:
    """A folder of frames, without leading zeros: 10 comes after 9 all the same."""
    folder.mkdir()
    for index, frame in enumerate(frames):
        Image.fromarray(frame).save(folder / f"frame{index}.png")
    (folder / "notes.txt").write_text("not a frame")
    return folder


# --- images


def test_a_path_from_the_home_folder_and_a_relative_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pixels,) = pictures(1)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given in ("~/image.png", "image.png", str(tmp_path / "image.png")):
        assert np.array_equal(np.asarray(read_image(given)), pixels)


def test_a_file_is_rotated_as_its_exif_data_says(tmp_path: Path) -> None:
    image = Image.fromarray(pictures(1)[0])
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    image.save(tmp_path / "turned.png", exif=exif)
    found = read_image(str(tmp_path / "turned.png"))
    assert np.array_equal(np.asarray(found), np.rot90(np.asarray(image), -1))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_every_mode_becomes_rgb(mode: str, tmp_path: Path) -> None:
    image = Image.fromarray(pictures(1)[0]).convert(mode)
    file = tmp_path / f"image.{'tiff' if mode == 'CMYK' else 'png'}"
    image.save(file)
    found = read_image(str(file))
    assert np.array_equal(np.asarray(found), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("small.png", "is 64x8; each side needs at least 16"),
        ("missing.png", "--image missing.png does not exist; check the name"),
        (".", r"--image \. is a folder; name a PNG or JPEG file"),
        ("/dev/null", "is a device or a pipe"),
        # Nothing is fetched.
        ("https://example.com/a.png", "'https://example.com/a.png' is an address"),
    ],
)
def test_what_is_no_image(
    given: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.fromarray(pictures(1, 8, 64)[0]).save(tmp_path / "small.png")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        read_image(given)


@pytest.mark.parametrize("content", [b"", b"not an image", None])
def test_an_unreadable_image(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    if content is None:  # cut in the middle
        Image.fromarray(pictures(1, 64, 64)[0]).save(file)
        content = file.read_bytes()[:2000]
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"image\.png cannot be read: \S") as caught:
        read_image(str(file))
    assert "\n" not in str(caught.value)


# --- videos


def test_a_folder_of_frames_is_a_video(tmp_path: Path) -> None:
    pixels = pictures(12)
    found = read_video(str(saved(tmp_path / "frames", pixels)))
    assert np.array_equal(np.stack([np.asarray(frame) for frame in found]), pixels)


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_a_video_file(suffix: str, tmp_path: Path) -> None:
    frames = np.zeros((6, 32, 48, 3), np.uint8)
    for index in range(6):
        frames[index] = 40 * index
    file, how = tmp_path / f"video{suffix}", {"plugin": "FFMPEG", "fps": 12}
    iio.imwrite(file, frames, **(how if suffix == ".mp4" else {}))
    found = np.stack([np.asarray(frame) for frame in read_video(str(file))])
    # Of a lossy file.
    assert np.abs(found.astype(int) - frames).max() <= 8


def test_unreadable_videos(tmp_path: Path) -> None:
    def refused(name: Any, message: str, *, soon: bool = True) -> None:
        for read in (read_video, check_video) if soon else (read_video,):
            with pytest.raises(UsageError, match=message) as caught:
                read(str(name))
            assert "\n" not in str(caught.value)

    (tmp_path / "video.mp4").write_bytes(b"not a video")
    refused(tmp_path / "video.mp4", r"video\.mp4 cannot be read: \S")
    refused("missing.mp4", "--video missing.mp4 does not exist")
    refused("https://example.com/a.mp4", "'https://example.com/a.mp4' is an address")
    (tmp_path / "folder").mkdir()
    refused(tmp_path / "folder", "folder holds no frame")
    small = np.zeros((2, 16, 8, 3), np.uint8)
    iio.imwrite(tmp_path / "s.mp4", small, plugin="FFMPEG", macro_block_size=1)
    refused(tmp_path / "s.mp4", "is 8x16; each side")
    odd = saved(tmp_path / "odd", pictures(2))
    Image.fromarray(pictures(1, 32, 64)[0]).save(odd / "frame2.png")
    refused(odd, "frames must have one size", soon=False)
    check_video(str(odd))
    check_video(str(tmp_path / "video.mp4"), opened=False)


# --- aspect ratios


@pytest.mark.parametrize(
    ("text", "ratio"),
    [("16:9", (9, 16)), ("1x1", (1, 1)), (" 2.39 : 1 ", (1, 2.39)), ("4/3", (3, 4))],
)
def test_an_aspect_ratio_is_width_to_height(
    text: str, ratio: tuple[float, float]
) -> None:
    assert aspect_ratio(text) == ratio


@pytest.mark.parametrize("text", ["16", "16:0", "0:9", "wide", "-16:9", "1:2:3", ""])
def test_what_is_no_aspect_ratio(text: str) -> None:
    with pytest.raises(ValueError, match="is not WIDTH:HEIGHT"):
        aspect_ratio(text)


@pytest.mark.parametrize("text", ["9:1", "1:9"])
def test_a_shape_that_is_too_long_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="shapes go from 1:4 to 4:1"):
        aspect_ratio(text)
