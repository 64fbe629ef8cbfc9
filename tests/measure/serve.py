"""A server under a fuzzer, and the price of its answers for a video that is made.

``python -m tests.measure.serve`` starts a server of the demo and sends the requests of
tests/measure/fuzz.py: it tells of answers, faults and memory. Then it makes pairs of
videos, one of each with requests at a steady rate, and compares their steps. With
``--videos`` many follow, one after the other; jobs are kept for a minute.

With ``--apart`` the engine has the last core of this machine to itself, as a device has
its own processor; without, the engine's steps and the answers share all cores.
"""

from __future__ import annotations

import argparse
import http.client
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cli.server.running import Running, running, until
from tests.measure.fuzz import Found, fuzz

#: Seconds that a client waits for an answer.
_PATIENCE = 30.0


def resident(pid: int) -> float:
    """MiB of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def children(pid: int) -> list[int]:
    """The processes that all threads of a process have started, oldest first."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(n) for t in tasks for n in (t / "children").read_text().split())


class Watched:
    """The memory of a server, of its checks and of its engine, in MiB."""

    def __init__(self, server: Running) -> None:
        pid = server.process.pid
        # Beside the two is Python's process that tracks semaphores.
        large = [one for one in children(pid) if resident(one) > 100]
        assert len(large) == 2, large
        self.pids = (pid, *large)
        self.engine = large[1]

    @property
    def memory(self) -> str:
        """In words."""
        names = ("server", "checks", "engine")
        held = zip(names, map(resident, self.pids), strict=True)
        return ", ".join(f"{name} {mib:.1f}" for name, mib in held) + " MiB"

    def part(self) -> None:
        """Give the engine a core of its own, and all others to the rest."""
        cores = sorted(os.sched_getaffinity(0))
        for pid in (os.getpid(), *self.pids):
            own = cores[-1:] if pid == self.engine else cores[:-1]
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), own)


def _ask_steadily(port: int, rate: int, name: str, over: threading.Event) -> list[int]:
    """Ask for a job, for the list and for figures; tells answers and failures."""
    counts = [0, 0]
    paths = (f"/v1/videos/{name}", "/v1/videos?limit=5", "/health", "/metrics")

    def client(number: int, each: float) -> None:
        own = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
        due = time.monotonic()
        while not over.is_set():
            own.request("GET", paths[number % len(paths)])
            answer = own.getresponse()
            answer.read()
            counts[answer.status != 200] += 1
            due += each
            time.sleep(max(due - time.monotonic(), 0))

    clients = 4
    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(client, n, clients / rate) for n in range(clients)]:
            done.result()
    return counts


def steps_of(server: Running, steps: int, rate: int) -> tuple[float, float]:
    """Seconds of a step of one video, and answers a second meanwhile."""
    name = server.create(prompt="a fox", num_inference_steps=steps)
    over, found = threading.Event(), []
    began = time.monotonic()

    def ask() -> None:
        found.append(_ask_steadily(server.port, rate, name, over))

    thread = threading.Thread(target=ask)
    if rate:
        thread.start()
    while server.job(name)["status"] not in ("completed", "failed"):
        time.sleep(0.5)
    over.set()
    if rate:
        thread.join()
        assert found[0][1] == 0, "a request failed"
    passed = time.monotonic() - began
    stages = server.job(name)["tpuport"]["stages"]
    server.ask(f"/v1/videos/{name}", method="DELETE")
    return stages["denoise"] / steps, (found[0][0] / passed if rate else 0.0)


def pairs(server: Running, count: int, steps: int, rate: int) -> None:
    """Compare the steps of videos with those of videos while requests are answered."""
    ratios = []
    for number in range(count):
        rates = (0, rate) if number % 2 else (rate, 0)
        took = {rate: steps_of(server, steps, rate) for rate in rates}
        (busy, answers), (alone, _) = took[rate], took[0]
        ratios.append(busy / alone)
        text = f"a step: {alone:.5f} s alone, {busy:.5f} s with {answers:.0f} answers a"
        print(f"{text} second, ratio {ratios[-1]:.4f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.4f}", flush=True)


def many(server: Running, count: int, keep: float) -> None:
    """Make videos, one after the other; tell of memory and of files that are left."""
    watched, part, began = Watched(server), max(count // 20, 1), time.monotonic()
    jobs = server.log.parent / "kept/jobs"
    for number in range(1, count + 1):
        name = server.create(prompt=f"fox {number}", num_inference_steps=1)
        assert server.done(name, pause=0.02)["status"] == "completed"
        if number % part == 0 or number == 1:
            places = len(list(jobs.glob("*")))
            seconds = f"{time.monotonic() - began:.0f} s"
            print(f"{number} videos in {seconds}, {places} folders, {watched.memory}")
    until(lambda: not list(jobs.glob("*")), keep + 30)
    assert server.ask("/v1/videos")[1]["data"] == []
    print(f"no folder and no job is left; {watched.memory}", flush=True)


def fuzzed(server: Running, count: int, seed: int, parts: int = 10) -> None:
    """Send broken requests, from 50 and from 200 connections at once."""
    watched, everything = Watched(server), Found()
    print(f"before: {watched.memory}", flush=True)
    for number in range(parts):
        video = server.create(prompt="a fox", num_inference_steps=1)
        assert server.done(video)["status"] == "completed"
        at_once, began = 200 if number % 2 else 50, time.monotonic()
        own = {"at_once": at_once, "video": video}
        found = fuzz(server.port, count // parts, seed + number, **own)
        everything.answers += found.answers
        everything.faults += found.faults
        print(
            f"{count // parts} requests in {time.monotonic() - began:.0f} s,"
            f" at most {found.most} at once, the slowest answer {found.slowest:.1f} s,"
            f" {watched.memory}, {dict(found.codes)}",
            flush=True,
        )
    for kind, codes in everything.kinds.items():
        print(f"  {kind}: {codes}")
    assert server.ask("/health")[0] == 200
    print("tracebacks in the log:", server.said.count("Traceback"))
    print("errors in the log:", server.said.count("error:"))
    print("faults:", len(everything.faults), flush=True)
    for fault in everything.faults[:20]:
        print(" ", fault)
    print("after:", watched.memory, flush=True)


def main() -> None:
    """Print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--rate", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--videos", type=int, default=0)
    parser.add_argument("--size", default="96x64")
    parser.add_argument("--frames", default="9")
    parser.add_argument("--keep", type=int, default=60)
    asked = parser.parse_args()
    flags = ("--size", asked.size, "--frames", asked.frames, "--folder", "kept")
    with tempfile.TemporaryDirectory() as place:
        cache = os.environ.get("TPUPORT_CACHE_DIR", f"{place}/cache")
        own = {"TPUPORT_CACHE_DIR": cache}
        keep = f"{asked.keep}s"
        with running(Path(place), *flags, "--keep", keep, environment=own) as server:
            server.ready()
            if asked.count:
                fuzzed(server, asked.count, asked.seed)
            if asked.apart:
                Watched(server).part()
            if asked.pairs:
                pairs(server, asked.pairs, asked.steps, asked.rate)
            if asked.videos:
                many(server, asked.videos, asked.keep)


if __name__ == "__main__":
    main()
