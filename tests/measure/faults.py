"""Faults at random: kills, damaged files, bad checkpoints and full disks.

``python -m tests.measure.faults [--seconds N] [--seed N] [--trial K] [--kind NAME]``
tries for so many seconds and prints a line for each trial. A trial's choices follow
from the seed and the trial's number, so ``--seed N --trial K`` makes them again. Exit
status 1 tells of a trial after which something did not hold. ``docs/faults.md`` says
what must hold.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import multiprocessing
import os
import random
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.measure.places import Trial

#: The function of each kind of trial, and how many of it are in ten. They are imported
#: in the process that tries: this one outlives that one.
KINDS = {
    "kills": ("tests.measure.kills:kills", 1),
    "damaged files": ("tests.measure.wrong_files:damages_of_files", 4),
    "bad checkpoints": ("tests.measure.wrong_files:checkpoints", 3),
    "full disks": ("tests.measure.wrong_files:disks", 2),
}

#: Seconds that one trial may take, and that the first compile may.
PATIENCE, PREPARING = 180, 900

#: Programs are compiled quickly; what is tried is not how fast they are.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Outcome(NamedTuple):
    """A trial that was made."""

    number: int
    kind: str
    what: str
    showed: str
    wrong: list[str]


def drawn(seed: int, number: int, only: str | None = None) -> tuple[str, random.Random]:
    """The kind of a trial, and what its other choices are drawn from."""
    rng = random.Random(f"{seed}/{number}")
    weights = [share for _, share in KINDS.values()]
    (kind,) = rng.choices(list(KINDS), weights)
    return only or kind, rng


def try_once(
    base: Path, folder: Path, seed: int, number: int, only: str | None
) -> Trial:
    """Make one trial, in this process."""
    from tests.measure.places import Place

    kind, rng = drawn(seed, number, only)
    module, name = KINDS[kind][0].split(":")
    function: Callable[[Place, random.Random], Trial]
    function = getattr(importlib.import_module(module), name)
    return function(Place(base, folder), rng)


def prepare(base: Path, folder: Path) -> None:
    """What all trials start from."""
    from tests.measure.places import Place

    Place(base, folder).prepare()


def _serve(calls: Connection) -> None:
    """Do what is asked for, one call after the other."""
    with contextlib.suppress(EOFError):
        while True:
            try:
                answer = calls.recv()()
            except Exception:
                answer = traceback.format_exc()
            calls.send(answer)


class Worker:
    """A process that tries; one that dies or hangs is told, and replaced."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self._calls, other = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(other,))
        self._process.start()
        other.close()

    def call(self, function: Callable[[], object], patience: float) -> object:
        """What a function returns there; a text says why there is nothing."""
        self._calls.send(function)
        died = f"no answer in {patience:g} s"
        try:
            if self._calls.poll(patience):
                return self._calls.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            died = f"the process died with code {self._process.exitcode}"
        self.close()
        self._start()
        return died

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._calls.close()


@contextlib.contextmanager
def _trial_folder(base: Path, number: int) -> Iterator[Path]:
    folder = base / f"trial-{number}"
    folder.mkdir()
    try:
        yield folder
    finally:
        # A trial that died leaves its disk.
        if os.path.ismount(folder / "small"):
            subprocess.run(["umount", "-l", folder / "small"], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def trials(
    seed: int, numbers: Iterator[int], seconds: float, only: str | None = None
) -> Iterator[Outcome]:
    """Trials until the time has passed or the numbers end."""
    os.environ.update(ENVIRONMENT)
    worker = Worker()
    try:
        with tempfile.TemporaryDirectory(prefix="tpuport-faults-") as made:
            base, top = Path(made, "base"), Path(made)
            if said := worker.call(functools.partial(prepare, base, top), PREPARING):
                raise RuntimeError(said)
            until = time.monotonic() + seconds
            for number in numbers:
                if time.monotonic() > until:
                    return
                with _trial_folder(top, number) as folder:
                    task = functools.partial(try_once, base, folder, seed, number, only)
                    found = worker.call(task, PATIENCE)
                kind, _ = drawn(seed, number, only)
                if isinstance(found, str):
                    yield Outcome(number, kind, "?", "nothing", [found])
                else:
                    yield Outcome(number, kind, *found)  # type: ignore[misc]
    finally:
        worker.close()


def table(outcomes: Sequence[Outcome], seed: int) -> str:
    """Kind, tried, held, did not hold; then how to repeat what did not."""
    rows = [f"{'kind':18}{'tried':>7}{'held':>7}{'did not hold':>14}"]
    for kind in KINDS:
        mine = [outcome for outcome in outcomes if outcome.kind == kind]
        wrong = sum(bool(outcome.wrong) for outcome in mine)
        rows.append(f"{kind:18}{len(mine):7}{len(mine) - wrong:7}{wrong:14}")
        showed = sorted({outcome.showed for outcome in mine})
        rows += [
            f"  {sum(outcome.showed == one for outcome in mine)} {one}"
            for one in showed
        ]
    for outcome in outcomes:
        if outcome.wrong:
            again = f"--seed {seed} --trial {outcome.number}"
            rows.append(f"again: python -m tests.measure.faults {again}")
            rows += [f"  {outcome.what}", *(f"  {one}" for one in outcome.wrong)]
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Try; 1 where something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.measure.faults")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--trial", type=int, help="only this one, again")
    parser.add_argument("--kind", choices=tuple(KINDS))
    given = parser.parse_args(argv)
    print(f"seed {given.seed}", flush=True)
    numbers = iter(range(10**9) if given.trial is None else (given.trial,))
    outcomes = []
    for outcome in trials(given.seed, numbers, given.seconds, given.kind):
        outcomes.append(outcome)
        held = f"DID NOT HOLD: {outcome.wrong[0]}" if outcome.wrong else "held"
        line = f"{outcome.number} {outcome.kind}: {outcome.what}: {outcome.showed}"
        print(f"{line}, {held}", flush=True)
    print(table(outcomes, given.seed))
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
