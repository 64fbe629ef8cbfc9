"""A server under a fuzzer, and the price of its answers for a video that is made.

``python -m tests.measure.serve`` starts a server of the demo and sends the requests of
tests/measure/fuzz.py: it tells of answers, faults and memory. Then it makes long
videos, sends requests at a steady rate in every other window, and compares steps.
With ``--videos`` many follow, one after the other; jobs are kept for a minute.

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
#: As many as the demo's scheduler takes.
_STEPS = 1000


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


class _Video:
    """A long video that is made, and the moments at which its steps end."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self.name = server.create(prompt="a fox", num_inference_steps=_STEPS)
        until(lambda: self._step() > 20)  # the first steps warm up

    def _step(self) -> int:
        job = self._server.job(self.name)
        assert job["status"] in ("queued", "in_progress"), job
        return int(job["tpuport"].get("step") or 0)

    def ended(self) -> tuple[int, float]:
        """The number of a step, and the moment at which its end was seen."""
        before = self._step()
        while (now := self._step()) == before:
            time.sleep(0.002)
        return now, time.monotonic()

    def window(self, seconds: float, rate: int) -> tuple[float, float]:
        """Seconds of a step, and answers a second, over so many seconds."""
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            began = time.monotonic()
            if rate:
                args = self._server.port, rate, self.name, over
                asked = pool.submit(_ask_steadily, *args)
                time.sleep(0.5)
            try:
                first, start = self.ended()
                time.sleep(seconds)
                last, end = self.ended()
            finally:
                over.set()
            answered, failed = asked.result() if rate else (0, 0)
        assert not failed, f"{failed} requests failed"
        return (end - start) / (last - first), answered / (time.monotonic() - began)


def windows(server: Running, count: int, seconds: float, rate: int) -> None:
    """Compare a video's steps while requests are answered with its other steps.

    Windows with and without requests follow each other in one video, in the order
    without, with, with, without, so that what changes slowly in a machine counts alike.
    """
    took: dict[bool, list[float]] = {True: [], False: []}
    answers = 0.0
    for _ in range(-(-count // 2)):
        video = _Video(server)
        for busy in (False, True, True, False):
            a_step, answered = video.window(seconds, rate if busy else 0)
            took[busy].append(a_step)
            answers += answered
        server.ask(f"/v1/videos/{video.name}", method="DELETE")
        pairs = list(zip(took[True], took[False], strict=True))[-2:]
        told = ", ".join(f"{b:.5f} s to {a:.5f} s" for b, a in pairs)
        print(f"a step with requests to one without: {told}", flush=True)
    ratios = sorted(b / a for b, a in zip(took[True], took[False], strict=True))
    count = len(ratios)
    low, middle, high = statistics.quantiles(ratios, n=4)
    unsure = statistics.stdev(ratios) / len(ratios) ** 0.5
    print(
        f"{count} pairs of {seconds:g} s, {answers / count:.0f} answers a second: "
        f"median ratio {middle:.4f}, quartiles {low:.4f} and {high:.4f}, mean "
        f"{statistics.mean(ratios):.4f} with a standard error of {unsure:.4f}",
        flush=True,
    )


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
    parser.add_argument("--pairs", type=int, default=40, help="of windows")
    parser.add_argument("--window", type=float, default=6, help="seconds of one")
    parser.add_argument("--rate", type=int, default=200)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--videos", type=int, default=0)
    parser.add_argument("--size", default="96x64")
    parser.add_argument("--frames", default="9")
    parser.add_argument("--keep", type=int, default=60)
    asked = parser.parse_args()
    flags = ("--size", asked.size, "--frames", asked.frames, "--folder", "kept")
    flags += ("--max-steps", str(_STEPS))
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
                windows(server, asked.pairs, asked.window, asked.rate)
            if asked.videos:
                many(server, asked.videos, asked.keep)


if __name__ == "__main__":
    main()
