"""One cache folder and one generated run, shared by the tests of the command line."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.cli.tools import SMALL, Cli, Made, Ran, call
from tests.processes import Once


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
def cache(made: Made) -> Path:
    """A cache folder that all runs share, after the one that compiles first."""
    return made.cache


@pytest.fixture
def cli(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """``tpuport`` in an empty current folder, with the shared cache folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUPORT_CACHE_DIR", str(cache))
    return call


@pytest.fixture(scope="session")
def made(once: Once, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """``tpuport generate`` of two prompts; every test process has its own cache."""

    def generate(folder: Path) -> None:
        ran = call(
            "generate",
            *("--prompt", "a panda", "--prompt", "a fox", "--seed", "7"),
            *SMALL,
            *("--negative-prompt", "blurry", "--run-dir", folder / "run"),
            *("--out", folder / "video.mp4", "--cache-dir", folder / "cache", "--json"),
            *("--report", folder / "new" / "report.json"),
        )
        assert ran.code == 0, ran.err
        (folder / "ran.json").write_text(json.dumps(asdict(ran)))

    folder = once("generated", generate)
    ran = Ran(**json.loads((folder / "ran.json").read_text()))
    cache = shutil.copytree(folder / "cache", tmp_path_factory.mktemp("own") / "cache")
    return Made(ran, folder, folder / "run", Path(cache))


@pytest.fixture
def run(made: Made, tmp_path: Path) -> Path:
    """A copy of the finished run directory, as on another machine."""
    return Path(shutil.copytree(made.run, tmp_path / "copied-run"))


@pytest.fixture
def weights(made: Made, cache: Path, tmp_path: Path) -> Path:
    """A copy of the demo checkpoint, to be damaged."""
    # Not of another variant, which other tests make.
    (demo,) = (cache / "demo").glob("cogvideox-demo-[0-9]*")
    return Path(shutil.copytree(demo, tmp_path / "weights"))


@pytest.fixture(scope="session")
def folder(once: Once) -> Path:
    """A pipeline in the layout that ``save_pretrained`` writes."""
    from tests.pipelines.example import all_examples, made, saved

    def write(folder: Path) -> None:
        saved(made(all_examples()["WanPipeline"])[0], folder / "pipeline")

    return once("wan", write) / "pipeline"
