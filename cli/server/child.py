"""The processes beside the server: one makes videos, one checks requests.

Tracing holds Python's lock for seconds, and a compiler or a full memory may end a
process. So neither is done in the process that answers.
"""

from __future__ import annotations

import abc
import contextlib
import io
import os
import queue
import signal
import threading
from collections import deque
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from tpuport.cli.asked.environment import import_libraries, prepare
from tpuport.cli.batches.folder import BatchFolder
from tpuport.cli.batches.packs import run_dir
from tpuport.cli.batches.requests import Request
from tpuport.cli.server.messages import (
    PREVIEW,
    SHEET,
    THUMBNAIL,
    Check,
    Checked,
    Ended,
    Make,
    Opened,
    Remark,
    Stop,
    Told,
)
from tpuport.cli.shown.errors import may_pass
from tpuport.cli.shown.output import told
from tpuport.core.enums import StageName
from tpuport.core.files.atomic import atomic_write_bytes
from tpuport.core.files.sources import read_video
from tpuport.core.reports import CompileReport, Reporter, RunReport
from tpuport.errors import in_one_line
from tpuport.kernels.attention.choice import AttentionChoice

MAKES, CHECKS = "makes", "checks"
#: Pixels of a picture's longer side, and frames of a sheet and of a row of it.
_SIDE, _FRAMES, _ROW = 320, 16, 4


def run(connection: Connection, role: str, debug: bool) -> None:
    """Do what is asked until nobody is there to ask.

    Args:
        role: :data:`MAKES` or :data:`CHECKS`; the latter runs on the CPU.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the server says when
    if role == CHECKS:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.nice(10)
    line = _ToServer(connection)
    if role == MAKES:
        make_videos(line, debug=debug)
    _begin(line, debug=debug)
    while True:
        line.send(_checked(line.asked.get()))


def make_videos(line: Line, *, debug: bool) -> NoReturn:
    """Make what is asked for, and tell how far it is."""
    _begin(line, debug=debug)
    from tpuport.cli.runs.many import Engine

    events = _Events(line)
    with Engine(events) as engine, told(events.say):
        while True:
            ended = _made(engine, events, line.asked.get())
            line.stopped.discard(ended.job)
            line.send(ended)


def _begin(line: Line, *, debug: bool) -> None:
    prepare(debug=debug)
    import_libraries(Reporter())
    line.send(Opened())


class Line(abc.ABC):
    """What a process hears of the server, and tells the server.

    Attributes:
        asked: what is to be done.
        stopped: jobs that nobody wants any more.
    """

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stopped: set[str] = set()

    @abc.abstractmethod
    def send(self, message: Any) -> None:
        """Tell the server."""

    def take(self, message: Any) -> None:
        """Hear the server."""
        if isinstance(message, Stop):
            self.stopped.add(message.job)
        else:
            self.asked.put(message)


class _ToServer(Line):
    """The connection to the server; the process ends with it."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection, self._lock = connection, threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: Any) -> None:
        """Tell the server."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(message)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self.take(self._connection.recv())
        os._exit(0)  # checkpoints are whole at any time


class _Events(Reporter):
    """Tells the server how far a job is, and ends one that is stopped."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._said: deque[str] = deque(maxlen=100)
        self.job, self.call, self.stage = "", 0, ""

    @property
    def stopped(self) -> set[str]:
        """The jobs that nobody wants any more."""
        return self._line.stopped

    def mind(self) -> None:
        """End the job if that was asked for.

        Raises:
            Stopped: it was.
        """
        if self.job in self.stopped:
            from tpuport.cli.runs.many import Stopped

            raise Stopped("stopped")

    def _tell(self, what: str, **more: Any) -> None:
        self.mind()
        about = Told(job=self.job, what=what, call=self.call, **more)
        self._line.send(about)

    def say(self, text: str) -> None:
        """A line for people, once."""
        if text not in self._said and not text.startswith("preview: "):
            self._said.append(text)
            self._line.send(Remark(self.job, text))

    def loading(self, component: str) -> None:
        """Weights are read."""
        self._tell("loading")

    def began(self, what: str) -> None:
        """Work begins, such as to load the pipeline."""
        if what.startswith("loading"):
            self._tell("loading")

    def compiling(self, stage: str, program: str) -> None:
        """A program is traced and compiled."""
        self._tell("compiling")

    def compiled(self, report: CompileReport) -> None:
        """A program is compiled."""
        self._tell(self.stage, compiled=report.seconds)

    def stage_started(self, stage: str, total: int, unit: str) -> None:
        """A stage begins."""
        self.stage = stage
        self._tell(stage, total=total)

    def advanced(self, stage: str, done: int, total: int) -> None:
        """Calls ended."""
        self._tell(stage, done=done, total=total)


def _made(engine: Any, events: _Events, make: Make) -> Ended:
    """Make the videos of a job, or of several."""
    events.job, events.call = make.job, 0
    reports: list[RunReport] = []
    frames = 0
    try:
        for events.call, pack in enumerate(make.packs):
            events.mind()
            if not all(map(_is_there, pack)):
                given = [(one.settings, one.digest) for one in pack]
                shown = [_video(one).with_name(PREVIEW) for one in pack]
                report = engine.make_pack(given, run_dir(pack), shown, make.plain)
                reports.append(report)
            for one in pack:
                frames = _write_pictures(_video(one))
    except Exception as error:
        if make.job in events.stopped:
            return Ended(job=make.job, stopped=True)
        why = in_one_line(error) or type(error).__name__
        return Ended(job=make.job, error=why, passes=may_pass(error))
    denoise = tuple(
        sum(s.total_seconds for s in report.stages if s.stage == StageName.DENOISE)
        for report in reports
    )
    result = {"frames": frames, **_result(reports)}
    return Ended(job=make.job, result=result, denoise=denoise)


def _video(request: Request) -> Path:
    (video,) = request.paths
    assert isinstance(video, Path)
    return video


def _is_there(request: Request) -> bool:
    """Whether the video of a request is."""
    return BatchFolder(_video(request).parent).finished(request) is not None


def _write_pictures(video: Path) -> int:
    """Write ``fox.webp`` and ``fox.jpg`` beside ``fox.mp4``: a frame, and a sheet.

    Returns:
        How many frames the video has.
    """
    from PIL import Image

    frames = read_video(str(video))
    count = min(len(frames), _FRAMES)
    last = max(count - 1, 1)
    taken = [frames[round(n * (len(frames) - 1) / last)].copy() for n in range(count)]
    for frame in taken:
        frame.thumbnail((_SIDE, _SIDE))
    across = min(count, _ROW)
    width, height = taken[0].size
    sheet = Image.new("RGB", (width * across, height * -(-count // across)))
    for number, frame in enumerate(taken):
        row, column = divmod(number, across)
        sheet.paste(frame, (column * width, row * height))
    for ending, picture in ((THUMBNAIL, taken[0]), (SHEET, sheet)):
        file = io.BytesIO()
        picture.save(file, {THUMBNAIL: "webp", SHEET: "jpeg"}[ending], quality=85)
        atomic_write_bytes(video.with_suffix(ending), file.getvalue())
    return len(frames)


def _result(reports: list[RunReport]) -> dict[str, Any]:
    """What is told of a job that is done; of what a lost engine did, nothing."""
    stages: dict[str, float] = {}
    for report in reports:
        for stage in report.stages:
            stages[stage.stage] = stages.get(stage.stage, 0.0) + stage.total_seconds
    devices = [r.peak_device_bytes for r in reports if r.peak_device_bytes is not None]
    return {
        "stages": {name: round(seconds, 3) for name, seconds in stages.items()},
        "total_seconds": round(sum(r.total_seconds for r in reports), 3),
        "peak_host_bytes": max((r.peak_host_bytes for r in reports), default=None),
        "peak_device_bytes": max(devices, default=None),
    }


def _checked(check: Check) -> Checked:
    """Check as ``generate`` checks; the mesh is checked once, by the engine."""
    from tpuport.cli.runs.variants import with_model
    from tpuport.cli.runs.video_run import VideoRun, find
    from tpuport.core.pipelines.call_arguments import default_of

    own: dict[str, Any] = {"mesh": None, "executables": None}
    own["attention"] = AttentionChoice()
    try:
        with told(lambda text: None):
            settings = with_model(replace(check.settings, **own))
            folder = find(settings, Reporter())
            made = VideoRun.prepared(settings, folder, Reporter())
            made.outputs("")
    except Exception as error:
        why = in_one_line(error) or type(error).__name__
        return Checked(number=check.number, error=why)
    asked = made.asked
    steps = asked["num_inference_steps"] or 1
    guidance = made.settings.guidance_scale
    if guidance is None:
        guidance = default_of(made.folder, "guidance_scale")
    facts = {**asked, "guidance_scale": guidance, "steps": steps, "fps": made.fps}
    return Checked(number=check.number, facts=facts)
