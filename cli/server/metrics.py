"""What ``/metrics`` tells, in the words of Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from tpuport.cli.server.messages import Told
from tpuport.core.enums import StageName

#: Seconds of a stage.
_BUCKETS = (0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """Counts of one server, since it started."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self._requests = Counter(
            "tpuport_requests", "Answers over HTTP.", ["method", "code"], registry=own
        )
        self._queue = Gauge("tpuport_queue", "Jobs that wait.", registry=own)
        self._running = Gauge("tpuport_running", "Jobs that run.", registry=own)
        self._engines = Gauge(
            "tpuport_engines", "Engines that take jobs.", registry=own
        )
        self._ended = Counter("tpuport_jobs", "Jobs ended.", ["status"], registry=own)
        self._steps = Counter("tpuport_steps", "Denoising steps.", registry=own)
        self._stages = Histogram(
            "tpuport_stage_seconds",
            "Seconds of a stage of a job, or of jobs that share calls.",
            ["stage"],
            registry=own,
            buckets=_BUCKETS,
        )
        self._programs = Counter(
            "tpuport_programs", "Programs made ready.", registry=own
        )
        self._compile = Counter(
            "tpuport_compile_seconds", "Seconds of making them ready.", registry=own
        )
        self._memory = Gauge(
            "tpuport_peak_bytes",
            "The most memory of the engine since it started.",
            ["where"],
            registry=own,
        )

    def answered(self, method: str, code: int) -> None:
        """A request was answered."""
        known = method if method in ("GET", "POST", "DELETE", "HEAD") else "other"
        self._requests.labels(known, code).inc()

    def told(self, told: Told) -> None:
        """The engine has told of something."""
        if told.compiled is not None:
            self._programs.inc()
            self._compile.inc(max(told.compiled, 0.0))
        elif told.what == StageName.DENOISE and told.done:
            self._steps.inc()

    def ended(self, status: str) -> None:
        """A job is done or has failed."""
        self._ended.labels(status).inc()

    def made(self, result: dict[str, Any]) -> None:
        """An engine has made the videos of a job, or of jobs that share calls."""
        for stage, seconds in result.get("stages", {}).items():
            self._stages.labels(stage).observe(seconds)
        for where in ("host", "device"):
            if (found := result.get(f"peak_{where}_bytes")) is not None:
                self._memory.labels(where).set(found)

    def text(self, queued: int, running: int, engines: int) -> bytes:
        """All of it."""
        self._queue.set(queued)
        self._running.set(running)
        self._engines.set(engines)
        return generate_latest(self.registry)
