"""Where the videos of a run go; a video and its sidecar appear together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.core.files.runs import NO_ROOM, failing
from tests.core.files.videos import read_back
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.outputs import Video, check_no_input, plan_outputs
from tpuport.core.files.sealed_json import read_sidecar, sidecar_path
from tpuport.core.files.video_file import VideoWriter
from tpuport.errors import OutputError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def frames(value: int) -> np.ndarray:
    """[T, Y, X, 3] of two greys; a gif makes one frame of two that are alike."""
    made = np.full((2, 32, 32, 3), value / 255, np.float32)
    made[1] += 40 / 255
    return made


def describe(index: int, output: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "output": dict(output)}


def make(out: str, value: int, count: int = 1, **how: Any) -> list[Video]:
    """Videos that ``value`` tells apart."""
    outputs = plan_outputs(out, count, **how)
    with outputs.writers(8) as writers:
        for writer in writers:
            writer.write(frames(value), None, 0)
        return outputs.publish(writers, describe)


# --- what is there


def test_frames_of_an_earlier_run_are_replaced_and_those_of_others_kept() -> None:
    make("photos/", 10)
    assert [str(v.path) for v in make("photos/", 20)] == ["photos"]
    mine = Path("photos/frame-99999.png")
    mine.touch()
    for overwrite in (False, True):
        outputs = plan_outputs("photos/", 1, overwrite=overwrite)
        assert outputs.paths == (Path("photos-2"),)
        assert "which is kept" in outputs.remarks()[0]
    assert mine.exists()


def test_a_name_taken_meanwhile_is_left_to_who_took_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = VideoWriter.publish

    def publish(self: VideoWriter, path: Path, *, replace: bool) -> None:
        if path.name == "fox.gif":
            path.write_text("of another process")
        whole(self, path, replace=replace)

    monkeypatch.setattr(VideoWriter, "publish", publish)
    (video,) = make("fox.gif", 10)
    assert video.path == Path("fox-2.gif")
    assert video.data["output"]["file"] == "fox-2.gif"
    assert Path("fox.gif").read_text() == "of another process"
    assert not Path("fox.gif.json").exists()


# --- what is read


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("out", "read"),
    [
        ("in.gif", "in.gif"),
        ("link.gif", "in.gif"),
        ("src/", "src/frame-00008.png"),
        ("in", "in.mp4"),
        ("fox.gif", "fox.gif.json"),
        ("src/old.gif", "src"),
        ("new/", "new/run.json"),
    ],
)
def test_no_output_is_an_input(out: str, read: str, overwrite: bool) -> None:
    Path("src").mkdir()
    Path("in.gif").touch()
    Path("src/old.gif").touch()
    Path("link.gif").symlink_to("in.gif")
    with pytest.raises(OutputError, match=r"which the run reads; choose another name"):
        plan_outputs(out, 1, inputs=[Path(read)], overwrite=overwrite)


def test_an_output_beside_an_input_is_none() -> None:
    plan_outputs("src/out.gif", 1, inputs=[Path("src"), Path("src/in.gif")])
    check_no_input(Path("report.json"), [Path("in.gif")], "--report")


# --- the pair


@pytest.mark.parametrize("out", ["fox.gif", "frames/"])
def test_a_reader_never_sees_a_video_beside_the_sidecar_of_another(
    monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    """Looked at after every change of a name, which is where a kill may come."""
    (first,) = make(out, 10)
    seen: list[str] = []

    def pair() -> str:
        there = (first.path.exists(), first.sidecar.exists())
        if there != (True, True):
            return f"video {there[0]}, sidecar {there[1]}"
        recorded = read_sidecar(first.sidecar)["output"]["sha256"]
        assert recorded == hash_output(first.path)[0]
        return "earlier" if recorded == first.data["output"]["sha256"] else "new"

    def watch(name: str) -> None:
        whole = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            done = whole(*args, **options)
            seen.append(pair())
            return done

        monkeypatch.setattr(os, name, call)

    for name in ("replace", "rename", "link", "unlink"):
        watch(name)
    make(out, 20, overwrite=True)
    assert "video True, sidecar False" in seen
    assert seen[-1] == "new"


@pytest.mark.parametrize("out", ["fox.gif", "frames/"])
def test_a_sidecar_that_cannot_be_written_leaves_no_video(
    monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        return failing() if path.suffix == ".tmp" else write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError) as caught:
        make(out, 10)
    said = f"{sidecar_path(Path(out))}: {NO_ROOM}"
    assert str(caught.value) == said
    assert caught.value.exit_code == 1
    assert os.listdir() == []


@pytest.mark.parametrize("out", ["new/deep/v.gif", "new/deep/"])
def test_a_run_that_fails_leaves_no_new_folders(out: str) -> None:
    with plan_outputs(out, 2).writers(8) as writers:
        writers[0].write(frames(0), None, 0)
        assert Path("new/deep").is_dir()
    assert os.listdir() == []


def test_videos_are_those_that_were_taken() -> None:
    for index, video in enumerate(make("fox.gif", 10, count=2)):
        assert read_back(video.path)[:3] == (2, 32, 32)
        assert read_sidecar(video.sidecar) == video.data
        output = video.data["output"]
        assert video.data["index"] == index
        assert (output["sha256"], output["bytes"]) == hash_output(video.path)
