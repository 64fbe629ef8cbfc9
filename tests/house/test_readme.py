"""The README's commands and code run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


COMMANDS = [line for block in blocks("console") for line in block.splitlines()]
MAKE = [c for c in COMMANDS if c.startswith("make ")]
TPUPORT = [c for c in COMMANDS if c.startswith("tpuport ")]


def test_the_first_two_commands_are_make_demo_and_make_test() -> None:
    assert COMMANDS[:2] == MAKE == ["make demo", "make test"]
    assert set(COMMANDS) == set(MAKE) | set(TPUPORT)


def make(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """With programs compiled as they are for users."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    return subprocess.run(
        ["make", "-C", str(ROOT), *args],
        env=os.environ | flags | variables,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


def test_make_demo_leaves_a_playable_video(tmp_path: Path, cache_dir: Path) -> None:
    """Over 10 s: imports and programs as a user's first command has them."""
    import imageio.v3 as iio

    out = tmp_path / "demo.mp4"
    # -o: this environment stands for the one that make would set up.
    stamp = f"{sys.prefix}/.tpuport-installed"
    asked = ("demo", f"VENV={sys.prefix}", f"DEMO_OUT={out}", "-o", stamp)
    done = make(*asked, TPUPORT_CACHE_DIR=str(cache_dir))
    assert done.returncode == 0, done.stderr
    assert iio.imread(out).shape == (17, 128, 128, 3)


def test_make_test_runs_lint_types_and_tests() -> None:
    stamp = f"{sys.prefix}/.tpuport-installed"
    done = make("-n", "test", f"VENV={sys.prefix}", "-o", stamp)
    assert done.returncode == 0, done.stderr
    for tool in ("ruff check", "ruff format --check", "mypy", "pytest"):
        assert tool in done.stdout
    assert "pip" not in done.stdout


def test_the_commands_run_in_order(tmp_path: Path) -> None:
    """Four minutes: both demos run and are timed, in a process for each command."""
    assert len(TPUPORT) >= 8
    environment = os.environ | {"TPUPORT_CACHE_DIR": str(tmp_path / "cache")}
    for command in TPUPORT:
        done = run_python(
            ["-m", *shlex.split(command)],
            environment=environment,
            folder=tmp_path,
        )
        assert done.returncode == 0, (command, done.stderr)
    made = {p.name for p in tmp_path.iterdir()}
    assert {"circle.gif", "circle.gif.json", "fox", "fox.mp4", "fox.mp4.json"} <= made


def test_the_python_example_runs(
    demo_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo's folder stands for the checkpoint, which no test fetches."""
    (example,) = blocks("python")
    assert example.count("THUDM/CogVideoX-5b") == 1
    example = example.replace("THUDM/CogVideoX-5b", str(demo_folder))
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == ["(1, 9, 64, 96, 3)"]
