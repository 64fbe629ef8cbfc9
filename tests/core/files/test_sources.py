"""Images and videos to start from: what is read, what is refused, what is one and the
same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
import torch
from PIL import Image

from tpuport.core.files.sources import (
    Source,
    parse_aspect_ratio,
    read_image,
    read_video,
    to_images,
)
from tpuport.errors import UsageError


def pictures(count: int, rows: int = 32, columns: int = 48) -> np.ndarray:
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (count, rows, columns, 3), dtype=np.uint8)


# --- images


@pytest.mark.parametrize("kind", ["file", "text", "PIL", "array", "tensor"])
def test_an_image_however_it_is_given(kind: str, tmp_path: Path) -> None:
    (pixels,) = pictures(1)
    file = tmp_path / "image.png"
    Image.fromarray(pixels).save(file)
    given: dict[str, Any] = {
        "file": file,
        "text": str(file),
        "PIL": Image.fromarray(pixels),
        "array": pixels,
        "tensor": torch.from_numpy(pixels),
    }
    source = read_image(given[kind])
    assert source.kind == "image"
    assert source.task == "i2v"
    assert source.size == (32, 48)
    assert source.pixels.dtype == torch.uint8
    assert np.array_equal(source.pixels[0].numpy(), pixels)
    assert source.files == ((str(file),) if kind in ("file", "text") else ())
    assert source.digests == read_image(pixels).digests


def test_a_path_from_the_home_folder_and_a_relative_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.fromarray(pictures(1)[0]).save(tmp_path / "image.png")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given in ("~/image.png", "image.png"):
        assert read_image(given).files == (str(tmp_path / "image.png"),)


def test_a_file_is_rotated_as_its_exif_data_says(tmp_path: Path) -> None:
    from diffusers.utils import load_image

    image = Image.fromarray(pictures(1)[0])
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    image.save(tmp_path / "turned.png", exif=exif)
    source = read_image(tmp_path / "turned.png")
    assert source.size == (48, 32)
    upstream = np.asarray(load_image(str(tmp_path / "turned.png")))
    assert np.array_equal(source.pixels[0].numpy(), upstream)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_every_mode_becomes_rgb(mode: str, tmp_path: Path) -> None:
    image = Image.fromarray(pictures(1)[0]).convert(mode)
    expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(read_image(image).pixels[0].numpy(), expected)
    suffix = "tiff" if mode == "CMYK" else "png"
    image.save(tmp_path / f"image.{suffix}")
    read = read_image(tmp_path / f"image.{suffix}").pixels[0].numpy()
    assert np.array_equal(read, expected)


def test_one_image_per_video_or_one_for_all() -> None:
    three = read_image([*pictures(3)])
    assert three.pixels.shape == (3, 32, 48, 3)
    assert len(set(three.digests)) == 3
    assert torch.equal(three.for_videos(3), three.pixels)
    with pytest.raises(UsageError, match="3 images were given for 2 videos"):
        three.for_videos(2)
    one = read_image(pictures(1)[0])
    assert one.for_videos(2).shape == (2, 32, 48, 3)
    assert torch.equal(one.for_videos(2)[1], one.pixels[0])
    assert one.digests_for(2) == one.digests * 2


def test_the_digest_is_of_pixels_and_shape() -> None:
    (pixels,) = pictures(1)
    digest = read_image(pixels).digests
    other = pixels.copy()
    other[0, 0, 0] ^= 1
    assert read_image(other).digests != digest
    assert read_image(pixels.reshape(48, 32, 3)).digests != digest
    assert read_video(pixels[None]).digests != digest


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no image was given"),
        ([*pictures(1), *pictures(1, 32, 64)], "must have one size; .* 48x32, 64x32"),
        (pictures(1, 8, 64)[0], "is 64x8; each side needs at least 16"),
        (pictures(1)[0] / 255, r"uint8 array .*got float64 \[32, 48, 3\]"),
        (pictures(1)[0][..., 0], r"got uint8 \[32, 48\]"),
        (pictures(2), r"got uint8 \[2, 32, 48, 3\]"),
        (b"image", "the image must be a file"),
        ("missing.png", "image missing.png does not exist"),
        # Nothing is fetched.
        ("https://example.com/a.png", "'https://example.com/a.png' is an address"),
    ],
)
def test_what_is_no_image(given: Any, message: str) -> None:
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
        read_image(file)
    assert "\n" not in str(caught.value)


# --- videos


@pytest.mark.parametrize("kind", ["array", "tensor", "list", "folder"])
def test_a_video_however_it_is_given(kind: str, tmp_path: Path) -> None:
    pixels = pictures(12)
    given: dict[str, Any] = {
        "array": pixels,
        "tensor": torch.from_numpy(pixels),
        "list": to_images(torch.from_numpy(pixels)),
        "folder": tmp_path,
    }
    for index, frame in enumerate(pixels):
        # Without leading zeros: 10 comes after 9 all the same.
        Image.fromarray(frame).save(tmp_path / f"frame{index}.png")
    (tmp_path / "notes.txt").write_text("not a frame")
    source = read_video(given[kind])
    assert source.kind == "video"
    assert source.task == "v2v"
    assert source.fps is None
    assert np.array_equal(source.pixels.numpy(), pixels[None])
    assert source.digests == read_video(pixels).digests
    short = read_video(given[kind], limit=5)
    assert np.array_equal(short.pixels.numpy(), pixels[None, :5])


def test_a_video_file(tmp_path: Path) -> None:
    frames = np.zeros((6, 32, 48, 3), np.uint8)
    for index in range(6):
        frames[index] = 40 * index
    iio.imwrite(tmp_path / "video.mp4", frames, plugin="FFMPEG", fps=12)
    source = read_video(tmp_path / "video.mp4")
    assert source.pixels.shape == (1, 6, 32, 48, 3)
    # Of a lossy file.
    difference = source.pixels[0].numpy().astype(int) - frames
    assert np.abs(difference).max() <= 8
    assert source.fps == 12
    assert source.files == (str(tmp_path / "video.mp4"),)
    assert read_video(tmp_path / "video.mp4", limit=2).pixels.shape[1] == 2


def test_a_video_is_cut_to_the_frames_asked_for() -> None:
    pixels = pictures(5)
    source = read_video(pixels)
    cut = source.first(3)
    assert isinstance(cut, Source)
    assert cut.digests == read_video(pixels[:3]).digests
    assert cut.digests != source.digests
    with pytest.raises(UsageError, match="the video has 5 frames and 6 are asked for"):
        source.first(6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (pictures(1)[0], r"\[frames, rows, columns, 3\]; got uint8 \[32, 48, 3\]"),
        ([], "video of list holds no frame"),
        (pictures(0), "video of ndarray holds no frame"),
        ([pictures(1)[0], pictures(1, 32, 64)[0]], "frames must have one size"),
        (pictures(2, 8, 8), "frame of ndarray is 8x8; each side needs at least 16"),
        (pictures(2) / 255, r"a video must be .* got float64 \[2, 32, 48, 3\]"),
        (list(pictures(2) / 255), "the frame must be a file"),
        ("missing.mp4", "video missing.mp4 does not exist"),
        ("https://example.com/a.mp4", "'https://example.com/a.mp4' is an address"),
    ],
)
def test_what_is_no_video(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_video(given)


def test_unreadable_videos(tmp_path: Path) -> None:
    (tmp_path / "video.mp4").write_bytes(b"not a video")
    with pytest.raises(UsageError, match=r"video\.mp4 cannot be read: \S") as caught:
        read_video(tmp_path / "video.mp4")
    assert "\n" not in str(caught.value)
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="folder holds no frame"):
        read_video(tmp_path / "folder")
    small = np.zeros((2, 16, 8, 3), np.uint8)
    iio.imwrite(tmp_path / "s.mp4", small, plugin="FFMPEG", macro_block_size=1)
    with pytest.raises(UsageError, match="is 8x16; each side"):
        read_video(tmp_path / "s.mp4")


# --- aspect ratios


@pytest.mark.parametrize(
    ("text", "ratio"),
    [("16:9", (9, 16)), ("1x1", (1, 1)), (" 2.39 : 1 ", (1, 2.39)), ("4/3", (3, 4))],
)
def test_an_aspect_ratio_is_width_to_height(
    text: str, ratio: tuple[float, float]
) -> None:
    assert parse_aspect_ratio(text) == ratio


@pytest.mark.parametrize("text", ["16", "16:0", "0:9", "wide", "-16:9", "1:2:3", ""])
def test_what_is_no_aspect_ratio(text: str) -> None:
    with pytest.raises(UsageError, match="is not WIDTH:HEIGHT"):
        parse_aspect_ratio(text)
