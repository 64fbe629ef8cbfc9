"""Gives the engine one job after the other, and keeps what is known of each."""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpuport.cli.asked.settings import PROMPT, Settings
from tpuport.cli.batches.requests import Request, request_of
from tpuport.cli.server.child import MAKES
from tpuport.cli.server.fields import Shape
from tpuport.cli.server.jobs import Job, Jobs
from tpuport.cli.server.messages import (
    Ended,
    Gone,
    Make,
    Opened,
    Remark,
    Stop,
    Told,
)
from tpuport.cli.server.metrics import Metrics
from tpuport.cli.server.worker import Checks, Worker
from tpuport.cli.shown.output import say
from tpuport.core.enums import StageName
from tpuport.core.files.atomic import one_line
from tpuport.errors import TpuportError

#: Engines that a job may cost.
TRIES = 3
#: Steps of the video that a shape is compiled with: a first, a last and one between.
WARM_STEPS = 3
#: What the engine makes for no job.
_WARM = "warm"
#: Seconds between two looks at what expires, and in which a running job is kept.
_SWEEP, _PATIENCE = 5.0, 20.0

LOADING, COMPILING, READY, FAILED = "loading", "compiling", "ready", "failed"


@dataclass
class Live:
    """How far the job under way is.

    Attributes:
        steps: of one video.
        first, last: when steps number ``first_step`` and ``step`` had ended.
    """

    job: str
    steps: int
    videos: int
    what: str = LOADING
    video: int = 0
    step: int = 0
    first_step: int = 0
    first: float = 0.0
    last: float = 0.0

    def heard(self, told: Told) -> None:
        """Note what the engine tells."""
        if told.video != self.video:
            self.video, self.step, self.first = told.video, 0, 0.0
        self.what = told.what
        if told.what == StageName.DENOISE and told.done:
            self.steps, self.step, self.last = told.total, told.done, time.monotonic()
            if not self.first or told.done <= self.first_step:
                self.first, self.first_step = self.last, told.done

    @property
    def done(self) -> int:
        """Steps of all videos."""
        return self.video * self.steps + self.step

    @property
    def seconds_left(self) -> float | None:
        """Of the steps; ``None`` until two of them were timed."""
        if self.step <= self.first_step or not self.first:
            return None
        each = (self.last - self.first) / (self.step - self.first_step)
        left = each * (self.steps * self.videos - self.done)
        return round(max(left - (time.monotonic() - self.last), 0.0), 2)


class Dispatcher:
    """Owns the engine: one thread, which hears of everything in one queue.

    Args:
        jobs: the file of jobs.
        folder: where each job has a folder of its own.
        below: what the flags of the server say.
        shapes: those asked for; empty for the default of the model.
        keep: seconds that a job and its files are kept for.
        checks: refuse what cannot be made.
    """

    def __init__(
        self,
        jobs: Jobs,
        folder: Path,
        below: Settings,
        shapes: list[Shape],
        *,
        keep: float,
        checks: Checks,
        metrics: Metrics,
    ) -> None:
        self.jobs, self.folder, self.below = jobs, folder, below
        self.shapes, self.keep, self.metrics = shapes, keep, metrics
        self.checks = checks
        self.status, self.error = LOADING, ""
        self.image: bool | str = False
        self.defaults: dict[str, Any] = {}
        self.live: Live | None = None
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._engine: Worker | None = None
        self._opened = False
        self._busy = ""  # the job or the shape that the engine has
        self._warming: Shape | None = None
        self._last_was_job = False
        self._lost = 0  # engines, in a row, without a job
        self._closing = False
        self._swept = 0.0
        self._thread = threading.Thread(target=self._run, name="tpuport-jobs")

    # --- what other threads call

    def start(self) -> None:
        """Begin; what ran when the last server ended goes on first."""
        self.jobs.again()
        self._remove_unknown()
        self._thread.start()

    def close(self) -> None:
        """Stop the engine; a running job is kept and goes on with the next server."""
        self._closing = True
        self.checks.close()
        self._inbox.put(None)
        self._thread.join()
        if self._engine is not None:
            self._engine.close()

    def wake(self) -> None:
        """There is a new job."""
        self._inbox.put(None)

    def deleted(self, name: str) -> None:
        """A job is gone: stop it, and remove its files."""
        self._inbox.put(name)

    def place(self, name: str) -> Path:
        """The folder of a job."""
        return self.folder / "jobs" / name

    def preview(self, name: str) -> Path:
        """Where the newest preview of a running job is."""
        return self.place(name) / "preview.png"

    def requests(
        self, name: str, values: dict[str, Any], seeds: list[int]
    ) -> list[Request]:
        """The videos of a job.

        Raises:
            TpuportError: a value is wrong.
        """
        found = []
        for number, seed in enumerate(seeds):
            own = {**values, "seed": seed, "out": video_name(number)}
            given = (own, "request", self.place(name), self.below)
            request = request_of(number, *given)
            run_dir = self.place(name) / f"run-{number}"
            settings = replace(request.settings, run_dir=run_dir)
            found.append(replace(request, settings=settings))
        return found

    # --- the thread

    def _run(self) -> None:
        try:
            self._start_engine()
            self._look_at_shapes()
            while not self._closing:
                self._give()
                with contextlib.suppress(queue.Empty):
                    self._hear(self._inbox.get(timeout=1.0))
                if time.monotonic() > self._swept + _SWEEP:
                    self._swept = time.monotonic()
                    for name in self.jobs.expired():
                        self.jobs.delete(name)
                        self._remove(name)
            self._stop()
        except Exception as error:
            if not self._closing:
                why = one_line(error) or type(error).__name__
                self._fail(f"the queue ended: {why}")
                if self.below.debug:
                    raise

    def _fail(self, why: str) -> None:
        self.status, self.error = FAILED, why
        say(f"error: {why}")

    def _start_engine(self) -> None:
        self._opened = False
        hear = self._inbox.put
        self._engine = Worker(MAKES, hear, debug=self.below.debug)

    def _look_at_shapes(self) -> None:
        """Find the size, frames and steps that stand for what is not said."""
        asked = self.shapes or [Shape(None, None, None)]
        for number, shape in enumerate(asked):
            request = self._warm_request(shape, {})
            found = self.checks.check(request.settings)
            image = self._picture(shape, found.facts)
            with_image = self._warm_request(shape, {"image": str(image)})
            taken = self.checks.check(with_image.settings)
            if found.error and taken.error:
                if number == 0:
                    self._fail(found.error)
                    return
                shape.state = FAILED
                say(f"--shapes {shape.size} {shape.num_frames}: {found.error}")
                continue
            facts = (taken if found.error else found).facts
            shape.width, shape.height = facts["width"], facts["height"]
            shape.num_frames, shape.fps = facts["num_frames"], facts["fps"]
            if number == 0:
                self.image = "required" if found.error else not taken.error
                self.defaults = {
                    "size": shape.size,
                    "num_frames": shape.num_frames,
                    "num_inference_steps": facts["steps"],
                    "seed": self.below.seed[0],
                }
        self.shapes = asked

    def _warm_request(self, shape: Shape, more: dict[str, Any]) -> Request:
        values: dict[str, Any] = {"prompt": PROMPT, **more}
        if shape.size:
            values["size"] = shape.size
        if shape.num_frames:
            values["num_frames"] = shape.num_frames
        (request,) = self.requests(_WARM, values, [self.below.seed[0]])
        return request

    def _picture(self, shape: Shape, facts: dict[str, Any]) -> Path:
        """An image to compile with, as large as a frame."""
        from PIL import Image

        sides = shape.width or facts.get("width"), shape.height or facts.get("height")
        size = (sides[0] or 720, sides[1] or 480)
        file = self.place(_WARM) / "image.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.linear_gradient("L").resize(size).convert("RGB").save(file)
        return file

    def _give(self) -> None:
        """Give the engine what is next: a job, or after each job a shape."""
        if not self._opened or self._busy or self.status == FAILED:
            return
        waiting = next((s for s in self.shapes if s.state == "waiting"), None)
        first = waiting is not None and waiting is self.shapes[0]
        job = None
        if not first and not (waiting and self._last_was_job):
            job = self.jobs.next()
        if job is not None:
            self._last_was_job = True
            self._begin(job)
        elif waiting is not None:
            self._last_was_job = False
            self._compile(waiting)

    def _compile(self, shape: Shape) -> None:
        shape.state, self._warming, self._busy = COMPILING, shape, _WARM
        if shape is self.shapes[0]:
            self.status = COMPILING
        more = {}
        if self.image == "required":
            more["image"] = str(self._picture(shape, {}))
        request = self._warm_request(shape, more)
        steps = min(self.defaults["num_inference_steps"], WARM_STEPS)
        settings = replace(request.settings, num_inference_steps=steps)
        self._send(_WARM, [replace(request, settings=settings)])

    def _begin(self, job: Job) -> None:
        asked = job.asked
        try:
            requests = self.requests(job.id, asked["values"], asked["seeds"])
            if [one.digest for one in requests] != asked["digests"]:
                raise TpuportError(
                    "the server was started again with other settings, by which the "
                    "video would be another one; ask for it again"
                )
        except TpuportError as error:
            self.jobs.ended(job.id, self.keep, error=one_line(error))
            self.metrics.ended("failed")
            return
        self._busy = job.id
        self.live = Live(job.id, asked["steps"], len(requests))
        self._send(job.id, requests)

    def _send(self, name: str, requests: list[Request]) -> None:
        place = self.place(name)
        place.mkdir(parents=True, exist_ok=True)
        # Also to compile with: previews find their colours once.
        preview, videos = self.preview(name), tuple(requests)
        make = Make(job=name, folder=place, requests=videos, preview=preview)
        assert self._engine is not None
        self._engine.send(make)

    def _hear(self, message: Any) -> None:
        if isinstance(message, Opened):
            self._opened = True
            if self.status == LOADING and self._first_ready():
                self.status = READY
        elif isinstance(message, Told):
            self.metrics.told(message)
            if self.live is not None and message.job == self.live.job:
                self.live.heard(message)
        elif isinstance(message, Remark):
            say(f"{message.job}: {message.text}")
        elif isinstance(message, Ended):
            self._ended(message)
        elif isinstance(message, Gone):
            self._engine_lost()
        elif isinstance(message, str):
            if message == self._busy:
                assert self._engine is not None
                self._engine.send(Stop(message))
            else:
                self._remove(message)

    def _first_ready(self) -> bool:
        return bool(self.shapes) and self.shapes[0].state == "ready"

    def _ended(self, ended: Ended) -> None:
        self._busy, self.live, self._lost = "", None, 0
        if ended.job == _WARM:
            self._warmed(ended)
        elif ended.stopped:
            self._remove(ended.job)
        elif ended.passes and self._tried(ended.job):
            say(f"{ended.job}: {ended.error}; tried again")
            self.jobs.again(lost=ended.job)
        else:
            status = "failed" if ended.error else "completed"
            self.jobs.ended(
                ended.job, self.keep, error=ended.error, result=ended.result
            )
            self.metrics.ended(status, ended.result)
            if self.jobs.get(ended.job) is None:  # deleted as it ended
                self._remove(ended.job)

    def _tried(self, name: str) -> bool:
        """Whether a job may cost one more engine."""
        job = self.jobs.get(name)
        return job is not None and job.tries + 1 < TRIES

    def _warmed(self, ended: Ended) -> None:
        shape, self._warming = self._warming, None
        self._remove(_WARM)
        assert shape is not None
        shape.state = FAILED if ended.error else "ready"
        if ended.error and shape is self.shapes[0]:
            self._fail(ended.error)
        elif ended.error:
            say(f"{shape.size} with {shape.num_frames} frames: {ended.error}")
        elif shape is self.shapes[0]:
            self.status = READY
            say("ready")

    def _engine_lost(self) -> None:
        name, self._busy, self.live = self._busy, "", None
        say("the engine has ended; another one is started")
        why = f"the engine was lost {TRIES} times with this job"
        if name == _WARM:
            assert self._warming is not None
            self._lost += 1
            if self._lost >= TRIES:
                self._warmed(Ended(job=_WARM, error="no engine survives a video"))
            else:
                self._warming.state = "waiting"
        elif name and not self._tried(name):
            self.jobs.ended(name, self.keep, error=why)
            self.metrics.ended("failed")
        elif name:
            self.jobs.again(lost=name)
        else:
            self._lost += 1
            if self._lost >= TRIES:
                self._fail("no engine can be started")
        if self.status != FAILED:
            self.status = LOADING
            self._start_engine()

    def _stop(self) -> None:
        """End the engine at its next step, with a checkpoint."""
        assert self._engine is not None
        until = time.monotonic() + _PATIENCE
        if self._busy:
            self._engine.send(Stop(self._busy))
        while self._busy and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                message = self._inbox.get(timeout=0.1)
                if isinstance(message, Ended) and not message.stopped:
                    self._ended(message)  # the last step was the last of the job
                elif isinstance(message, Ended | Gone):
                    self._busy = ""

    # --- files

    def _remove(self, name: str) -> None:
        shutil.rmtree(self.place(name), ignore_errors=True)

    def _remove_unknown(self) -> None:
        """Remove the files of jobs that a killed server had forgotten already."""
        places = [p.name for p in self.place(".").glob("*")]
        for name in set(places) - self.jobs.known(places):
            self._remove(name)


def video_name(index: int) -> str:
    """The file of a video of a job, from 0."""
    return f"video-{index}.mp4"
