"""The folder of a trial, and what all trials start from: a cache and a finished run."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.cli.tools import SMALL, Ran, call
from tpuport.core.files.fingerprint import hash_output


class Trial(NamedTuple):
    """What was tried, what it showed, and what did not hold."""

    what: str
    showed: str
    wrong: list[str]


@dataclass(frozen=True)
class Place:
    """Where a trial is.

    Attributes:
        base: a cache with the demo and its programs, the run directories ``encoded``
            and ``denoised``, a checkpoint ``weights``, and videos with their sidecars.
            A trial only reads there.
        folder: of the trial, empty at its beginning and the current one.
    """

    base: Path
    folder: Path

    @staticmethod
    def generate(*args: object) -> tuple[str, ...]:
        """The arguments that make the video of ``base``."""
        return ("generate", "--prompt", "a fox", *SMALL, *map(str, args))

    def call(self, *args: object, cache: Path | None = None) -> Ran:
        """``tpuport ARGS`` in this process; without a cache, with :attr:`cache`."""
        before = dict(os.environ)
        named = ("--cache-dir", str(cache or self.cache))
        try:
            with contextlib.chdir(self.folder):
                return call(*map(str, args), *named)
        finally:
            os.environ.clear()
            os.environ.update(before)

    @property
    def cache(self) -> Path:
        """A cache with the demo and programs of ``base``, and runs of its own."""
        cache = self.folder / "shared"
        if not cache.exists():
            cache.mkdir()
            for name in ("demo", "compiled"):
                (cache / name).symlink_to(self.base / "cache" / name)
        return cache

    def prepare(self) -> None:
        """Make what trials start from."""
        self.base.mkdir(exist_ok=True)
        run = self.base / "denoised"
        commands: list[tuple[object, ...]] = [
            ("encode", "--run-dir", run, "--prompt", "a fox", *SMALL),
            ("denoise", "--run-dir", run),
            *(
                self.generate("--out", f"{self.base}/{name}")
                for name in ("fox.gif", "fox.webm", "fox.mp4", "frames/")
            ),
        ]
        # A folder is of a variant with another frame rate than the built-in demo.
        weights = self.base / "weights"
        named = ("--weights", weights, "--out", f"{self.base}/of-weights.gif")
        commands.append(self.generate(*named))
        for command in commands:
            if "--weights" in command:
                (demo,) = (self.base / "cache/demo").glob("cogvideox-demo-[0-9]*")
                shutil.copytree(demo, weights)
                (weights / "tpuport-demo.json").unlink()
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
        """A copy of the run directory that is ``encoded`` or ``denoised``."""
        return Path(shutil.copytree(self.base / done, self.folder / "run"))
