"""Frames into a video: what is refused, where it goes, and what comes back."""

from __future__ import annotations

import gc
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.core.files.runs import NO_ROOM, failing
from tests.core.files.videos import kind_of, read_back, sound_of, write_video
from tpuport.core.files.encoders import encode
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.sealed_json import sidecar_bytes, sidecar_path
from tpuport.core.files.stores import StorePath
from tpuport.core.files.video_file import (
    LONGEST,
    VideoKind,
    VideoWriter,
    check_length,
    check_output,
    free_output,
    numbered,
    output_of,
)
from tpuport.errors import OutputError, UsageError, WriteError


def moving(count: int = 5, height: int = 32, width: int = 48) -> np.ndarray:
    """Bytes of shape [T, Y, X, 3]: a bar that moves over an orange ground."""
    frames = np.empty((count, height, width, 3), np.uint8)
    frames[:] = (200, 60, 30)
    for index in range(count):
        frames[index, :, 4 * index : 4 * index + 8] = (20, 180, 240)
    return frames


# --- where it goes


@pytest.mark.parametrize(
    ("out", "path", "kind"),
    [
        ("a.mp4", "a.mp4", "mp4"),
        ("a.GIF", "a.GIF", "gif"),
        ("b.c/a.webm", "b.c/a.webm", "webm"),
        ("photos", "photos.mp4", "mp4"),
        ("frames.v2/", "frames.v2", "png"),
    ],
)
def test_the_suffix_says_the_kind(out: str, path: str, kind: str) -> None:
    assert output_of(out) == (Path(path), kind)


def test_a_folder_without_a_slash_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    assert output_of("photos") == (Path("photos.mp4"), "mp4")


@pytest.mark.parametrize("name", ["a.avi", "a.png", "run-1.5"])
def test_an_unknown_suffix_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(OutputError, match=r"\.mp4, \.gif, \.webm, or a folder") as info:
        output_of(name)
    assert str(info.value).startswith(f"{name}: ")


def test_a_video_goes_to_a_store_and_no_other_address() -> None:
    video = StorePath("s3", "bucket/fox")
    assert output_of("s3://bucket/fox") == (video.with_name("fox.mp4"), "mp4")
    assert output_of("s3://bucket/fox/") == (video, "png")
    with pytest.raises(OutputError, match="names no video"):
        output_of("s3://bucket")
    with pytest.raises(UsageError, match="'https://a/fox' is no address of a known st"):
        output_of("https://a/fox")


@pytest.mark.parametrize("name", ["", "-", ".", "..", "/", "a/.."])
def test_what_names_no_video_is_refused_with_what_does(name: str) -> None:
    with pytest.raises(OutputError, match=r"such as fox\.mp4, .* such as frames/"):
        output_of(name)


def test_several_videos_are_numbered() -> None:
    def names(path: str, kind: Any, count: int) -> list[str]:
        return [str(one) for one in numbered(Path(path), kind, count)]

    assert names("o/a.mp4", "mp4", 1) == ["o/a.mp4"]
    assert names("o/a.mp4", "mp4", 2) == ["o/a-000.mp4", "o/a-001.mp4"]
    assert names("frames", "png", 2) == ["frames/000", "frames/001"]
    assert names("a.gif", "gif", 1001)[-1] == "a-1000.gif"


def test_checking_a_good_output_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_output(Path("a.mp4"), "mp4")
    check_output(Path("frames"), "png")
    (tmp_path / "old.mp4").touch()
    (tmp_path / "frames").mkdir()
    check_output(tmp_path / "old.mp4", "mp4")
    check_output(tmp_path / "new" / "deep" / "a.webm", "webm")
    check_output(tmp_path / "frames", "png")
    check_output(tmp_path / "more.frames", "png")
    assert sorted(os.listdir(tmp_path)) == ["frames", "old.mp4"]
    assert os.listdir(tmp_path / "frames") == []


def bad_output(path: Path) -> str:
    """The message that refuses ``path``: one line that starts with it."""
    with pytest.raises(OutputError) as caught:
        check_output(path, kind_of(path))
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
    monkeypatch.setattr(tempfile, "TemporaryFile", failing)
    with pytest.raises(WriteError, match="no room is left on the disk") as caught:
        check_output(path, "mp4")
    assert caught.value.exit_code == 1


def test_what_is_there_is_kept_and_the_next_name_is_free(tmp_path: Path) -> None:
    path = tmp_path / "fox.mp4"
    assert free_output(path, "mp4", overwrite=False) == path
    path.touch()
    (tmp_path / "fox-2.mp4.json").touch()  # a sidecar is kept as well
    (tmp_path / "fox-3.mp4").mkdir()
    assert free_output(path, "mp4", overwrite=False) == tmp_path / "fox-4.mp4"
    assert free_output(path, "mp4", overwrite=True) == path


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_others_is_never_taken(tmp_path: Path, overwrite: bool) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    assert free_output(folder, "png", overwrite=overwrite) == folder
    write_video(folder, moving(2), fps=8)
    # Frames without a sidecar, or with another's, or beside other files.
    assert free_output(folder, "png", overwrite=overwrite).name == "photos-2"
    output = {"file": "photos", "sha256": hash_output(folder)[0]}
    sidecar_path(folder).write_bytes(sidecar_bytes({"output": output}))
    assert free_output(folder, "png", overwrite=overwrite) == folder
    (folder / "notes.txt").touch()
    assert free_output(folder, "png", overwrite=overwrite).name == "photos-2"
    (folder / "notes.txt").unlink()
    (folder / "frame-99999.png").touch()
    (tmp_path / "photos-2").touch()
    assert free_output(folder, "png", overwrite=overwrite).name == "photos-3"
    shutil.rmtree(folder)
    assert free_output(folder, "png", overwrite=overwrite) == folder


@pytest.mark.parametrize(
    ("kind", "fps", "said"),
    [
        ("gif", 0.001, "9 frames at 0.001 fps last 9000 s, and .gif holds 655 s; ask"),
        (
            "mp4",
            1e-6,
            "last 9000000 s, and .mp4 holds 131071 s; ask for --fps 0.000073 or",
        ),
    ],
)
def test_a_video_longer_than_its_kind_can_hold_is_refused(
    kind: Any, fps: float, said: str
) -> None:
    with pytest.raises(OutputError, match=re.escape(said)):
        check_length(Path("a"), kind, 9, fps)
    check_length(Path("a"), kind, 9, 0.015 if kind == "gif" else 7.3e-5)
    check_length(Path("a"), "png", 9, fps)


@pytest.mark.parametrize("kind", ["gif", "mp4", "webm"])
def test_the_longest_video_of_a_kind_can_be_written(tmp_path: Path, kind: Any) -> None:
    """Of frames that are alike, which a gif makes one of; webm has no bound."""
    path, fps = tmp_path / f"a.{kind}", 9 / LONGEST.get(kind, 10**9)
    check_length(path, kind, 9, fps)
    write_video(path, np.repeat(moving(1), 9, axis=0), fps=fps)
    assert path.stat().st_size


# --- writing and reading back


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.gif", "frames"])
@pytest.mark.parametrize("count", [1, 5])
def test_what_is_written_comes_back(tmp_path: Path, name: str, count: int) -> None:
    path = tmp_path / "new" / name
    frames = moving(count)
    write_video(path, frames, fps=8)
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


def test_an_odd_mp4_is_padded_and_other_sizes_are_kept(tmp_path: Path) -> None:
    frames = moving(2, 31, 47)
    for name, size in [("a.mp4", (32, 48)), ("a.webm", (31, 47)), ("a.gif", (31, 47))]:
        write_video(tmp_path / name, frames, fps=8)
        assert read_back(tmp_path / name)[1:3] == size
    # Padded, not rescaled: the bar's edge stays at column 8.
    back = decoded(tmp_path / "a.mp4").astype(int)
    assert np.abs(back[0, 4:28, 12:46] - frames[0, 4:28, 12:46]).max() <= 6
    # Even, and off the macro block.
    write_video(tmp_path / "b.mp4", moving(2, 34, 50), fps=8)
    assert read_back(tmp_path / "b.mp4") == (2, 34, 50, 8.0)


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
    for count in (5, 2):
        write_video(folder, moving(count), fps=8)
    names = ["frame-00000.png", "frame-00001.png"]
    assert sorted(os.listdir(folder)) == names
    assert os.listdir(tmp_path) == ["frames"]
    back = np.stack([iio.imread(folder / name) for name in names])
    assert np.array_equal(back, moving(2))


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "frames"])
def test_a_failed_write_leaves_the_earlier_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / name
    write_video(path, moving(2), fps=8)
    before = read_back(path)
    # All is written by then.
    monkeypatch.setattr("tpuport.core.files.video_file.hash_output", failing)
    with pytest.raises(OutputError, match="no room is left"):
        write_video(path, moving(3), fps=8)
    assert read_back(path) == before
    assert os.listdir(tmp_path) == [name]


def test_a_rename_that_fails_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", failing)
    path = tmp_path / "a.gif"
    with pytest.raises(OutputError) as caught:
        write_video(path, moving(2), fps=8)
    assert str(caught.value) == f"{path}: {NO_ROOM}"
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


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "frames"])
def test_a_video_that_is_discarded_leaves_what_was_there(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    write_video(path, moving(2), fps=8)
    before = read_back(path)
    writer = VideoWriter(path, kind_of(path), 8)
    writer.write(moving(5) / 255, None, 0)
    assert read_back(path) == before
    assert len(os.listdir(tmp_path)) == 2
    writer.discard()
    assert read_back(path) == before
    assert os.listdir(tmp_path) == [name]


# --- a disk that is full


def noise() -> np.ndarray:
    """Frames that no encoder makes small."""
    random = np.random.default_rng(0)
    return random.integers(0, 256, (12, 64, 96, 3), dtype=np.uint8)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process or its encoders grows beyond 8 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.gif", "frames"])
def test_a_file_that_may_not_grow_is_one_line_and_leaves_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / name
    with pytest.raises(OutputError) as caught:
        write_video(path, noise(), fps=8)
    assert str(caught.value) == f"{path}: cannot be written: File too large"
    assert caught.value.exit_code == 1
    gc.collect()
    assert capfd.readouterr() == ("", "")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("kind", ["mp4", "webm", "gif", "png"])
def test_an_encoder_says_that_the_disk_is_full(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: Any
) -> None:
    file = tmp_path / ("frame-00000.png" if kind == "png" else f"a.{kind}")
    file.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        encode(kind, tmp_path if kind == "png" else file, list(noise()), 8)
    gc.collect()
    assert capfd.readouterr() == ("", "")


def test_no_video_goes_into_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="is a device or a pipe"):
        output_of(tmp_path / "pipe")


# --- sound

RATE = 16_000


def write_sound(path: Path, kind: VideoKind, *, channels: int) -> None:
    """A second of ten frames, with a tone of 440 Hz in each channel."""
    writer = VideoWriter(path, kind, 10)
    frames = np.random.default_rng(0).random((10, 32, 48, 3), np.float32)
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    writer.write(frames, np.tile(tone.astype(np.float32), (channels, 1)), RATE)
    writer.publish(path, replace=False)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_a_video_has_its_sound(kind: VideoKind, channels: int, tmp_path: Path) -> None:
    path = tmp_path / f"tone.{kind}"
    write_sound(path, kind, channels=channels)
    assert read_back(path)[:3] == (10, 32, 48)
    samples = sound_of(path, RATE).mean(axis=0)
    assert abs(len(samples) / RATE - 1) < 0.1
    loudest = np.abs(np.fft.rfft(samples)).argmax() * RATE / len(samples)
    assert abs(loudest - 440) < 5
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
