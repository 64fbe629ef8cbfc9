"""What an engine has to do, how far it is, where the files are; and its place."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tpuport.cli.asked.settings import PROMPT, Settings
from tpuport.cli.batches.packs import Pack, run_dir
from tpuport.cli.batches.requests import Request, request_of
from tpuport.cli.server.fields import Shape
from tpuport.cli.server.jobs import Jobs
from tpuport.cli.server.messages import PREVIEW, Make, Stop, Told
from tpuport.core.enums import StageName

LOADING, COMPILING, READY, FAILED = "loading", "compiling", "ready", "failed"
#: The folders of calls in that of a job: with others, and all.
_SHARED = ("+*",)
CALLS = (*_SHARED, "run-*")


class EngineLike(Protocol):
    """Makes videos, in another process.

    What it tells are the messages of :mod:`tpuport.cli.server.messages`; the last is
    :class:`~tpuport.cli.server.messages.Gone`.
    """

    def send(self, message: Any) -> None:
        """Ask for something."""

    def close(self) -> None:
        """End the process."""


MakeEngine = Callable[[Callable[[Any], None]], EngineLike]
"""Starts an engine, which calls what it is given with each message, in any thread."""


@dataclass
class Warm:
    """A shape for an engine to make programs for.

    Attributes:
        size: videos of a call.
        lost: engines that it has cost.
    """

    shape: Shape
    size: int = 1
    lost: int = 0

    def told(self) -> str:
        """What an engine does, for people."""
        shape = f"{self.shape.size} with {self.shape.num_frames} frames"
        if self.size == 1:
            return f"makes {shape} ready"
        return f"measures calls of {self.size} videos of {shape}"


@dataclass
class Work:
    """What an engine has, and how far it is.

    Attributes:
        name: names it in what the engine is told and tells.
        packs: the requests of each call.
        jobs: the ids of those whose videos are made; none for a shape.
        steps: of one call.
        call: which is under way, from 0.
        first, last: when steps number ``first_step`` and ``step`` had ended.
    """

    name: str
    packs: tuple[Pack, ...]
    jobs: tuple[str, ...] = ()
    warm: Warm | None = None
    steps: int = 0
    what: str = LOADING
    call: int = 0
    step: int = 0
    first_step: int = 0
    first: float = 0.0
    last: float = 0.0

    @property
    def packed(self) -> bool:
        """Whether a call makes several videos."""
        return any(len(pack) > 1 for pack in self.packs)

    def heard(self, told: Told) -> None:
        """Note what the engine tells."""
        if told.job != self.name:
            return
        if told.call != self.call:
            self.call, self.step, self.first = told.call, 0, 0.0
        self.what = told.what
        if told.what == StageName.DENOISE and told.done:
            self.steps, self.step, self.last = told.total, told.done, time.monotonic()
            if not self.first or told.done <= self.first_step:
                self.first, self.first_step = self.last, told.done

    def _steps(self) -> tuple[int, int]:
        """Steps of all videos that are made, and that are to be made."""
        sizes = [len(pack) for pack in self.packs]
        made = self.steps * sum(sizes[: self.call]) + self.step * sizes[self.call]
        return made, self.steps * sum(sizes)

    def done_of(self, videos: int) -> int:
        """Steps of a job with so many of the videos."""
        return self._steps()[0] * videos // sum(map(len, self.packs))

    @property
    def seconds_left(self) -> float | None:
        """Of the steps; ``None`` until two of them were timed."""
        if self.step <= self.first_step or not self.first:
            return None
        each = (self.last - self.first) / (self.step - self.first_step)
        made, total = self._steps()
        left = each * (total - made) / len(self.packs[self.call])
        return round(max(left - (time.monotonic() - self.last), 0.0), 2)


class Slot:
    """The place of one engine, which another one takes when the first is lost.

    Args:
        number: of the place, from 0.
        make: starts an engine.
        hear: told the place and each message, in any thread.

    Attributes:
        name: of the engine, for people.
        opened: the engine has imported what it needs.
        since: when the engine had.
        warm: an engine here has made the first shape.
        work: what the engine has; ``None`` for nothing.
        last_was_job: what it had before was a job.
        lost: engines, in a row, without a job.
        failed: no engine is started any more.
    """

    def __init__(
        self, number: int, make: MakeEngine, hear: Callable[[tuple[Slot, Any]], None]
    ) -> None:
        self.number, self._make, self._hear = number, make, hear
        self.name, self.since = f"engine {number + 1}", 0.0
        self.opened = self.warm = self.last_was_job = self.failed = False
        self.work: Work | None = None
        self.lost = 0
        self._engine: EngineLike | None = None

    @property
    def ready(self) -> bool:
        """Whether the engine takes jobs."""
        return self.opened and self.warm and not self.failed

    def start(self) -> None:
        """Have an engine, a new one."""
        self.opened = False
        self._engine = self._make(lambda message: self._hear((self, message)))

    def give(self, work: Work) -> None:
        """Let the engine work."""
        assert self._engine is not None
        self.work = work
        plain = work.warm is not None
        self._engine.send(Make(job=work.name, packs=work.packs, plain=plain))

    def stop(self) -> None:
        """Stop the work at its next step."""
        if self._engine is not None and self.work is not None:
            self._engine.send(Stop(self.work.name))

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()


def in_calls(
    requests: Sequence[Request], sizes: Collection[int] = ()
) -> tuple[Pack, ...]:
    """The calls that make requests: what was begun, else as large as pays.

    Args:
        sizes: numbers of videos that are faster in one call than alone.
    """
    found: list[Pack] = []
    left = tuple(requests)
    while left:
        begun = (n for n in range(len(left), 0, -1) if is_begun(left[:n]))
        pays = max((n for n in sizes if n <= len(left)), default=1)
        size = next(begun, pays)
        found.append(left[:size])
        left = left[size:]
    return tuple(found)


def is_begun(pack: Pack) -> bool:
    """Whether a call was broken off, and goes on; or its one video is there."""
    (one, *more) = pack
    return run_dir(pack).exists() or (not more and all(p.exists() for p in one.paths))


def sizes_up_to(most: int) -> list[int]:
    """The numbers of videos that calls are tried with: 2, 4, 8 and so on, and most."""
    powers = [1 << n for n in range(1, most.bit_length())]
    return sorted({*powers, most} - {1})


class Files:
    """The folders of jobs.

    Args:
        folder: of the server.
        below: what its flags say.
    """

    def __init__(self, folder: Path, below: Settings) -> None:
        self.folder, self._below = folder, below

    def place(self, name: str) -> Path:
        """The folder of a job."""
        return self.folder / "jobs" / name

    def preview(self, name: str) -> Path:
        """Where the newest preview of a running job is."""
        return self.place(name) / PREVIEW

    def requests(
        self, name: str, values: Mapping[str, Any], seeds: Sequence[int]
    ) -> list[Request]:
        """The videos of a job.

        Raises:
            TpuportError: a value is wrong.
        """
        found = []
        for number, seed in enumerate(seeds):
            own = {**values, "seed": seed, "out": video_name(number)}
            given = (own, "request", self.place(name), self._below)
            request = request_of(number, *given)
            folder = self.place(name) / f"run-{number}"
            settings = replace(request.settings, run_dir=folder)
            found.append(replace(request, settings=settings))
        return found

    def warm_requests(
        self, name: str, shape: Shape, count: int, **more: Any
    ) -> list[Request]:
        """Videos to make programs with; see :meth:`requests`."""
        values: dict[str, Any] = {"prompt": PROMPT, **more}
        if shape.size:
            values["size"] = shape.size
        if shape.num_frames:
            values["num_frames"] = shape.num_frames
        first = self._below.seed[0]
        return self.requests(name, values, range(first, first + count))

    def has_begun(self, name: str) -> bool:
        """Whether a job has a call that was broken off, or a video."""
        kinds = *CALLS, "video-*.mp4"
        return any(path for kind in kinds for path in self.place(name).glob(kind))

    def picture(self, name: str, shape: Shape, facts: Mapping[str, Any]) -> Path:
        """An image to compile with, as large as a frame."""
        from PIL import Image

        sides = shape.width or facts.get("width"), shape.height or facts.get("height")
        size = (sides[0] or 720, sides[1] or 480)
        file = self.place(name) / "image.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.linear_gradient("L").resize(size).convert("RGB").save(file)
        return file

    def remove(self, name: str) -> None:
        """Remove the folder of a job."""
        shutil.rmtree(self.place(name), ignore_errors=True)

    def remove_calls(self, name: str, *kinds: str) -> None:
        """Remove what is kept of calls that nobody goes on with.

        Args:
            kinds: patterns of their folders; by default of calls with others.
        """
        for kind in kinds or _SHARED:
            for path in self.place(name).glob(kind):
                shutil.rmtree(path, ignore_errors=True)

    def remove_unknown(self, jobs: Jobs) -> None:
        """Remove the folders of jobs that a killed server had forgotten already."""
        places = [p.name for p in self.place(".").glob("*")]
        for name in set(places) - jobs.known(places):
            self.remove(name)


def video_name(index: int) -> str:
    """The file of a video of a job, from 0."""
    return f"video-{index}.mp4"
