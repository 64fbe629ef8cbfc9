"""One cache folder and one small pipeline, shared by the tests of the command line."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.tools import Cli, call
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
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that all commands of a test process share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cli(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """``tpuport`` in an empty current folder, with the shared cache folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUPORT_CACHE_DIR", str(cache))
    return call


@pytest.fixture(scope="session")
def folder(once: Once) -> Path:
    """A pipeline in the layout that ``save_pretrained`` writes."""
    from tests.pipelines.example import all_examples, made, saved

    def write(folder: Path) -> None:
        saved(made(all_examples()["WanPipeline"])[0], folder / "pipeline")

    return once("wan", write) / "pipeline"


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """The pipeline, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "copied"))
