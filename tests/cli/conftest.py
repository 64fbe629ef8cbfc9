"""One cache folder and one small pipeline, shared by the tests of the command line."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.cli.tools import UPSTREAM, Cli, Made, Ran, call, example, forget_stores
from tests.processes import Once
from tpuport.core.spec.run_settings import COMPILED


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """A command sets environment variables and log levels for its process."""
    environment = dict(os.environ)
    names = ("absl", "jax", "torchax", "torch", "imageio", "imageio_ffmpeg", "gcsfs")
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    os.environ.clear()
    os.environ.update(environment)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Path:
    """A cache folder that all commands of a test process share.

    Its compiled programs are those of all test processes.
    """
    folder, programs = tmp_path_factory.mktemp("cache"), cache_dir / COMPILED
    programs.mkdir(exist_ok=True)
    (folder / COMPILED).symlink_to(programs)
    return folder


@pytest.fixture(autouse=True)
def _no_runs(cache: Path) -> None:
    """A test begins without the runs that others kept."""
    shutil.rmtree(cache / "runs", ignore_errors=True)


@pytest.fixture
def cli(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """``tpuport`` in an empty current folder, with the shared cache folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUPORT_CACHE_DIR", str(cache))
    return call


@pytest.fixture(scope="session")
def folder(once: Once) -> Path:
    """A pipeline in the layout that ``save_pretrained`` writes."""
    return example(once, "WanPipeline")


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """The pipeline, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "copied"))


@pytest.fixture(scope="session")
def made(once: Once, folder: Path) -> Made:
    """``tpuport generate`` of two prompts by upstream's own code, kept in a folder."""

    def generate(place: Path) -> None:
        ran = call.good(
            *("generate", "--weights", folder, *UPSTREAM, "--prompt", "a cat"),
            *("--seed", "7", "--run-dir", place / "run", "--out", place / "fox.gif"),
            *("--weights-on", "chip"),
            *("--cache-dir", place / "cache", "--report", place / "new/report.json"),
            "--json",
        )
        (place / "ran.json").write_text(json.dumps(asdict(ran)))

    place = once("generated", generate)
    return Made(Ran(**json.loads((place / "ran.json").read_text())), place)


@pytest.fixture
def run(made: Made, tmp_path: Path) -> Path:
    """A copy of the finished run's folder, as on another machine."""
    return Path(shutil.copytree(made.folder / "run", tmp_path / "copied-run"))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket of S3, as moto serves it; the environment says where."""
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    # What moto holds is the process's, whichever server was asked.
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
    forget_stores()
    found = s3fs.S3FileSystem(use_listings_cache=False)
    found.mkdir("bucket")
    yield found
    forget_stores()
    server.stop()


@pytest.fixture
def sidecar(made: Made, tmp_path: Path) -> Path:
    """A copy of the second of two videos in the current folder: its JSON."""
    video = made.videos[1]
    shutil.copy(video, tmp_path / "fox.gif")
    return Path(shutil.copy(f"{video}.json", tmp_path / "fox.gif.json"))
