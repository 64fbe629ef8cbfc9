"""Kills ``tpuport`` at random moments and says what became of each run.

``python -m tests.measure.kills [SECONDS]`` starts small runs of the demo for so long,
a minute by default, and sends each one a signal at a random moment. The exit code must
be the signal's, no file may be half written, and the next run must clean up. Every kept
run is gone on with. Exit status 1 tells of a run that ended otherwise.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The demo's smallest video.
SMALL = ("generate", "--prompt", "a fox", "--frames", "9", "--size", "96x64")
SMALL = (*SMALL, "--steps", "2", "--out", "fox.gif", "--overwrite")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)

#: Seconds that a process may take to end once it was asked to.
PATIENCE = 300


@dataclass(frozen=True)
class Killed:
    """A process that was sent a signal.

    Attributes:
        code: as a shell gives it.
        err: what the process said.
        sent: whether it was alive by then.
    """

    code: int
    err: str
    sent: bool


def kill(
    args: tuple[str, ...],
    folder: Path,
    signum: signal.Signals,
    *,
    cache: Path | None = None,
    line: str = "",
    after: float = 0.0,
) -> Killed:
    """``tpuport ARGS`` in ``folder``, sent a signal.

    Args:
        cache: the cache folder; without it there is one in ``folder``.
        line: wait until this pattern is at the beginning of a line.
        after: seconds to wait from then on.
    """
    said = folder / "stderr"
    with said.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "tpuport", *args],
            cwd=folder,
            env=os.environ | {"TPUPORT_CACHE_DIR": str(cache or folder / "cache")},
            stdout=subprocess.DEVNULL,
            stderr=err,
            # A shell's job in the background ignores SIGINT, and so would this.
            preexec_fn=_listen,
        )
    until = time.monotonic() + PATIENCE
    while line and process.poll() is None and time.monotonic() < until:
        if re.search(line, said.read_text(), re.MULTILINE):
            break
        time.sleep(0.01)
    time.sleep(after)
    sent = process.poll() is None
    process.send_signal(signum)
    try:
        code = process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    return Killed(code if code >= 0 else 128 - code, said.read_text(), sent)


def _listen() -> None:
    for signum in SIGNALS[:3]:
        signal.signal(signum, signal.SIG_DFL)


def tpuport(*args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """``tpuport ARGS`` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tpuport", *args],
        cwd=folder,
        env=os.environ | {"TPUPORT_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def kept(folder: Path) -> list[dict[str, Any]]:
    """What ``tpuport runs`` lists."""
    found: list[dict[str, Any]] = json.loads(
        tpuport("runs", "--json", folder=folder).stdout
    )["runs"]
    return found


def faults(killed: Killed, signum: signal.Signals, folder: Path) -> list[str]:
    """What is wrong after a kill, in words."""
    found = []
    # One that came to its end before the signal was sent ended well.
    if killed.code != (128 + signum if killed.sent else 0):
        found.append(f"exit code {killed.code}: {killed.err[-2000:]}")
    if signum != signal.SIGKILL and "Traceback" in killed.err:
        found.append(killed.err[-2000:])
    runs = kept(folder)
    if signum != signal.SIGKILL and not all(run["resumable"] for run in runs):
        found.append(f"a run that cannot go on was left: {runs}")
    for run in runs:
        if run["resumable"]:
            done = tpuport("runs", "resume", run["id"], folder=folder)
            if done.returncode or not (folder / "fox.gif").exists():
                found.append(f"runs resume: {done.stderr[-2000:]}")
    return found


def main() -> int:
    """Kill for so many seconds; 1 where a run ended otherwise than it should."""
    until = time.monotonic() + float((sys.argv[1:] or ["60"])[0])
    wrong, count = 0, 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tpuport(*SMALL, folder=folder)  # compiles
        started = time.monotonic()
        tpuport(*SMALL, folder=folder)
        whole = time.monotonic() - started
        while time.monotonic() < until:
            signum, after = random.choice(SIGNALS), random.uniform(0.2, whole)
            (folder / "fox.gif").unlink(missing_ok=True)
            killed = kill(SMALL, folder, signum, after=after)
            found = faults(killed, signum, folder)
            print(f"{signum.name} after {after:.1f} s: {'; '.join(found) or 'good'}")
            wrong, count = wrong + bool(found), count + 1
        tpuport(*SMALL, folder=folder)
        if left := kept(folder):
            print(f"the next run left {left}")
            wrong += 1
    print(f"{count} kills, {wrong} of them ended otherwise than they should")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
