"""Engines that are actors of a real Ray cluster on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.cli.server.running import running, until
from tests.cli.tools import Cli
from tpuport.cli.batches.cluster import Slice, joined
from tpuport.cli.server.actors import _check_shared
from tpuport.core.files.run_lock import holder
from tpuport.core.run.progress import Display
from tpuport.errors import UsageError

FLAGS = ("--size", "32x16", "--frames", "5", "--option", "max_sequence_length=16")
STEPS, MANY = 100, 5000


def kept(run_dir: Path) -> int:
    """Steps of the checkpoint, which is written beside the steps that follow."""
    found = [json.loads(file.read_text()) for file in run_dir.rglob("tape.json")]
    return max((tape["stepped"] for tape in found), default=0)


def kill_holder(run_dir: Path) -> None:
    process = holder(run_dir)
    assert process, "nothing runs"
    os.kill(process, signal.SIGKILL)


def test_a_folder_that_a_host_does_not_see_is_refused(tmp_path: Path) -> None:
    """A cluster starts: more than 10 s."""
    pytest.importorskip("ray")
    with joined("local", 1, Slice(), Display(), debug=False) as (ray, _):
        _check_shared(ray, tmp_path, "CPU")
        with pytest.raises(UsageError, match=r"--folder .*gone: .* does not see it"):
            _check_shared(ray, tmp_path / "gone/file", "CPU")


def test_a_server_with_two_replicas_outlives_one(
    cli: Cli, cache: Path, folder: Path, tmp_path: Path
) -> None:
    """A cluster starts, and three actors import and compile: more than 10 s.

    A job that is deleted stops, and its actor makes the next one.
    """
    flags = (
        *("--weights", folder, *FLAGS, "--steps", "2", "--folder", "kept"),
        *("--checkpoint-every", "1", "--ray", "local", "--replicas", "2"),
        *("--max-steps", str(MANY)),
    )
    environment = {"TPUPORT_CACHE_DIR": str(cache)}
    with running(tmp_path, *flags, environment=environment) as server:

        def engines() -> int:
            return int(server.ask("/ready")[1]["engines"]["ready"])

        until(lambda: engines() == 2)
        long = server.create(prompt="a cat", num_inference_steps=MANY)
        until(lambda: server.job(long)["tpuport"]["step"] > 3)
        server.ask(f"/v1/videos/{long}", method="DELETE")
        until(lambda: not (tmp_path / "kept/jobs" / long).exists())
        assert engines() == 2
        asked = {"prompt": "a fox", "num_inference_steps": STEPS}
        names = [server.create(**asked, seed=seed) for seed in (5, 6)]

        def steps() -> list[int]:
            jobs = [server.job(name) for name in names]
            assert all(job["status"] == "in_progress" for job in jobs[:1])
            return [job["tpuport"]["step"] for job in jobs]

        until(lambda: min(steps()) > 3)  # both at once
        run_dir = tmp_path / f"kept/jobs/{names[0]}/run-0"
        until(lambda: kept(run_dir) > 3)
        kill_holder(run_dir)
        for name in names:
            assert server.done(name)["status"] == "completed", server.said
        found = re.search(
            r"going on with the run in .*, after .*step (\d+)", server.said
        )
        assert found is not None, server.said
        assert 3 <= int(found[1]) < STEPS
        videos = [server.video(name) for name in names]
        until(lambda: engines() == 2)
        assert server.end() == 128 + 15, server.said
    for seed, video in zip((5, 6), videos, strict=True):
        own = ("--prompt", "a fox", "--steps", str(STEPS), "--seed", str(seed))
        cli.good("generate", "--weights", folder, *FLAGS, *own, "--out", f"{seed}.mp4")
        assert video == Path(f"{seed}.mp4").read_bytes()
