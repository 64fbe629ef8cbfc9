"""The folder of a trial, what all trials start from, and what must hold after one.

A verdict is a list of sentences. An empty list says that all held.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.cli.tools import Ran, call
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.sealed_json import read_sidecar, sidecar_path
from tpuport.errors import LINE, TpuportError

#: The smallest video of the demo that has more than one step and chunk.
SMALL = (
    *("--prompt", "a fox", "--negative-prompt", "blur", "--size", "32x32"),
    *("--frames", "9", "--steps", "3"),
)
#: No command says any of these words, whatever it met.
NEVER = ("Traceback", "Exception ignored", "unexpected ", "Fatal Python error")


class Trial(NamedTuple):
    """What was tried, what it showed, and what did not hold."""

    what: str
    showed: str
    wrong: list[str]


@dataclass(frozen=True)
class Place:
    """Where a trial is.

    Attributes:
        base: a cache with the demo's programs, the runs ``encoded`` and
            ``denoised``, and videos with their sidecars. A trial only reads there.
        folder: of the trial, empty at its beginning and the current one.
    """

    base: Path
    folder: Path

    @staticmethod
    def generate(*args: object) -> tuple[str, ...]:
        """The arguments that make the video of ``base``."""
        return ("generate", *SMALL, *map(str, args))

    def call(self, *args: object, cache: Path | None = None) -> Ran:
        """``tpuport ARGS`` in this process; without a cache, with :attr:`cache`."""
        before = dict(os.environ)
        try:
            with contextlib.chdir(self.folder):
                return call(*map(str, args), "--cache-dir", str(cache or self.cache))
        finally:
            os.environ.clear()
            os.environ.update(before)

    @property
    def cache(self) -> Path:
        """A cache with the programs of ``base``, and runs of its own."""
        cache = self.folder / "shared"
        if not cache.exists():
            cache.mkdir()
            (cache / "compiled").symlink_to(self.base / "cache/compiled")
        return cache

    def prepare(self) -> None:
        """Make what trials start from."""
        self.base.mkdir(exist_ok=True)
        run = self.base / "denoised"
        commands: list[tuple[object, ...]] = [("encode", "--run-dir", run, *SMALL)]
        commands.append(("denoise", "--run-dir", run))
        for name in ("fox.gif", "fox.webm", "fox.mp4", "frames/"):
            commands.append(self.generate("--out", f"{self.base}/{name}"))
        for command in commands:
            ran = self.call(*command, cache=self.base / "cache")
            if ran.code:
                raise RuntimeError(ran.err)
            if command[0] == "encode":
                shutil.copytree(run, self.base / "encoded")

    def of_video(self, video: Path) -> list[str]:
        """A video that is not the one of that name in ``base``."""
        if not video.exists():
            return [f"{video.name} is not there"]
        # A webm has a number of its own that is drawn anew.
        made = self.base / video.name
        if video.suffix == ".webm" or hash_output(video) == hash_output(made):
            return []
        return [f"{video.name} is another video"]

    def own_cache(self, *, programs: bool = True) -> Path:
        """A copy of the cache, with or without compiled programs."""
        left_out = shutil.ignore_patterns("runs", *([] if programs else ["compiled"]))
        copied = self.folder / "cache"
        return Path(shutil.copytree(self.base / "cache", copied, ignore=left_out))

    def own_run(self, done: str = "denoised") -> Path:
        """A copy of the run that is ``encoded`` or ``denoised``."""
        return Path(shutil.copytree(self.base / done, self.folder / "run"))


def of_words(err: str) -> list[str]:
    """A command that says what only a program's author understands."""
    return [
        f"says {line.strip()[:200]!r}"
        for line in err.splitlines()
        if any(word in line for word in NEVER)
    ]


def of_end(ran: Ran, codes: Collection[int] = (0, 1, 2)) -> list[str]:
    """An exit code that is none of ``codes``, or an error that is not one line."""
    wrong = of_words(ran.err)
    errors = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    if ran.code not in codes:
        wrong.append(f"exit code {ran.code}, saying {ran.err.strip()[-300:]!r}")
    elif len(errors) != int(ran.code in (1, 2)):
        wrong.append(f"exit code {ran.code} with {len(errors)} lines of error")
    return wrong + [f"a line of {len(line)}" for line in errors if len(line) > LINE]


def of_named(ran: Ran, *names: object) -> list[str]:
    """An error that names none of the things at fault."""
    if ran.code == 0 or any(str(name) in ran.err for name in names):
        return []
    return [f"names none of {', '.join(map(str, names))}: {ran.err.strip()[-300:]!r}"]


def of_leftovers(*folders: Path) -> list[str]:
    """Temporary files of any process."""
    return [
        f"{path} is left"
        for folder in folders
        for path in folder.rglob("*")
        if path.name.startswith(".tpuport-") or path.suffix == ".tmp"
    ]


def of_pair(video: Path, *, alone: bool = False) -> list[str]:
    """A video and a sidecar that do not belong together.

    Args:
        alone: whether the video may be there without its sidecar, as a kill leaves it.
    """
    sidecar = sidecar_path(video)
    if not sidecar.exists():
        return [] if alone or not video.exists() else [f"{video} has no sidecar"]
    if not video.exists():
        return [f"{sidecar} has no video"]
    try:
        said = read_sidecar(sidecar)["output"]["sha256"]
    except TpuportError as error:
        return [f"the sidecar is damaged: {error}"]
    return [] if said == hash_output(video)[0] else [f"{sidecar} is of another video"]
