"""Gives requests to replicas until each is done or has failed."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from tpuport.cli.asked.first import check_read
from tpuport.cli.asked.settings import Settings
from tpuport.cli.batches.folder import BatchFolder
from tpuport.cli.batches.local import Ended, Replicas
from tpuport.cli.batches.packs import Pack, lines, packs, smaller
from tpuport.cli.batches.requests import RUNS, Request, read_requests
from tpuport.cli.runs.variants import check_model
from tpuport.cli.shown.output import say
from tpuport.core.files.atomic import one_line
from tpuport.core.files.stores import AnyPath
from tpuport.core.reports import plural
from tpuport.core.run.progress import Display
from tpuport.errors import StoreError, TpuportError, UsageError, in_one_line

#: Replicas that a request may lose before it is given up.
TRIES = 3
#: Requests that are looked up at a time; a store answers each after a while.
_LOOKS = 16
#: Lines with errors that are told at once.
_TOLD = 3


@dataclass(kw_only=True)
class Batch:
    """The requests of a file, and what became of them.

    Attributes:
        folder: held while the batch runs.
        before: requests whose videos were there.
        waiting: requests by shape, in the order of the file.
        repeated: lines that ask for the same as an earlier one.
        made, failed: how many requests.
    """

    folder: BatchFolder
    before: int = 0
    waiting: dict[str, deque[Request]] = field(default_factory=dict)
    repeated: int = 0
    made: int = 0
    failed: int = 0
    _given_up: int = 0
    _tries: Counter[str] = field(default_factory=Counter)
    _at_work: dict[int, Pack] = field(default_factory=dict)
    _last: dict[int, Request] = field(default_factory=dict)
    #: Shapes that are not packed: of each, requests of a call that failed, and that are
    #: not made yet. One that fails alone was to blame; once all are made, packing was.
    _alone: dict[str, set[str]] = field(default_factory=dict)
    #: Requests that are not packed again.
    _split: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, text: str, name: str, folder: BatchFolder, below: Settings) -> Batch:
        """The requests of a text, without what is done; bad lines are noted.

        Args:
            name: of the text, for messages.

        Raises:
            UsageError: it has no request.
        """
        batch = cls(folder=folder)
        errors: list[tuple[int, str | None, str]] = []
        by_key: dict[str, Request] = {}
        owner: dict[AnyPath, int] = {folder.path / RUNS: 0}
        for one in read_requests(text, folder.path, below):
            if not isinstance(one, Request):
                errors.append((one[0], None, one[1]))
                continue
            first = by_key.get(one.key)
            if first and (first.digest, first.paths) == (one.digest, one.paths):
                batch.repeated += 1
                continue
            taken = [owner[path] for path in one.paths if path in owner]
            if first or taken:
                line = first.line if first else taken[0]
                what = f"id {one.key!r}" if first else f"a video of {one.key!r}"
                whose = f"that of line {line}" if line else "a folder of the batch"
                errors.append((one.line, one.key, f"{what} is {whose}; give another"))
                continue
            by_key[one.key] = one
            owner |= dict.fromkeys(one.paths, one.line)
        if not by_key and not errors:
            raise UsageError(f"{name} has no requests; write a JSON object on a line")
        batch._sort(by_key.values(), errors, overwrite=below.overwrite)
        return batch

    def _sort(
        self,
        requests: Any,
        errors: list[tuple[int, str | None, str]],
        *,
        overwrite: bool,
    ) -> None:
        """Find what is done, and note the lines with errors."""
        done: list[dict[str, Any]] = []
        unfinished: set[str] = set()
        requests = list(requests)
        with ThreadPoolExecutor(_LOOKS) as pool:
            there = list(pool.map(self.folder.finished, requests))
        for request, found in zip(requests, there, strict=True):
            if found is not None:
                done += found
                self.before += 1
                continue
            try:
                _check(request.settings)
                self.folder.clear(request, overwrite=overwrite)
            except StoreError:  # of the folder: every line would fail
                raise
            except (TpuportError, OSError) as error:
                errors.append((request.line, request.key, one_line(error)))
                continue
            unfinished |= set(map(self.folder.name_of, request.paths))
            run_dir = self.folder.run_dir(request)
            own = replace(request.settings, run_dir=run_dir)
            own = replace(request, settings=own)
            self.waiting.setdefault(request.shape, deque()).append(own)
        self.folder.begin(done, unfinished)
        errors.sort(key=lambda one: one[0])
        for line, key, why in errors:
            self._fail(line, key, why)
        if errors:
            say(f"{plural(len(errors), 'line')} with errors, left out:")
        for line, _, why in errors[:_TOLD]:
            told = f"line {line}: {why.removeprefix(f'line {line}: ')}"
            say(f"  {in_one_line(told)}")
        if left := len(errors[_TOLD:]):
            say(f"  and {left} more in {self.folder.errors}")

    @property
    def left(self) -> int:
        """Requests that wait."""
        return sum(map(len, self.waiting.values()))

    def run(self, replicas: Replicas, display: Display) -> None:
        """Have every request made."""
        total = self.before + self.left
        if not self.left:
            return
        self.folder.used()
        waiting = [one for queue in self.waiting.values() for one in queue]
        if count := sum(
            _has_file(r) and (r.settings.batch_size or 1) > 1 for r in waiting
        ):
            display.say(
                f"--batch-size: {plural(count, 'request')} from an image, a video or "
                "--latents, each made alone"
            )
        display.stage_started("batch", total, "video")
        display.advanced("batch", self.before, total)
        while self.left or self._at_work:
            for number in replicas.idle():
                pack = self._next(number)
                if not pack:
                    break
                self.folder.check()
                self._at_work[number], self._last[number] = pack, pack[0]
                replicas.begin(number, pack)
            words = f"{sum(map(len, self._at_work.values()))} running"
            display.counted(words + f", {self.failed} failed" * bool(self.failed))
            for ended in replicas.wait():
                self._ended(ended, display)
                done = self.before + self.made
                display.advanced("batch", done, max(done, total - self._given_up))
            display.mind()
        display.idle()

    def _next(self, replica: int) -> Pack:
        """Requests for a replica: of the shape or the pipeline that it has, if any.

        Else of the shape that most requests wait for, with the fewest replicas.
        """
        if not self.left:
            return ()
        last = self._last.get(replica)
        busy = Counter(pack[0].shape for pack in self._at_work.values())

        def rank(shape: str) -> tuple[bool, bool, float]:
            queue = self.waiting[shape]
            same = last is not None and last.shape == shape
            opened = last is not None and last.pipeline == queue[0].pipeline
            return same, opened, len(queue) / (1 + busy[shape])

        shape = max(self.waiting, key=rank)
        queue = self.waiting[shape]
        pack = self._first(queue)
        for one in pack:
            queue.remove(one)
        if not queue:
            del self.waiting[shape]
        if self._alone.get(shape) == set():
            pack = tuple(smaller(pack)) or pack
        return pack

    def _first(self, queue: deque[Request]) -> Pack:
        """The first request of a queue, and those that are made together with it."""
        first = queue[0]
        size = first.settings.batch_size or 1
        if first.shape in self._alone or first.key in self._split:
            return (first,)
        alike = (r for r in queue if r.alike == first.alike)
        free = (r for r in alike if r.key not in self._split)
        return packs(islice(free, size), size)[0]

    def _ended(self, ended: Ended, display: Display) -> None:
        for remark in ended.remarks:
            display.say(remark)
        pack = self._at_work.pop(ended.replica)
        if ended.lost:
            self._last.pop(ended.replica, None)
        pack = tuple(one for one in pack if not self._is_made(one))
        if not pack:
            return
        for one in pack:
            self._tries[one.key] += 1
        tries = max(self._tries[one.key] for one in pack)
        error = ended.error or "the videos are not where they were written"
        if ended.lost and tries < TRIES:
            display.say(f"{lines(pack)}: {error}; tried again")
            self._again(pack)
            return
        if alone := smaller(pack):
            display.say(f"{lines(pack)}: not in one call ({error}); each made alone")
            self._apart(alone)
            self._again(alone)
            return
        if ended.lost:
            error += f"; given up after {tries} tries"
        (request,) = pack
        self._given_up += 1
        if request.key in self._alone.get(request.shape, ()):
            del self._alone[request.shape]
        self._fail(request.line, request.key, error, tries)
        display.say(f"line {request.line}: {error}")

    def _is_made(self, request: Request) -> bool:
        """Whether the videos of a request are there, which is noted."""
        records = self.folder.finished(request)
        if records is None:
            return False
        self.folder.done(records)
        self.made += 1
        self._alone.get(request.shape, set()).discard(request.key)
        return True

    def _again(self, requests: Sequence[Request]) -> None:
        """Let requests be the next ones of their shape."""
        queue = self.waiting.setdefault(requests[0].shape, deque())
        queue.extendleft(reversed(requests))

    def _apart(self, requests: Sequence[Request]) -> None:
        """Let the requests of a call that failed be made alone."""
        keys = {one.key for one in requests}
        self._split |= keys
        self._alone.setdefault(requests[0].shape, keys)
        for key in keys:
            del self._tries[key]

    def _fail(self, line: int, key: str | None, error: str, tries: int = 1) -> None:
        self.failed += 1
        self.folder.failed(line, key, error, tries)

    def told(self) -> str:
        """What became of the requests, in words."""
        text = f"{plural(self.before + self.made, 'request')} done"
        if self.before:
            some = f", {self.before} of them" * bool(self.made)
            text += f"{some} by an earlier run"
        text += f", {self.failed} failed" * bool(self.failed)
        return text + f", {self.left} left" * bool(self.left)

    def document(self, started: float, replicas: int) -> dict[str, Any]:
        """JSON-ready, for ``--json``."""
        return {
            "command": "batch",
            "out": str(self.folder.path),
            "replicas": replicas,
            "requests": self.before + self.made + self.failed + self.left,
            "done": self.before + self.made,
            "made": self.made,
            "failed": self.failed,
            "repeated": self.repeated,
            "seconds": round(time.perf_counter() - started, 3),
            "results": str(self.folder.results),
            "errors": str(self.folder.errors) if self.failed else None,
        }


def _check(settings: Settings) -> None:
    """Refuse a request as far as no library is needed."""
    check_read(settings, opened=False)
    check_model(settings)


def _has_file(request: Request) -> bool:
    """Whether a request is made alone because of a file."""
    return request.alone and bool(request.settings.prompt)
