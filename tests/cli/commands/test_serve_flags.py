"""What ``tpuport serve`` says before it is ready."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.tools import Cli
from tests.processes import LONGEST


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--loras", "none"), "none: is no folder; name the folder of the LoRA files"),
        (("--loras", "."), "has no .safetensors file; put the LoRAs there"),
        (("--keep", "7"), "--keep: '7' is no time, such as 7d, 12h, 30m or 90s"),
        (("--shapes", "8x8"), "is no WIDTHxHEIGHTxFRAMES, such as 720x480x49"),
        (
            ("--api-key-file", "none"),
            "none does not exist; check the name",
        ),
        (("--host", "no.such.host."), "cannot be listened to"),
        (("--folder", __file__), "--folder " + __file__),
        (("--model", "x"), "--model: no model is called 'x'"),
        (("--weights", "./none"), "--weights: weights folder './none' does not exist"),
    ],
)
def test_a_wrong_value_is_one_line_that_says_what_to_do(
    cli: Cli, args: tuple[str, ...], said: str
) -> None:
    ran = cli.refused(said, "serve", *args)
    assert ran.err.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_ctrl_c_at_once_says_where_jobs_are_and_nothing_else(tmp_path: Path) -> None:
    """A terminal sends the signal to the server's own processes too."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tpuport", "serve", "--port", "0", "--folder", "kept"],
        cwd=tmp_path,
        env=os.environ | {"TPUPORT_CACHE_DIR": str(tmp_path / "cache")},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        # A shell has its background processes ignore Ctrl-C, and so their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("serving on ")
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=LONGEST)
    finally:
        process.kill()
        process.wait()
    word, kept = said.splitlines()
    assert word == "interrupted"
    assert kept.startswith(f"jobs are kept in {tmp_path}/kept; the same command")
    assert process.returncode == 128 + signal.SIGINT
