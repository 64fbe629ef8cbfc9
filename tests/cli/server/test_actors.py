"""Engines that are actors of a real Ray cluster on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.server.running import PATIENCE, running, until
from tests.cli.tools import Cli
from tpuport.cli.asked.settings import Settings
from tpuport.cli.batches.cluster import Slice
from tpuport.cli.batches.requests import request_of
from tpuport.cli.server.actors import RayEngine, _check_shared, ray_engines
from tpuport.cli.server.messages import Ended, Gone, Make, Opened, Stop, Told
from tpuport.core.files.run_lock import holder
from tpuport.core.run.progress import Display
from tpuport.errors import UsageError

FLAGS = ("--size", "32x16", "--frames", "5", "--option", "max_sequence_length=16")
STEPS = 100


class Heard:
    """What an engine tells, in order."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def next(self, kind: type) -> Any:
        """The next message of a kind; others before are dropped."""
        while True:
            found = self.inbox.get(timeout=PATIENCE)
            if isinstance(found, kind):
                return found
            assert not isinstance(found, Gone | Ended), found


@contextlib.contextmanager
def engine(make: Any) -> Iterator[tuple[RayEngine, Heard]]:
    heard = Heard()
    made = make(heard.inbox.put)
    try:
        yield made, heard
    finally:
        made.close()


def kept(run_dir: Path) -> int:
    """Steps of the checkpoint, which is written beside the steps that follow."""
    found = [json.loads(file.read_text()) for file in run_dir.rglob("tape.json")]
    return max((tape["stepped"] for tape in found), default=0)


def kill_holder(run_dir: Path) -> None:
    process = holder(run_dir)
    assert process, "nothing runs"
    os.kill(process, signal.SIGKILL)


def test_an_actor_makes_stops_and_goes_on(
    cli: Cli, folder: Path, cache: Path, tmp_path: Path
) -> None:
    """A cluster starts, and three actors import torch and jax: more than 10 s."""
    ray = pytest.importorskip("ray")
    below = Settings(weights=folder, cache_dir=cache)
    own: dict[str, Any] = {
        "prompt": "a fox",
        "size": "32x16",
        "num_frames": 5,
        "out": "video-0.mp4",
    }
    own |= {"option": {"max_sequence_length": 16}, "checkpoint_every": 1}

    def asked(job: str, steps: int) -> Make:
        place = tmp_path / job
        place.mkdir(exist_ok=True)
        values = {**own, "num_inference_steps": steps}
        request = request_of(0, values, "request", place, below)
        settings = replace(request.settings, run_dir=place / "run-0")
        return Make(job=job, packs=((replace(request, settings=settings),),))

    def step(heard: Heard) -> int:
        while not (told := heard.next(Told)).done or told.what != "denoise":
            pass
        return int(told.done)

    with ray_engines("local", 2, Slice(), tmp_path, Display(), debug=False) as (
        first,
        second,
    ):
        with engine(first) as (one, heard), engine(second) as (_, of_other):
            heard.next(Opened)
            of_other.next(Opened)
            one.send(asked("stopped", STEPS))
            assert step(heard) < STEPS
            one.send(Stop("stopped"))
            assert heard.next(Ended) == Ended(job="stopped", stopped=True)
            one.send(asked("fox", STEPS))
            run_dir = tmp_path / "fox/run-0"
            until(lambda: step(heard) > 5 and kept(run_dir) > 5)
            kill_holder(run_dir)
            with pytest.raises(AssertionError, match="Gone"):
                heard.next(Ended)
        with engine(first) as (one, heard):
            heard.next(Opened)
            one.send(asked("fox", STEPS))
            assert step(heard) > 5
            ended = heard.next(Ended)
        assert (ended.error, set(ended.result["stages"]) >= {"decode"}) == ("", True)
        with pytest.raises(UsageError, match=r"--folder .*gone: .* does not see it"):
            _check_shared(ray, tmp_path / "gone/file", "CPU")
    flags = ("--weights", folder, *FLAGS, "--steps", str(STEPS), "--prompt", "a fox")
    cli.good("generate", *flags, "--out", "alone.mp4")
    made = (tmp_path / "fox/video-0.mp4").read_bytes()
    assert made == (tmp_path / "alone.mp4").read_bytes()


def test_a_server_with_two_replicas_outlives_one(
    cli: Cli, cache: Path, folder: Path, tmp_path: Path
) -> None:
    """A cluster starts, and three actors import and compile: more than 10 s."""
    flags = (
        *("--weights", folder, *FLAGS, "--steps", "2", "--folder", "kept"),
        *("--checkpoint-every", "1", "--ray", "local", "--replicas", "2"),
    )
    environment = {"TPUPORT_CACHE_DIR": str(cache)}
    with running(tmp_path, *flags, environment=environment) as server:

        def engines() -> int:
            return int(server.ask("/ready")[1]["engines"]["ready"])

        until(lambda: engines() == 2)
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
