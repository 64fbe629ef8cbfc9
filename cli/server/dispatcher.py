"""Gives engines one job after the other, and keeps what is known of each."""

from __future__ import annotations

import collections
import contextlib
import functools
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpuport.cli.asked.settings import Settings
from tpuport.cli.batches.packs import Pack
from tpuport.cli.batches.requests import Request
from tpuport.cli.server.fields import Batch, Shape
from tpuport.cli.server.jobs import Job, Jobs
from tpuport.cli.server.messages import Ended, Gone, Opened, Remark, Told
from tpuport.cli.server.metrics import Metrics
from tpuport.cli.server.work import (
    CALLS,
    COMPILING,
    FAILED,
    LOADING,
    READY,
    Files,
    MakeEngine,
    Slot,
    Warm,
    Work,
    in_calls,
    is_begun,
    sizes_up_to,
)
from tpuport.cli.server.worker import Checks
from tpuport.cli.shown.output import say
from tpuport.core.files.atomic import no_room, one_line
from tpuport.errors import TpuportError

#: Engines that a job may cost.
TRIES = 3
#: Steps of the video that a shape is compiled with: a first, a last and one between.
WARM_STEPS = 3
#: What an engine makes for no job.
_WARM = "warm"
#: Seconds between two looks at what expires; that a running job has for its checkpoint
#: at the end, a step included; and after which the loss of an idle engine is no fault
#: of its start.
_SWEEP, _PATIENCE, _LIVES = 5.0, 100.0, 60.0
#: What SQLite says of a disk that may be written later.
_FOR_NOW = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY)


def _is_full(error: Exception) -> bool:
    """Whether the disk cannot be written for now."""
    code = getattr(error, "sqlite_errorcode", None)
    return no_room(error) or (code is not None and code & 0xFF in _FOR_NOW)


class Dispatcher:
    """Owns the engines: one thread, which hears of everything in one queue.

    Args:
        jobs: the file of jobs.
        folder: where each job has a folder of its own.
        below: what the flags of the server say.
        shapes: those asked for; empty for the default of the model.
        engines: each starts one, and another one when it is lost.
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
        engines: Sequence[MakeEngine],
        keep: float,
        checks: Checks,
        metrics: Metrics,
    ) -> None:
        self.jobs, self.below = jobs, below
        self.files = Files(folder, below)
        self.shapes, self.keep, self.metrics = shapes, keep, metrics
        self.checks = checks
        self.status, self.error = LOADING, ""
        self.image: bool | str = False
        self.defaults: dict[str, Any] = {}
        self._inbox: queue.SimpleQueue[tuple[Slot | None, Any]] = queue.SimpleQueue()
        self.slots = [
            Slot(number, make, self._inbox.put) for number, make in enumerate(engines)
        ]
        self._waiting: list[Warm] = []  # for one engine; each makes the first shape
        self._alone: set[str] = set()  # jobs that share no call any more
        self._unwritten: collections.deque[Callable[[], None]] = collections.deque()
        self._closing = False
        self._swept = 0.0
        self._thread = threading.Thread(target=self._run, name="tpuport-jobs")

    # --- what other threads call

    def start(self) -> None:
        """Begin; what ran when the last server ended goes on first."""
        self.jobs.recover(self.keep)
        self.files.remove_unknown(self.jobs)
        self._thread.start()

    def close(self) -> None:
        """Stop the engines; running jobs are kept and go on with the next server."""
        self._closing = True
        self.checks.close()
        self.wake()
        self._thread.join()
        for slot in self.slots:
            slot.close()

    def wake(self) -> None:
        """There is a new job."""
        self._inbox.put((None, None))

    def deleted(self, name: str) -> None:
        """A job is gone: stop it, and remove its files."""
        self._inbox.put((None, name))

    @property
    def engines_ready(self) -> int:
        """Engines that take jobs."""
        return sum(slot.ready for slot in self.slots)

    def work_of(self, name: str) -> Work | None:
        """The work that a running job is part of."""
        at_work = (slot.work for slot in self.slots)
        return next((w for w in at_work if w is not None and name in w.jobs), None)

    # --- the thread

    def _run(self) -> None:
        try:
            for slot in self.slots:
                slot.start()
            self._look_at_shapes()
            while not self._closing:
                self._look()
                self._settle()
                with contextlib.suppress(queue.Empty):
                    self._hear(*self._inbox.get(timeout=1.0))
            self._stop()
        except Exception as error:
            if not self._closing:
                why = one_line(error) or type(error).__name__
                self._fail(f"the queue ended: {why}")
                if self.below.debug:
                    raise

    def _look(self) -> None:
        """Do what is due; a full disk puts it off."""
        try:
            while self._unwritten:
                self._unwritten[0]()
                self._unwritten.popleft()
            for slot in self.slots:
                if not self._unwritten:
                    self._give(slot)
            if time.monotonic() > self._swept + _SWEEP:
                self._swept = time.monotonic()
                for name in self.jobs.expired():
                    self._forget(name)
                    self.jobs.delete(name)
        except (sqlite3.OperationalError, OSError) as error:
            if not _is_full(error):
                raise
            if not self.error:
                self.error = one_line(error)
                say(f"error: {self.error}; jobs wait until the disk can be written")
        else:
            self.error = self.error if self.status == FAILED else ""

    def _noted(self, write: Callable[..., None], *given: Any, **how: Any) -> None:
        """Write to the file of jobs, now or once the disk can be written."""
        self._unwritten.append(functools.partial(write, *given, **how))
        if len(self._unwritten) == 1:
            try:
                self._unwritten[0]()
                self._unwritten.popleft()
            except sqlite3.OperationalError as error:
                if not _is_full(error):
                    raise

    def _fail(self, why: str) -> None:
        self.status, self.error = FAILED, why
        say(f"error: {why}")

    def _settle(self) -> None:
        """Find what clients are told of the engines."""
        if self.status == FAILED:
            return
        compiling = any(slot.work and not slot.warm for slot in self.slots)
        self.status = COMPILING if compiling else LOADING
        if self.engines_ready:
            self.status = READY

    def _look_at_shapes(self) -> None:
        """Find the size, frames and steps that stand for what is not said."""
        asked = self.shapes or [Shape(None, None, None)]
        for number, shape in enumerate(asked):
            (request,) = self.files.warm_requests(_WARM, shape, 1)
            found = self.checks.check(request.settings, patience=None)
            image = self.files.picture(_WARM, shape, found.facts)
            (request,) = self.files.warm_requests(_WARM, shape, 1, image=str(image))
            taken = self.checks.check(request.settings, patience=None)
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
        self.files.remove(_WARM)
        self.shapes = asked
        self._waiting = [Warm(shape) for shape in asked[1:] if shape.state != FAILED]
        if self.image != "required":  # what has an image shares no call
            sizes = sizes_up_to(self.below.batch_size or 1)
            self._waiting += [Warm(shape, size) for shape in asked for size in sizes]

    def _give(self, slot: Slot) -> None:
        """Give an engine what is next: a job, or after each job a shape."""
        if not slot.opened or slot.work or slot.failed or self.status == FAILED:
            return
        if not slot.warm:
            self._compile(slot, Warm(self.shapes[0]))
            return
        waiting = next((w for w in self._waiting if self._can_compile(w)), None)
        job = None
        if not (waiting and slot.last_was_job):
            job = self.jobs.oldest()
        if job is not None:
            slot.last_was_job = True
            self._begin(slot, job)
        elif waiting is not None:
            slot.last_was_job = False
            self._compile(slot, waiting)
            self._waiting.remove(waiting)
            say(f"{slot.name} {waiting.told()}; its jobs wait")

    def _can_compile(self, warm: Warm) -> bool:
        return warm.shape.state == ("waiting" if warm.size == 1 else "ready")

    def _compile(self, slot: Slot, warm: Warm) -> None:
        shape, name, more = warm.shape, f"{_WARM}-{slot.number}", {}
        self.files.remove(name)  # a call that a lost engine has made is not measured
        if self.image == "required":
            more["image"] = str(self.files.picture(name, shape, {}))
        # One alone and several in turns: a second time all is compiled.
        turns = (1, warm.size) * 2 if warm.size > 1 else (1,)
        steps = min(self.defaults["num_inference_steps"], WARM_STEPS)
        left = [
            replace(one, settings=replace(one.settings, num_inference_steps=steps))
            for one in self.files.warm_requests(name, shape, sum(turns), **more)
        ]
        packs = tuple(tuple(left.pop() for _ in range(turn)) for turn in turns)
        self.files.place(name).mkdir(parents=True, exist_ok=True)
        if shape.state == "waiting":
            shape.state = COMPILING
        slot.give(Work(name, packs, warm=warm))

    def _begin(self, slot: Slot, job: Job) -> None:
        try:
            own = self._requests_of(job)
        except (TpuportError, OSError) as error:  # of its image, say
            if _is_full(error):
                raise
            self._end(job.id, error=one_line(error))
            return
        if own[0].alone or self._is_alone(job):
            self.files.remove_calls(job.id)
            names, packs = [job.id], in_calls(own)
        else:
            names, packs = self._together(job, own)
        for name in names:
            self.files.place(name).mkdir(parents=True, exist_ok=True)
        self.jobs.begin(names)
        slot.give(Work(job.id, packs, tuple(names), steps=job.asked["steps"]))

    def _requests_of(self, job: Job) -> list[Request]:
        """The videos of a job.

        Raises:
            TpuportError: the flags of the server make others of them.
        """
        asked = job.asked
        requests = self.files.requests(job.id, asked["values"], asked["seeds"])
        if [one.digest for one in requests] != asked["digests"]:
            raise TpuportError(
                "the server was started again with other settings, by which the "
                "video would be another one; ask for it again"
            )
        return requests

    # --- several videos in one call

    def _is_alone(self, job: Job) -> bool:
        """Whether a job shares no call: others may not suffer for it any more."""
        one = (self.below.batch_size or 1) == 1
        return one or job.id in self._alone or not self._may_cost(job)

    def _sizes(self, job: Job) -> list[int]:
        """Numbers of videos of the job's shape that pay in one call."""
        size, frames = job.asked["size"], job.asked["num_frames"]
        own = (s for s in self.shapes if (s.size, s.num_frames) == (size, frames))
        return [b.videos for shape in own for b in shape.batches if b.pays]

    def _together(
        self, job: Job, own: list[Request]
    ) -> tuple[list[str], tuple[Pack, ...]]:
        """A job and those of its owner that one call makes with it; and the calls."""
        most, sizes = self.below.batch_size or 1, self._sizes(job)
        names, videos = [job.id], [*own]
        chosen = [job.id], in_calls(own, sizes)
        goes_on = self.files.has_begun(job.id)  # as it was begun, and no other way
        if not goes_on:
            most = max(sizes, default=1)
        for other in self.jobs.queued(job.owner) if len(own) < most else ():
            if other.number <= job.number or self._is_alone(other):
                continue
            if other.asked["values"].get("image"):
                continue
            if not goes_on and self.files.has_begun(other.id):
                continue
            try:
                more = self._requests_of(other)
            except TpuportError:  # told of when it is the other's turn
                continue
            if more[0].alike == own[0].alike and len(videos) + len(more) <= most:
                names.append(other.id)
                videos += more
                begun = is_begun(tuple(videos))
                if begun or (len(videos) in sizes and not goes_on):
                    chosen = [*names], (tuple(videos),)
                if begun or len(videos) >= most:
                    break
        return chosen

    def _apart(self, work: Work, why: str) -> None:
        """Let the jobs of a call that failed be made one by one, as if new."""
        say(f"{', '.join(work.jobs)}: not in one call ({why}); each made alone")
        self._alone.update(work.jobs)
        for name in work.jobs:
            self._again(name, anew=True)

    # --- what engines tell

    def _hear(self, slot: Slot | None, message: Any) -> None:
        if slot is None:
            if message is not None:
                self._stop_deleted(message)
        elif isinstance(message, Opened):
            slot.opened, slot.since = True, time.monotonic()
        elif isinstance(message, Told):
            self.metrics.told(message)
            if slot.work is not None:
                slot.work.heard(message)
        elif isinstance(message, Remark):
            say(f"{message.job}: {message.text}")
        elif isinstance(message, Ended):
            self._ended(slot, message)
        elif isinstance(message, Gone):
            self._engine_lost(slot)

    def _stop_deleted(self, name: str) -> None:
        for slot in self.slots:
            if slot.work is not None and name in slot.work.jobs:
                slot.stop()
                return
        self._forget(name)

    def _ended(self, slot: Slot, ended: Ended) -> None:
        work = slot.work
        assert work is not None
        if work.warm is not None or ended.stopped or ended.error:
            slot.work = None
        if slot.warm:
            slot.lost = 0
        if work.warm is not None:
            self.files.remove(work.name)
            self._warmed(slot, work.warm, ended)
        elif ended.stopped:  # for one that was deleted
            for name in work.jobs:
                self.files.remove_calls(name)
                self._again(name)
        elif ended.error and work.packed:
            self._apart(work, ended.error)
        elif ended.passes and self._may_cost(self.jobs.get(work.name)):
            say(f"{work.name}: {ended.error}; tried again")
            self._again(work.name, lost=True)
        else:
            self.metrics.made(ended.result)
            for name in work.jobs:
                self._end(name, error=ended.error, result=ended.result)
            slot.work = None  # clients saw its steps until the jobs had ended

    def _end(self, name: str, *, error: str = "", result: Any = None) -> None:
        """A job is done or has failed."""
        ended = {"error": error, "result": result}
        self._noted(self.jobs.ended, name, self.keep, **ended)
        if self.jobs.get(name) is None:  # deleted as it ended
            self._forget(name)
            return
        self.metrics.ended("failed" if error else "completed")
        self._alone.discard(name)
        self.files.remove_calls(name, *CALLS)

    def _again(self, name: str, **how: bool) -> None:
        """A job goes back to the queue, unless it was deleted."""
        self._noted(self.jobs.again, name, **how)
        if self.jobs.get(name) is None:
            self._forget(name)

    def _forget(self, name: str) -> None:
        """Nothing stays of a job that is gone."""
        self.files.remove(name)
        self._alone.discard(name)

    def _may_cost(self, job: Job | None) -> bool:
        """Whether a job may cost one more engine."""
        return job is not None and job.tries + 1 < TRIES

    def _warmed(self, slot: Slot, warm: Warm, ended: Ended) -> None:
        shape, first = warm.shape, warm.shape is self.shapes[0] and warm.size == 1
        about = f"{shape.size} with {shape.num_frames} frames"
        if ended.result:
            shape.frames = ended.result["frames"]
        if first and ended.passes:
            say(f"{slot.name}: {ended.error}")
            self._lost_without_a_job(slot, warm, ended.error)
        elif first and ended.error:
            self._slot_failed(slot, ended.error)
        elif first:
            if self.status != READY:
                say("ready")
            slot.warm, slot.lost, shape.state = True, 0, "ready"
        elif warm.size > 1 and ended.error:
            say(f"{about}: no {warm.size} videos in one call: {ended.error}")
        elif warm.size > 1:
            steps = min(self.defaults["num_inference_steps"], WARM_STEPS)
            *_, alone, together = (seconds / steps for seconds in ended.denoise)
            batch = Batch(warm.size, together, alone)
            shape.batches.append(batch)
            say(
                f"{about}: a step of {warm.size} videos takes {together:.4g} s, of one "
                f"{alone:.4g} s; {'' if batch.pays else 'not '}made together"
            )
        else:
            shape.state = FAILED if ended.error else "ready"
            if ended.error:
                say(f"{about}: {ended.error}")

    def _slot_failed(self, slot: Slot, why: str) -> None:
        """An engine cannot do what all must; without any, the server fails."""
        slot.failed = True
        if all(one.failed for one in self.slots):
            self.shapes[0].state = FAILED
            self._fail(why)
        else:
            say(f"{slot.name} has failed: {why}")

    def _engine_lost(self, slot: Slot) -> None:
        work, slot.work = slot.work, None
        if work is None:
            if slot.opened and time.monotonic() > slot.since + _LIVES:
                slot.lost = 0
            self._lost_without_a_job(slot, None, "no engine can be started")
        elif work.warm is not None:
            self._lost_without_a_job(slot, work.warm, "no engine survives a video")
        else:
            self._lost_with_jobs(work)
        ends = slot.failed or self.status == FAILED
        more = "no other one" if ends else "another one"
        say(f"{slot.name} has ended; {more} is started")
        if ends:
            slot.opened = False
        else:
            slot.start()

    def _lost_with_jobs(self, work: Work) -> None:
        found = [self.jobs.get(name) for name in work.jobs]
        left = [job for job in found if job is not None]
        if len(work.jobs) > 1 and any(j.tries + 2 >= TRIES for j in left):
            self._apart(work, f"{TRIES - 1} engines were lost")
            return
        for name, job in zip(work.jobs, found, strict=True):
            if job is None or self._may_cost(job):
                self._again(name, lost=True)
            else:
                self._end(
                    name, error=f"the engine was lost {TRIES} times with this job"
                )

    def _lost_without_a_job(self, slot: Slot, warm: Warm | None, why: str) -> None:
        if warm is not None and slot.warm:
            warm.lost += 1
            if warm.lost >= TRIES:
                self._warmed(slot, warm, Ended(job=_WARM, error=why))
            else:
                if warm.size == 1:
                    warm.shape.state = "waiting"
                self._waiting.insert(0, warm)
            return
        slot.lost += 1
        if slot.lost >= TRIES:
            self._slot_failed(slot, why)

    def _stop(self) -> None:
        """End the engines at their next step, with a checkpoint."""
        until = time.monotonic() + _PATIENCE
        for slot in self.slots:
            slot.stop()
        while any(slot.work for slot in self.slots) and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                whose, message = self._inbox.get(timeout=0.1)
                if whose is None:
                    continue
                if isinstance(message, Ended) and not message.stopped:
                    self._ended(whose, message)  # the last step was that of the job
                elif isinstance(message, Ended | Gone):
                    whose.work = None
        for slot in self.slots:
            if slot.work and slot.work.jobs:
                say(
                    f"{slot.name} has not stopped within {_PATIENCE:.0f} s; its jobs "
                    "go on from their last checkpoint"
                )
