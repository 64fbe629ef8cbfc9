"""Faults at random: kills, damaged files, bad checkpoints and full disks.

``python -m tests.measure.faults [--seconds N] [--seed N] [--trial K] [--kind NAME]``
tries for so many seconds and prints a line for each trial. A trial's choices follow
from the seed and the trial's number, so ``--seed N --trial K`` makes them again. Exit
status 1 tells of a trial after which something did not hold. ``docs/faults.md`` says
what must hold.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import multiprocessing
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

#: The function of each kind of trial, and how many of it are in ten. They are imported
#: in the process that tries: this one outlives that one.
KINDS = {
    "kills": ("tests.measure.kills:kills", 1),
    "damaged files": ("tests.measure.wrong_files:damages_of_files", 4),
    "bad checkpoints": ("tests.measure.wrong_files:checkpoints", 3),
    "full disks": ("tests.measure.wrong_files:disks", 2),
}
#: Seconds that one trial may take, and that the first compile may.
PATIENCE, PREPARING = 240, 900
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
    (kind,) = rng.choices(list(KINDS), [share for _, share in KINDS.values()])
    return only or kind, rng


def try_once(base: Path, folder: Path, kind: str, rng: random.Random) -> Any:
    """Make one trial, in this process."""
    from tests.measure.places import Place

    module, name = KINDS[kind][0].split(":")
    return getattr(importlib.import_module(module), name)(Place(base, folder), rng)


def prepare(base: Path, folder: Path) -> None:
    """What all trials start from."""
    from tests.measure.places import Place

    Place(base, folder).prepare()


class Worker:
    """A process that tries; one that dies or hangs is told, and replaced."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def call(self, function: Callable[[], object], patience: float) -> object:
        """What a function returns there; a text says why there is nothing."""
        asked = self._pool.submit(function)
        (process,) = self._pool._processes.values()
        try:
            return asked.result(patience)
        except BrokenProcessPool:
            # The pool's own thread waits for the process: a second wait beside
            # that one may find no process, and so no code.
            self._pool.shutdown()
            said = f"the process died with code {process.exitcode}"
        except TimeoutError:
            process.kill()
            said = f"no answer in {patience:g} s"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        self._pool.shutdown()
        self.__init__()  # type: ignore[misc]
        return said

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()


def trials(
    seed: int, numbers: Iterator[int], seconds: float, only: str | None = None
) -> Iterator[Outcome]:
    """Trials until the time has passed or the numbers end.

    Raises:
        RuntimeError: nothing could be made to start from.
    """
    os.environ.update(ENVIRONMENT)
    worker = Worker()
    with tempfile.TemporaryDirectory(prefix="tpuport-faults-") as made:
        base, top = Path(made, "base"), Path(made)
        if said := worker.call(functools.partial(prepare, base, top), PREPARING):
            raise RuntimeError(said)
        until = time.monotonic() + seconds
        for number in itertools.takewhile(lambda _: time.monotonic() < until, numbers):
            kind, rng = drawn(seed, number, only)
            folder = top / f"trial-{number}"
            folder.mkdir()
            task = functools.partial(try_once, base, folder, kind, rng)
            found = worker.call(task, PATIENCE)
            if isinstance(found, str):
                found = ("?", "nothing", [found])
            # A trial that died leaves its disk.
            if os.path.ismount(folder / "small"):
                subprocess.run(["umount", "-l", folder / "small"], check=False)
            shutil.rmtree(folder, ignore_errors=True)
            yield Outcome(number, kind, *found)  # type: ignore[misc]
        worker.close()


def table(outcomes: Sequence[Outcome], seed: int) -> str:
    """Kind, tried, held, did not hold; then how to repeat what did not."""
    rows = [f"{'kind':18}{'tried':>7}{'held':>7}{'did not hold':>14}"]
    for kind in KINDS:
        mine = [outcome for outcome in outcomes if outcome.kind == kind]
        wrong = sum(bool(outcome.wrong) for outcome in mine)
        rows.append(f"{kind:18}{len(mine):7}{len(mine) - wrong:7}{wrong:14}")
        showed = [outcome.showed for outcome in mine]
        rows += [f"  {showed.count(one)} {one}" for one in sorted(set(showed))]
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
    numbers = itertools.count() if given.trial is None else iter((given.trial,))
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
