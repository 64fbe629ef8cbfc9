"""``tpuport batch --ray local``: a real cluster of processes, some of them killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.batches.test_local import FLAGS, alone, records, write
from tests.cli.tools import Cli
from tpuport.cli.batches import cluster
from tpuport.core.files.run_lock import holder

#: Seconds for a cluster to start and a replica to import what it needs; and for all
#: videos, which took 316 beside two other loads. Nothing but a hang takes longer.
PATIENCE, LONG = 300.0, 1200.0


def wait_for(what: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    until = time.monotonic() + PATIENCE
    while not (found := what()):
        assert process.poll() is None, "the batch ended before it was killed"
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def steps(run_dir: Path) -> int:
    """Steps in the checkpoint of a run."""
    try:
        return int(json.loads((run_dir / "video-0/tape.json").read_text())["stepped"])
    except (OSError, ValueError):
        return 0


@pytest.mark.parametrize(
    "backend", ["diffusers", pytest.param("tpuport", marks=pytest.mark.sweep)]
)
def test_forty_requests_outlive_a_replica_and_the_driver(
    cli: Cli, cache: Path, folder: Path, tmp_path: Path, backend: str
) -> None:
    """A cluster starts twice, and 80 videos are made: more than 10 s."""
    sizes = ("32x16", "16x16", "48x32")
    lines: list[dict[str, Any]] = [
        {"prompt": f"fox {n}", "size": sizes[n % 3], "seed": n} for n in range(39)
    ]
    lines.insert(0, {"prompt": "long", "size": "32x16", "steps": 300, "id": "long"})
    lines = [line | {"backend": backend} for line in lines]
    asked = ["batch", write(*lines), "--out", "out", "--weights", folder, *FLAGS]
    asked += ["--ray", "local", "--replicas", "2", "--checkpoint-every", "1"]
    out = Path("out")
    run_dir, results = out / "runs/long", out / "results.jsonl"

    def of_another(before: int | None) -> int | None:
        number = holder(run_dir) if steps(run_dir) else None
        return number if number != before else None

    def count() -> int:
        return len(records(results)) if results.exists() else 0

    def start(said: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"TPUPORT_CACHE_DIR": str(cache)}
        command = [sys.executable, "-m", "tpuport", *map(str, asked), "--json"]
        with Path(f"{said}.out").open("wb") as o, Path(f"{said}.err").open("wb") as e:
            return subprocess.Popen(command, env=environment, stdout=o, stderr=e)

    driver = start("first")
    replica = wait_for(lambda: of_another(None), driver)
    os.kill(replica, signal.SIGKILL)
    reached = steps(run_dir)
    wait_for(lambda: of_another(replica), driver)
    assert steps(run_dir) >= reached
    wait_for(lambda: count() >= 5, driver)
    assert "its replica is gone" in Path("first.err").read_text()
    driver.kill()
    driver.wait()
    made = count()
    assert 5 <= made < 40

    assert start("second").wait(LONG) == 0, Path("second.err").read_text()
    document = json.loads(Path("second.out").read_text())
    assert (document["done"], document["failed"], document["replicas"]) == (40, 0, 2)
    assert document["made"] <= 40 - made
    said = Path("second.err").read_text()
    assert "going on with the run in" in said
    found = {record["line"]: record for record in records(results)}
    assert (len(found), count()) == (40, 40)
    assert len(list(out.glob("*.mp4"))) == 40
    assert not (out / "errors.jsonl").exists()
    for number, request in enumerate(lines, 1):
        name = f"alone-{number}.mp4"
        made_here = (out / found[number]["file"]).read_bytes()
        assert made_here == alone(cli, folder, request, name), request


def test_a_replica_holds_a_slice(tmp_path: Path) -> None:
    """Ray is told of two slices that are not there. A cluster starts: over 10 s."""
    ray = pytest.importorskip("ray")
    slice_ = cluster.slice_of("local", None, "v6e-8")

    class Small:
        def held(self) -> dict[str, float]:
            given = ray.get_runtime_context().get_assigned_resources()
            return {k: v for k, v in given.items() if "group" not in k and k != "CPU"}

    there = {"TPU": 8, "TPU-v6e-8-head": 1}
    ray.init(
        address="local",
        num_cpus=2,
        resources=there,
        include_dashboard=False,
        object_store_memory=80 << 20,
        logging_level="CRITICAL",
        log_to_driver=False,
    )
    try:
        first, second = (
            ray.remote(Small).options(**place).remote()
            for _ in range(2)
            for place in cluster.reserved(slice_).places
        )
        assert ray.get(first.held.remote(), timeout=PATIENCE) == {
            "TPU": 8.0,
            "TPU-v6e-8-head": 1.0,
        }
        waiting = second.held.remote()
        assert ray.wait([waiting], timeout=1)[0] == []  # one slice, one replica
        assert ray.available_resources().get("TPU", 0) == 0
    finally:
        ray.shutdown()


def test_a_replica_of_two_hosts_outlives_one_of_them(
    cli: Cli, cache: Path, folder: Path
) -> None:
    """A cluster starts, and twice two processes that compile: more than 10 s."""
    lines: list[dict[str, Any]] = [
        {"prompt": "long", "size": "32x16", "steps": 100, "id": "long"},
        {"prompt": "odd", "size": "20x20", "id": "odd"},
        {"prompt": "a fox", "size": "16x16", "seed": 3, "id": "fox"},
    ]
    file, out = write(*lines), Path("out")
    command = [sys.executable, "-m", "tpuport", "batch", str(file), "--out", "out"]
    command += ["--weights", str(folder), *FLAGS, "--checkpoint-every", "1", "--json"]
    command += ["--ray", "local", "--topology", "cpu-hosts-2", "--mesh", "sp=2"]
    one = "--xla_force_host_platform_device_count=1"
    environment = os.environ | {"TPUPORT_CACHE_DIR": str(cache)}
    environment["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} {one}"
    with Path("said").open("wb") as said, Path("told").open("wb") as told:
        driver = subprocess.Popen(command, env=environment, stdout=told, stderr=said)
    run_dir = out / "runs/long"
    wait_for(lambda: steps(run_dir) > 3, driver)
    first, *others = sorted(members(driver), key=lambda n: n != holder(run_dir))
    assert (first, len(others)) == (holder(run_dir), 1)
    os.kill(others[0], signal.SIGKILL)
    reached = steps(run_dir)
    assert driver.wait(LONG) == 1, Path("said").read_text()
    told_of = Path("said").read_text()
    assert "line 1: its replica is gone" in told_of or "died; tried again" in told_of
    found = re.search(r"going on with the run in .*long, after .*step (\d+)", told_of)
    assert found is not None, told_of
    assert int(found[1]) >= reached > 3
    document = json.loads(Path("told").read_text())
    assert (document["done"], document["failed"]) == (2, 1)
    (error,) = records(out / "errors.jsonl")
    assert error["key"] == "odd"
    for number, request in enumerate(lines[::2]):
        made = (out / f"{request['id']}.mp4").read_bytes()
        given = {**request, "mesh": "sp=2"}
        assert made == alone(cli, folder, given, f"{number}.mp4"), request


def members(driver: subprocess.Popen[bytes]) -> list[int]:
    """The processes of replicas of a batch's own cluster."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name = (place / "cmdline").read_bytes()
            if name.startswith(b"ray::Replica") and driver.pid in above(place):
                found.append(int(place.name))
    return found


def above(place: Path) -> list[int]:
    """The processes that started a process, the last one first."""
    number = int((place / "stat").read_text().rpartition(")")[2].split()[1])
    return [number, *(above(place.with_name(str(number))) if number > 1 else [])]
