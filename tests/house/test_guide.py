"""The commands of docs/port-a-model.md run as they stand, on built packages."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.tools import call
from tpuport import plugins

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/port-a-model.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```console\n(.*?)```", TEXT, flags=re.DOTALL)
    for line in block.splitlines()
]


def install(source: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip does: build a wheel and put its files where Python looks."""
    build = place / source.name
    shutil.copytree(source, build / "source")
    command = ("-m", "build", "--wheel", "--no-isolation", "--outdir", str(build))
    subprocess.run(
        [sys.executable, *command, str(build / "source")],
        check=True,
        capture_output=True,
    )
    (wheel,) = build.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(build / "site")
    monkeypatch.syspath_prepend(str(build / "site"))
    plugins.installed_plugins.cache_clear()


@pytest.fixture(autouse=True)
def _plugins_are_found_again() -> Iterator[None]:
    yield
    plugins.installed_plugins.cache_clear()


def test_the_commands_run_in_order(
    tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of a minute: a video is made, and a new package is checked."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("TPUPORT_CACHE_DIR", str(cache_dir))
    assert len(COMMANDS) == 5
    for command in COMMANDS:
        program, *arguments = shlex.split(command)
        if program == "pip":
            name = arguments[-1]
            source = work / name if (work / name).exists() else ROOT / name
            install(source, tmp_path, monkeypatch)
            continue
        assert program == "tpuport"
        ran = call(*arguments)
        assert ran.code == 0, (command, ran.err)
    assert (work / "fox.gif").is_file()


def test_the_guide_is_short() -> None:
    assert len(TEXT.splitlines()) <= 120
