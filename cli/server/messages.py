"""What a server and its processes say to each other, and what it tells a client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tpuport.cli.asked.settings import Settings
from tpuport.cli.batches.packs import Pack

#: What an engine writes beside a video: frames while steps run, and endings of files.
PREVIEW, THUMBNAIL, SHEET = "preview.png", ".webp", ".jpg"

#: HTTP's codes by the type that clients are told.
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found"}

#: Characters of a message.
_LONGEST = 1000


@dataclass(frozen=True, kw_only=True)
class Make:
    """Make videos, one call after the other.

    Attributes:
        job: names them in what is told.
        packs: the requests of each call, each with one video and a run directory.
        plain: whether frames of one colour will do, since the programs alone count.
    """

    job: str
    packs: tuple[Pack, ...]
    plain: bool = False


@dataclass(frozen=True)
class Stop:
    """Stop to make the videos of a job."""

    job: str


@dataclass(frozen=True)
class Check:
    """Find out whether a video can be made."""

    number: int
    settings: Settings


@dataclass(frozen=True)
class Opened:
    """The process has imported what it needs."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """How far a job is.

    Attributes:
        what: a stage, ``loading`` or ``compiling``.
        call: from 0.
        done, total: calls of a stage.
        compiled: seconds of a program that was made ready.
    """

    job: str
    what: str
    call: int
    done: int = 0
    total: int = 0
    compiled: float | None = None


@dataclass(frozen=True)
class Remark:
    """A line for people."""

    job: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that the engine has no more to do with.

    Attributes:
        error: in one line; empty where the videos are there.
        passes: the same job may succeed when it is tried again.
        stopped: as was asked.
        result: frames of a video, stage seconds and peaks.
        denoise: seconds of the steps of each call.
    """

    job: str
    error: str = ""
    passes: bool = False
    stopped: bool = False
    result: dict[str, Any] = field(default_factory=dict)
    denoise: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a check has found.

    Attributes:
        error: why the video cannot be made; empty if it can.
        facts: ``width``, ``height``, ``num_frames``, ``num_inference_steps`` and
            ``guidance_scale``, each ``None`` where the pipeline has no such parameter;
            ``steps`` and ``fps``.
    """

    number: int
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Gone:
    """The process has ended."""


class Refused(Exception):
    """An answer that is an error.

    Args:
        status: HTTP's code.
        message: one line for people.
        param: the field that is at fault.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = _sendable(message)[:_LONGEST]
        self.param = None if param is None else _sendable(param)[:100]

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = _TYPES.get(self.status)
        if kind is None:
            kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": None,
            }
        }


def _sendable(text: str) -> str:
    """A text that is UTF-8, whatever a client has sent."""
    return text.encode("utf-8", "replace").decode()
