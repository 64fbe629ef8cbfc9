"""``--preview``: frames beside the video, or in the terminal, while steps run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.tools import UPSTREAM, Cli
from tpuport.cli.runs import previewed
from tpuport.core.preview import previews
from tpuport.core.preview.previews import PreviewsBeside
from tpuport.core.reports import Reporter
from tpuport.core.run.progress import Display

ASKED = (*UPSTREAM[:7], "6", *UPSTREAM[8:])


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is shown; each step waits until its frames are, and the next may come."""
    found: list[Any] = []
    there = threading.Event()
    monkeypatch.setattr(previews, "_PAUSE", 0.0)
    monkeypatch.setattr(previews, "SHARE", 1e9)
    write = previewed._InFiles.__call__

    def written(self: Any, frames: np.ndarray) -> None:
        write(self, frames)
        found.append((self._files[0], np.asarray(Image.open(self._files[0]))))
        there.set()

    def drawn(self: Any, text: str, rows: int) -> None:
        found.append(text)
        there.set()

    stepped = PreviewsBeside._stepped

    def waits(self: Any, latents: Any) -> None:
        there.clear()
        stepped(self, latents)
        assert not self._wanted() or self._over or there.wait(60)
        while self._free_at > 1e300:
            threading.Event().wait(0.001)

    monkeypatch.setattr(previewed._InFiles, "__call__", written)
    monkeypatch.setattr(Display, "picture", drawn)
    monkeypatch.setattr(PreviewsBeside, "_stepped", waits)
    return found


def test_a_file_beside_the_video_while_steps_run(
    cli: Cli, folder: Path, cache: Path, shown: list[Any]
) -> None:
    """The video has the bytes of a run without; the file is gone at the end."""
    asked = ("--weights", folder, *ASKED)
    cli.good("generate", *asked, "--out", "plain.gif")
    kept = Path("new/fox.preview.png")
    kept.parent.mkdir()
    kept.write_text("mine")
    ran = cli.good("generate", *asked, "--out", "new/fox.gif", "--preview", "--json")
    place = Path("new/fox.preview-2.png")
    assert [file for file, _ in shown] == [place] * 6
    assert ran.err.count(f"preview: {place}") == 1
    pictures = [picture for _, picture in shown]
    assert not np.array_equal(pictures[0], pictures[-1])
    assert not place.exists()
    assert kept.read_text() == "mine"
    assert Path("new/fox.gif").read_bytes() == Path("plain.gif").read_bytes()
    assert len(list((cache / "previews").iterdir())) == 1


def test_stages_show_their_steps_alone(
    cli: Cli, folder: Path, shown: list[Any]
) -> None:
    """A run that goes on shows the last of the steps that it is given back."""
    cli.good("encode", "--weights", folder, *ASKED, "--run-dir", "run")
    cli.good("denoise", "--run-dir", "run", "--backend", "diffusers", "--preview")
    assert [file for file, _ in shown] == [Path("run/denoise.preview.png")] * 6
    cli.good("resume", "run", "--out", "fox.gif", "--preview")
    assert [file for file, _ in shown[6:]] == [Path("fox.preview.png")]
    assert np.array_equal(shown[6][1], shown[5][1])


def test_a_terminal_that_shows_pictures_needs_no_file(
    cli: Cli, folder: Path, shown: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(previewed, "drawing_here", lambda: previewed_kitty)
    monkeypatch.setattr(previewed, "window_here", lambda: (40, 100, 1000, 800))
    cli.good("generate", "--weights", folder, *ASKED, "--out", "fox.gif", "--preview")
    assert shown == ["12 rows"] * 6
    assert not list(Path().glob("*.png"))


def previewed_kitty(picture: np.ndarray, place: Any) -> str:
    return f"{place.rows} rows"


def test_each_video_of_a_call_has_a_file_of_its_own(tmp_path: Path) -> None:
    a, b = tmp_path / "a/x.png", tmp_path / "b/x.png"
    frames = np.zeros((6, 2, 2, 3), np.uint8)  # two frames of each of three videos
    frames[:2], frames[2:4], frames[4:] = 10, 20, 30
    previewed._InFiles((a, b, a), Reporter())(frames)
    found = [np.unique(np.asarray(Image.open(file))).tolist() for file in (a, b)]
    assert found == [[10, 30], [20]]
