"""Many requests by one process, and by two replicas of Ray on the same machine.

Each writes 40 videos of three shapes of the demo; programs are compiled before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = ("96x64", "64x64", "64x96")


def requests(count: int) -> str:
    """Lines of a file of requests."""
    lines = (
        {"prompt": f"fox {n}", "seed": n, "size": SIZES[n % len(SIZES)]}
        for n in range(count)
    )
    return "\n".join(map(json.dumps, lines))


def took(place: Path, out: str, steps: int, *flags: str) -> tuple[float, float]:
    """Seconds of a whole batch, and from its first video to its last."""
    asked = ("batch", "prompts.jsonl", "--out", out, "--frames", "9", *flags)
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "tpuport", *asked, "--steps", str(steps)],
        cwd=place,
        env=os.environ | {"TPUPORT_CACHE_DIR": str(place / "cache")},
        stderr=subprocess.DEVNULL,
    )
    results, first = place / out / "results.jsonl", 0.0
    while process.poll() is None:
        if not first and results.exists() and results.stat().st_size:
            first = time.perf_counter()
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"the batch ended with {process.returncode}")
    ended = time.perf_counter()
    return ended - began, ended - first


def main() -> None:
    """Print the times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--steps", type=int, default=4)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "prompts.jsonl").write_text(requests(len(SIZES)))
        took(place, "compiled", asked.steps)
        (place / "prompts.jsonl").write_text(requests(asked.count))
        load = os.getloadavg()[0]
        one = took(place, "one", asked.steps)
        two = took(place, "two", asked.steps, "--ray", "local", "--replicas", "2")
    print(f"load {load:.1f} on {os.cpu_count()} CPUs, {asked.count} videos")
    for what, a, b in zip(("in all", "after the first video"), one, two, strict=True):
        ratio = f"{a / b:.2f} times as many videos a second"
        print(f"{what}: one process {a:.1f} s, two replicas {b:.1f} s: {ratio}")


if __name__ == "__main__":
    main()
