"""Frames into a video: what is refused, where it goes, and what comes back."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.core.files.videos import read_back, write_video
from tpuport.core.files.frames import to_uint8
from tpuport.core.files.video_file import (
    VideoWriter,
    check_frames,
    check_output,
    output_paths,
    video_kind,
)
from tpuport.errors import OutputError, VideoError


def moving(count: int = 5, height: int = 32, width: int = 48) -> np.ndarray:
    """Bytes of shape [T, Y, X, 3]: a bar that moves over an orange ground."""
    frames = np.empty((count, height, width, 3), np.uint8)
    frames[:] = (200, 60, 30)
    for index in range(count):
        frames[index, :, 4 * index : 4 * index + 8] = (20, 180, 240)
    return frames


# --- frames


def test_bytes_are_rounded_and_clipped() -> None:
    values = [-1.0, 0.0, 0.4 / 255, 0.6 / 255, 127.5 / 255, 254.6 / 255, 1.0, 2.0]
    frames = np.array(values, np.float32)
    assert to_uint8(frames).tolist() == [0, 0, 0, 1, 128, 255, 255, 255]
    every = np.arange(256, dtype=np.uint8)
    assert np.array_equal(to_uint8(every.astype(np.float32) / 255), every)
    assert to_uint8(every) is every


def test_nan_and_other_integers_have_no_bytes() -> None:
    with pytest.raises(VideoError, match="NaN or infinite"):
        to_uint8(np.array([0.5, np.nan], np.float32))
    with pytest.raises(VideoError, match="must be float or uint8, not int64"):
        to_uint8(np.array([1]))


def videos() -> np.ndarray:
    """Two good videos of shape [2, T, Y, X, 3], float32."""
    return np.stack([moving(), moving()[::-1]]).astype(np.float32) / 255


def test_ordinary_frames_pass() -> None:
    check_frames(videos())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_counted_and_located(bad: float) -> None:
    frames = videos()
    frames[1, 3, 0, 0, :] = bad
    frames[1, 4, 0, 0, 1] = bad
    with pytest.raises(
        VideoError, match=r"video 1: 4 of \d+ values .* from frame 3 on"
    ):
        check_frames(frames)


def test_black_videos_are_refused() -> None:
    frames = videos()
    frames[1] = 0.4 / 255
    with pytest.raises(VideoError, match="video 1: all 5 frames are black"):
        check_frames(frames)


def test_videos_of_one_colour_are_refused() -> None:
    frames = videos()
    frames[1] = (0.9, 0.1, 0.5)
    with pytest.raises(VideoError, match=r"video 1: .* same colour \(0.900, 0.100"):
        check_frames(frames)
    frames[1, 0, 0, 0] += np.float32(1 / 255)  # still within 1/255
    with pytest.raises(VideoError, match=r"video 1: .* same colour"):
        check_frames(frames)
    frames[1, 0, 0, 0] += np.float32(0.5 / 255)
    check_frames(frames)


def test_arrays_of_another_shape_or_dtype_are_refused() -> None:
    with pytest.raises(VideoError, match=r"must have shape \[N, T, Y, X, 3\], not"):
        check_frames(videos()[0])
    with pytest.raises(VideoError, match=r"\[2, 0, 32, 48, 3\]"):
        check_frames(videos()[:, :0])
    with pytest.raises(VideoError, match=r"must be float .*, not uint8"):
        check_frames(moving()[None])


# --- where it goes


def test_the_suffix_says_the_kind(tmp_path: Path) -> None:
    assert video_kind("a.mp4") == "mp4"
    assert video_kind(Path("a.GIF")) == "gif"
    assert video_kind("b.c/a.webm") == "webm"
    assert video_kind("frames") == "png"
    assert video_kind("frames.v2/") == "png"
    (tmp_path / "frames.v2").mkdir()
    assert video_kind(tmp_path / "frames.v2") == "png"


@pytest.mark.parametrize("name", ["a.avi", "a.png", "run-1.5"])
def test_an_unknown_suffix_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(OutputError, match=r"\.mp4, \.gif, \.webm, or a folder") as info:
        video_kind(name)
    assert str(info.value).startswith(f"{name}: ")


def test_several_videos_are_numbered() -> None:
    assert output_paths(Path("o/a.mp4"), 1) == [Path("o/a.mp4")]
    assert output_paths("o/a.mp4", 2) == [Path("o/a-000.mp4"), Path("o/a-001.mp4")]
    assert output_paths("frames", 2) == [Path("frames/000"), Path("frames/001")]
    assert output_paths("a.gif", 1001)[-1] == Path("a-1000.gif")
    with pytest.raises(OutputError, match=r"a\.gif: 0 videos"):
        output_paths("a.gif", 0)


def test_checking_a_good_output_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "old.mp4").touch()
    (tmp_path / "frames").mkdir()
    assert check_output(tmp_path / "old.mp4") == "mp4"
    assert check_output(tmp_path / "new" / "deep" / "a.webm") == "webm"
    assert check_output(tmp_path / "frames") == "png"
    assert check_output(f"{tmp_path}/more.frames/") == "png"
    assert sorted(os.listdir(tmp_path)) == ["frames", "old.mp4"]
    assert os.listdir(tmp_path / "frames") == []


def test_a_relative_output_is_checked_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_output("a.mp4") == "mp4"
    assert check_output("frames") == "png"
    assert os.listdir(tmp_path) == []


def bad_output(path: Path | str) -> str:
    """The message that refuses ``path``: one line that starts with it."""
    with pytest.raises(OutputError) as caught:
        check_output(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def test_a_folder_and_a_file_cannot_stand_for_each_other(tmp_path: Path) -> None:
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").touch()
    assert "is a folder, and .mp4 is a file" in bad_output(tmp_path / "folder.mp4")
    assert "is a file, and PNG frames need a folder" in bad_output(tmp_path / "file")
    below = bad_output(tmp_path / "file" / "deep" / "a.mp4")
    assert f"{tmp_path / 'file'} is not a folder" in below


def test_a_name_that_the_file_system_refuses_is_refused(tmp_path: Path) -> None:
    assert "File name too long" in bad_output(tmp_path / ("a" * 300 + ".mp4"))


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def refuse(*, dir: Path) -> Any:  # root may write anywhere, so chmod shows nothing
        asked.append(dir)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    path = tmp_path / "new" / "a.mp4"
    assert f"cannot be written: {tmp_path}: Permission denied" in bad_output(path)
    assert asked == [tmp_path]


# --- writing and reading back


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.gif", "frames"])
@pytest.mark.parametrize("count", [1, 5])
def test_what_is_written_comes_back(tmp_path: Path, name: str, count: int) -> None:
    path = tmp_path / "new" / name
    frames = moving(count)
    write_video(path, frames.astype(np.float32) / 255, fps=8)
    found = read_back(path)
    assert found[:3] == (count, 32, 48)
    if name == "frames":
        assert found[3] == 0.0
    else:
        # One gif frame of 1/8 s lasts 12 or 13 hundredths.
        assert found[3] == pytest.approx(8, rel=0.05)
    assert os.listdir(tmp_path / "new") == [name]


def decoded(path: Path) -> np.ndarray:
    import imageio.v3 as iio

    return np.stack(list(iio.imiter(path, plugin="FFMPEG")))


@pytest.mark.parametrize("name", ["a.mp4", "a.webm"])
def test_colours_survive_the_encoder(tmp_path: Path, name: str) -> None:
    frames = moving()
    write_video(tmp_path / name, frames, fps=8)
    back = decoded(tmp_path / name).astype(int)
    # Away from the edges of the bar, where half the colour resolution shows.
    assert np.abs(back[0, :, 24:] - frames[0, :, 24:]).max() <= 6
    assert np.abs(back[0, :, 2:6] - frames[0, :, 2:6]).max() <= 6


def test_an_odd_mp4_is_padded_and_an_odd_webm_is_exact(tmp_path: Path) -> None:
    frames = moving(2, 31, 47)
    for name, size in [("a.mp4", (32, 48)), ("a.webm", (31, 47)), ("a.gif", (31, 47))]:
        write_video(tmp_path / name, frames, fps=8)
        assert read_back(tmp_path / name)[1:3] == size
    # Padded, not rescaled: the bar's edge stays at column 8.
    back = decoded(tmp_path / "a.mp4").astype(int)
    assert np.abs(back[0, 4:28, 12:46] - frames[0, 4:28, 12:46]).max() <= 6


def test_an_even_size_off_the_macro_block_is_kept(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", moving(2, 34, 50), fps=8)
    assert read_back(tmp_path / "a.mp4") == (2, 34, 50, 8.0)


def test_an_mp4_is_of_the_kind_that_plays_everywhere(tmp_path: Path) -> None:
    import imageio.v3 as iio

    write_video(tmp_path / "a.mp4", moving(), fps=8)
    meta = iio.immeta(tmp_path / "a.mp4", plugin="FFMPEG")
    assert meta["codec"] == "h264"
    assert meta["pix_fmt"].startswith("yuv420p(tv, bt709")
    data = (tmp_path / "a.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize(("fps", "expected"), [(8, 8), (24, 24), (16, 16), (120, 50)])
def test_a_gif_has_the_right_length_and_loops(
    tmp_path: Path, fps: int, expected: int
) -> None:
    import imageio.v3 as iio

    write_video(tmp_path / "a.gif", moving(10), fps=fps)
    count, *_, found = read_back(tmp_path / "a.gif")
    assert count == 10
    assert found == pytest.approx(expected, rel=0.013)
    assert iio.immeta(tmp_path / "a.gif", plugin="pillow")["loop"] == 0


def test_png_frames_are_exact_and_stale_ones_go(tmp_path: Path) -> None:
    import imageio.v3 as iio

    folder = tmp_path / "frames"
    write_video(folder, moving(5), fps=8)
    (folder / "notes.txt").touch()
    write_video(folder, moving(2), fps=8)
    names = ["frame-00000.png", "frame-00001.png", "notes.txt"]
    assert sorted(os.listdir(folder)) == names
    assert os.listdir(tmp_path) == ["frames"]
    back = np.stack([iio.imread(folder / name) for name in names[:2]])
    assert np.array_equal(back, moving(2))


def test_a_folder_with_a_suffix_is_written_with_the_kind_that_was_checked(
    tmp_path: Path,
) -> None:
    out = f"{tmp_path}/frames.v2/"
    kind = check_output(out)
    (path,) = output_paths(out, 1)
    write_video(path, moving(1), fps=8, kind=kind)
    assert read_back(path)[0] == 1


@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
def test_a_failed_write_leaves_the_earlier_video(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"earlier")
    frames = moving().astype(np.float32) / 255
    frames[3, 0, 0, 0] = np.nan  # found after three frames went to the encoder
    with pytest.raises(VideoError, match="NaN"):
        write_video(path, frames, fps=8)
    assert path.read_bytes() == b"earlier"
    assert os.listdir(tmp_path) == [name]


def test_failed_frames_leave_the_earlier_frames(tmp_path: Path) -> None:
    folder = tmp_path / "frames"
    write_video(folder, moving(2), fps=8)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    frames = moving(3).astype(np.float32) / 255
    frames[2, 0, 0, 0] = np.nan
    with pytest.raises(VideoError, match="NaN"):
        write_video(folder, frames, fps=8)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(tmp_path) == ["frames"]


def test_a_rename_that_fails_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", failing)
    path = tmp_path / "a.gif"
    with pytest.raises(OutputError) as caught:
        write_video(path, moving(2), fps=8)
    assert str(caught.value) == f"{path}: cannot be written: No space left on device"
    assert os.listdir(tmp_path) == []


def test_an_encoder_that_loses_frames_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import imageio_ffmpeg

    path = tmp_path / "a.mp4"
    monkeypatch.setattr(imageio_ffmpeg, "count_frames_and_secs", lambda _: (3, 0.3))
    with pytest.raises(OutputError, match=r"a\.mp4: .* ffmpeg wrote 3 of 5 frames"):
        write_video(path, moving(5), fps=8)
    assert os.listdir(tmp_path) == []


def test_an_encoder_that_fails_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpuport.core.files import encoders as video_encoders

    broken = {"mp4": ("libx264", ["-crf", "no number"])}
    monkeypatch.setattr(video_encoders, "_ENCODERS", broken)
    with pytest.raises(OutputError, match=r"a\.mp4: cannot be written: ") as caught:
        write_video(tmp_path / "a.mp4", moving(2), fps=8)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.gif", "frames"])
def test_frames_that_come_in_parts_make_the_same_video(
    tmp_path: Path, name: str
) -> None:
    frames = moving(7)
    whole, path = tmp_path / "whole" / name, tmp_path / "parts" / name
    write_video(whole, frames, fps=8)
    with VideoWriter(path, 8) as writer:
        for start in (0, 1, 4):
            writer.append(frames[start : {0: 1, 1: 4, 4: 7}[start]])
            # Nothing has the name before all of it is there.
            assert not path.exists()
    assert read_back(path) == read_back(whole)
    if name == "a.webm":  # its file has a random number in it
        assert np.array_equal(decoded(path), decoded(whole))
        return
    files = sorted(whole.iterdir()) if whole.is_dir() else [whole]
    parts = sorted(path.iterdir()) if path.is_dir() else [path]
    assert [f.read_bytes() for f in parts] == [f.read_bytes() for f in files]


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "frames"])
def test_a_video_that_is_discarded_leaves_what_was_there(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    write_video(path, moving(2), fps=8)
    before = read_back(path)
    writer = VideoWriter(path, 8)
    writer.append(moving(5))
    writer.finish()
    assert read_back(path) == before
    assert len(os.listdir(tmp_path)) == 2
    writer.discard()
    assert read_back(path) == before
    assert os.listdir(tmp_path) == [name]
    with (
        pytest.raises(VideoError, match="no frames"),
        VideoWriter(tmp_path / "b.mp4", 8),
    ):
        pass


def test_requests_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    for fps in (0, -8, float("nan"), float("inf")):
        with pytest.raises(OutputError, match=r"a\.mp4: .* frames per second"):
            write_video(path, moving(), fps=fps)
    with pytest.raises(VideoError, match=r"must have shape \[T, Y, X, 3\], not"):
        write_video(path, moving()[0], fps=8)
    with pytest.raises(OutputError, match=r"a\.avi: "):
        write_video(tmp_path / "a.avi", moving(), fps=8)
    assert os.listdir(tmp_path) == []
