"""Runs of the demo that get a signal at a random moment."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.measure.places import (
    SMALL,
    Place,
    Trial,
    of_end,
    of_leftovers,
    of_pair,
    of_words,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
#: Seconds that a process may take until a signal may be sent, and to end after that.
READY, PATIENCE = 600, 120
#: A process that ends well so many seconds after a signal had nothing left to do.
AT_ITS_END = 0.2


@dataclass(frozen=True)
class Killed:
    """A process that was sent a signal.

    Attributes:
        code: as a shell gives it.
        err: what the process said.
        sent: whether it had something to do by then.
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
    ready: Callable[[str], bool] = lambda said: True,
    after: float = 0.0,
) -> Killed:
    """``tpuport ARGS`` in ``folder``, sent a signal.

    Args:
        cache: the cache folder; without it there is one in ``folder``.
        ready: whether the signal may be sent, from what the process said until then.
        after: seconds to wait from then on.

    Raises:
        TimeoutError: the process did not end.
    """
    said = folder / "stderr"
    env = os.environ | {"TPUPORT_CACHE_DIR": str(cache or folder / "cache")}
    with said.open("wb") as err, _heard():
        process = subprocess.Popen(
            [sys.executable, "-m", "tpuport", *args],
            cwd=folder,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=err,
        )
    until = time.monotonic() + READY
    while not ready(said.read_text()):
        if process.poll() is not None or time.monotonic() > until:
            break
        time.sleep(0.01)
    time.sleep(after)
    sent = process.poll() is None
    if sent:
        process.send_signal(signum)
    began = time.monotonic()
    try:
        code = process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise TimeoutError(f"{signum.name}: not ended in {PATIENCE} s") from None
    sent &= code != 0 or time.monotonic() >= began + AT_ITS_END
    return Killed(code if code >= 0 else 128 - code, said.read_text(), sent)


@contextlib.contextmanager
def _heard() -> Iterator[None]:
    """A block whose processes hear signals.

    A shell's job in the background ignores SIGINT, and so would what it starts.
    """
    before = {signum: signal.getsignal(signum) for signum in SIGNALS[:3]}
    try:
        for signum, handler in before.items():
            if handler == signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def kills(place: Place, rng: random.Random) -> Trial:
    """A signal at a random moment of ``generate``, or of a stage."""
    signum = rng.choice(SIGNALS)
    compiles = rng.random() < 0.2
    stages = ("encode", "denoise", "decode")
    command = rng.choice(("generate", "generate", *stages))
    # Seconds: what a command takes on two cores, most of it imports.
    after = rng.uniform(0, 25 if compiles else 12)
    cache = place.own_cache(programs=False) if compiles else place.cache
    what = f"{command}{' compiling' * compiles}, {signum.name} after {after:.1f} s"
    video, run = place.folder / "fox.gif", place.folder / "run"
    out = ("--out", str(video), "--overwrite")
    todo: list[tuple[str, ...]] = [place.generate(*out)]
    if command != "generate":
        begin = stages.index(command)
        if begin:
            place.own_run(("encoded", "denoised")[begin - 1])
        at = ("--run-dir", str(run))
        staged = (("encode", *SMALL, *at), ("denoise", *at), ("decode", *at, *out))
        todo = list(staged[begin:])
    killed = kill(todo[0], place.folder, signum, cache=cache, after=after)
    wrong = of_kill(killed, signum) + of_pair(video, alone=signum == signal.SIGKILL)
    if signum != signal.SIGKILL:
        wrong += of_leftovers(place.folder)
    listed = place.call("runs", "--json", cache=cache)
    wrong += of_end(listed, (0,))
    resumed = ""
    for kept in listed.json["runs"] if listed.code == 0 else []:
        if kept["resumable"]:
            again = place.call("resume", kept["id"], cache=cache)
            wrong += of_end(again, (0,)) + place.of_video(video)
            resumed = ", resumed"
        elif signum != signal.SIGKILL:
            wrong.append(f"a run that cannot go on is kept: {kept}")
    for args in todo:
        wrong += of_end(place.call(*args, cache=cache), (0,))
    wrong += place.of_video(video) + of_pair(video) + of_leftovers(place.folder)
    if left := place.call("runs", "--json", cache=cache).json["runs"]:
        wrong.append(f"runs are left: {left}")
    how = f"code {killed.code}" if killed.sent else "ended before"
    return Trial(what, f"{how}{resumed}", wrong)


def of_kill(killed: Killed, signum: signal.Signals) -> list[str]:
    """What is wrong with how a process ended after a signal."""
    wrong = of_words(killed.err)
    # One that came to its end before the signal was sent ended well.
    if killed.code != (128 + signum if killed.sent else 0):
        wrong.append(f"exit code {killed.code}, saying {killed.err[-300:]!r}")
    return wrong
