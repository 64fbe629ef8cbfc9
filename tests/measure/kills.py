"""Runs of the demo that get a signal at a random moment."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cli.tools import SMALL
from tests.measure.places import Place, Trial
from tests.measure.verdicts import of_end, of_leftovers, of_pair, of_words
from tests.processes import start_python

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)

#: Seconds that a process may take to end once it was asked to.
PATIENCE = 300

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
    line: str = "",
    after: float = 0.0,
    imported: bool = False,
) -> Killed:
    """``tpuport ARGS`` in ``folder``, sent a signal.

    Args:
        cache: the cache folder; without it there is one in ``folder``.
        line: wait until this pattern is at the beginning of a line.
        after: seconds to wait from then on.
        imported: begin as a fork of a process that has imported torch and jax, which
            takes less time, and not as a shell does.
    """
    said = folder / "stderr"
    command = ("-m", "tpuport", *args)
    env = os.environ | {"TPUPORT_CACHE_DIR": str(cache or folder / "cache")}
    said.touch()
    wait: Callable[[], int | None]
    if imported:
        out = folder / "stdout"
        out.unlink(missing_ok=True)
        forked = start_python(command, env, folder, out, said)
        pid = forked.pid
        while not out.exists() and forked.exitcode is None:
            time.sleep(0.01)

        def wait(seconds: float = 0) -> int | None:
            forked.join(seconds)
            return forked.exitcode
    else:
        with said.open("wb") as err, _heard():
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env=env,
                stdout=subprocess.DEVNULL,
                stderr=err,
            )
        pid = process.pid

        def wait(seconds: float = 0) -> int | None:
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None

    until = time.monotonic() + PATIENCE
    while line and wait() is None and time.monotonic() < until:
        if re.search(line, said.read_text(), re.MULTILINE):
            break
        time.sleep(0.01)
    time.sleep(after)
    sent = wait() is None
    if sent:
        os.kill(pid, signum)
    began = time.monotonic()
    code = wait(PATIENCE)
    if code == 0 and time.monotonic() < began + AT_ITS_END:
        sent = False
    if code is None:
        os.kill(pid, signal.SIGKILL)
        raise TimeoutError(f"{signum.name}: not ended in {PATIENCE} s")
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


# --- a trial: a kill, and what must hold after it


def kills(place: Place, rng: random.Random) -> Trial:
    """A signal at a random moment of ``generate``, or of a stage."""
    signum = rng.choice(SIGNALS)
    imported = rng.random() < 0.8
    compiles = rng.random() < 0.2
    command = rng.choice(("generate", "generate", "encode", "denoise", "decode"))
    # Seconds of work; a command that compiles or imports takes ten more.
    after = rng.uniform(0, 4 if command == "generate" else 1.5)
    after += rng.uniform(0, 10 * (compiles or not imported))
    cache = place.own_cache(programs=False) if compiles else place.cache
    what = f"{command}{' compiling' * compiles}, {signum.name} after {after:.1f} s"
    if command == "generate":
        return Trial(what, *_killed_run(place, cache, signum, after, imported))
    return Trial(what, *_killed_stage(place, cache, command, signum, after, imported))


def _killed_run(
    place: Place, cache: Path, signum: signal.Signals, after: float, imported: bool
) -> tuple[str, list[str]]:
    video = place.folder / "fox.gif"
    make = place.generate("--out", "fox.gif", "--overwrite")
    killed = kill(
        make, place.folder, signum, cache=cache, after=after, imported=imported
    )
    wrong = of_kill(killed, signum) + of_pair(video, alone=signum == signal.SIGKILL)
    if signum != signal.SIGKILL:
        wrong += of_leftovers(place.folder)
    listed = place.call("runs", "--json", cache=cache)
    wrong += of_end(listed, (0,))
    resumed = 0
    for run in listed.json["runs"] if listed.code == 0 else []:
        if run["resumable"]:
            again = place.call("resume", run["id"], cache=cache)
            wrong += of_end(again, (0,)) + place.of_video(video)
            resumed += 1
        elif signum != signal.SIGKILL:
            wrong.append(f"a run that cannot go on is kept: {run}")
    again = place.call(*make, cache=cache)
    wrong += of_end(again, (0,)) + place.of_video(video) + of_pair(video)
    wrong += of_leftovers(place.folder)
    if left := place.call("runs", "--json", cache=cache).json["runs"]:
        wrong.append(f"runs are left: {left}")
    return f"{_how(killed)}{', resumed' * bool(resumed)}", wrong


def _killed_stage(
    place: Place,
    cache: Path,
    stage: str,
    signum: signal.Signals,
    after: float,
    imported: bool,
) -> tuple[str, list[str]]:
    stages = ("encode", "denoise", "decode")
    begin = stages.index(stage)
    run = place.folder / "run"
    if begin:
        place.own_run(("encoded", "denoised")[begin - 1])
    video = place.folder / "fox.gif"
    commands = {
        "encode": ("encode", "--run-dir", run, "--prompt", "a fox", *SMALL),
        "denoise": ("denoise", "--run-dir", run),
        "decode": ("decode", "--run-dir", run, "--out", video, "--overwrite"),
    }
    args = tuple(map(str, commands[stage]))
    killed = kill(
        args, place.folder, signum, cache=cache, after=after, imported=imported
    )
    wrong = of_kill(killed, signum) + of_pair(video, alone=signum == signal.SIGKILL)
    if signum != signal.SIGKILL:
        wrong += of_leftovers(place.folder)
    for name in stages[begin:]:
        wrong += of_end(place.call(*commands[name], cache=cache), (0,))
    wrong += place.of_video(video) + of_pair(video) + of_leftovers(place.folder)
    return _how(killed), wrong


def _how(killed: Killed) -> str:
    return f"code {killed.code}" if killed.sent else "ended before"


def of_kill(killed: Killed, signum: signal.Signals) -> list[str]:
    """What is wrong with how a process ended after a signal."""
    wrong = of_words(killed.err)
    # One that came to its end before the signal was sent ended well.
    if killed.code != (128 + signum if killed.sent else 0):
        wrong.append(f"exit code {killed.code}, saying {killed.err[-300:]!r}")
    return wrong
