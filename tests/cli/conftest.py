"""One cache folder and one generated run, shared by the tests of the command line."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tpuport.cli import main

#: The smallest video of the demo checkpoint that has more than one step.
SMALL = ("--size", "96x64", "--frames", "9", "--steps", "2")


@dataclass(frozen=True)
class Ran:
    """What one call of ``main`` did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.out)

    @property
    def last(self) -> str:
        """The last line for people."""
        return self.err.strip().splitlines()[-1]


Cli = Callable[..., Ran]


def call(*args: str | Path) -> Ran:
    """``tpuport ARGS`` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(arg) for arg in args])
    return Ran(code, out.getvalue(), err.getvalue())


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """A command sets environment variables and log levels for its process."""
    environment = dict(os.environ)
    names = ("absl", "jax", "torchax", "torch", "imageio", "imageio_ffmpeg")
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    os.environ.clear()
    os.environ.update(environment)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that all runs share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cli(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """``tpuport`` in an empty current folder, with the shared cache folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUPORT_CACHE_DIR", str(cache))
    return call


@dataclass(frozen=True)
class Made:
    """A finished run of two prompts with one seed."""

    ran: Ran
    folder: Path
    run: Path

    @property
    def videos(self) -> list[Path]:
        return [Path(video["path"]) for video in self.ran.json["videos"]]


@pytest.fixture(scope="session")
def made(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """``tpuport generate`` of two prompts, run once for the whole session."""
    folder = tmp_path_factory.mktemp("made")
    run = folder / "run"
    ran = call(
        "generate",
        *("--prompt", "a panda", "--prompt", "a fox", "--seed", "7"),
        *SMALL,
        *("--negative-prompt", "blurry", "--run-dir", run),
        *("--out", folder / "video.mp4", "--cache-dir", cache, "--json"),
    )
    assert ran.code == 0, ran.err
    return Made(ran, folder, run)


@pytest.fixture
def run(made: Made, tmp_path: Path) -> Path:
    """A copy of the finished run directory, as on another machine."""
    return Path(shutil.copytree(made.run, tmp_path / "copied-run"))


@pytest.fixture
def weights(made: Made, cache: Path, tmp_path: Path) -> Path:
    """A copy of the demo checkpoint, to be damaged."""
    (demo,) = (cache / "demo").glob("cogvideox-*")
    return Path(shutil.copytree(demo, tmp_path / "weights"))
