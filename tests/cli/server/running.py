"""A server in a process of its own, and its clients."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Seconds in which what a test waits for must come.
PATIENCE = 300.0


def until(
    there: Callable[[], Any], patience: float = PATIENCE, pause: float = 0.1
) -> Any:
    """What is there, once it is."""
    end = time.monotonic() + patience
    while not (found := there()):
        assert time.monotonic() < end, "nothing came"
        time.sleep(pause)
    return found


class Running:
    """``tpuport serve`` on a port of its own.

    Args:
        place: the working folder; the log is there.
        flags: of the command.
        environment: on top of this process's.
    """

    def __init__(
        self, place: Path, *flags: str | Path, environment: dict[str, str]
    ) -> None:
        self.log = place / "serve.log"
        with self.log.open("ab") as log:
            begin = log.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tpuport", "serve", "--port", "0", *flags],
                cwd=place,
                env=os.environ | environment,
                stderr=log,
                stdout=log,
                # A shell that starts the tests in the background ignores Ctrl-C.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self._begin = begin
        try:
            said = until(self._address)
        except BaseException:
            self.kill()
            raise
        self.port = int(said[1])

    def _address(self) -> re.Match[str] | None:
        assert self.process.poll() is None, self.said
        return re.search(r"serving on http://127\.0\.0\.1:(\d+)", self.said)

    @property
    def said(self) -> str:
        """What this server has told people."""
        return self.log.read_bytes()[self._begin :].decode()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, path: str, given: Any = None, *, method: str | None = None, key: str = ""
    ) -> tuple[int, Any]:
        """The code of an answer, and its document or its bytes."""
        data = None if given is None else json.dumps(given).encode()
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                code, body = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            code, body = error.code, error.read()
        with contextlib.suppress(ValueError):
            return code, json.loads(body)
        return code, body

    def ready(self) -> Any:
        """``/ready``, once it says so."""

        def found() -> Any:
            assert self.process.poll() is None, self.said
            code, document = self.ask("/ready")
            assert document["status"] != "failed", document
            return document if code == 200 else None

        return until(found, 3 * PATIENCE)

    def create(self, **given: Any) -> str:
        """The id of a new job."""
        code, job = self.ask("/v1/videos", given)
        assert code == 200, job  # 507: the disk has less than 1 GiB
        return str(job["id"])

    def job(self, name: str) -> Any:
        return self.ask(f"/v1/videos/{name}")[1]

    def done(self, name: str, pause: float = 0.1) -> Any:
        """A job, once it has ended."""

        def found() -> Any:
            job = self.job(name)
            return job if job.get("status") in ("completed", "failed") else None

        return until(found, pause=pause)

    def video(self, name: str, query: str = "") -> bytes:
        """The bytes of a video that is done."""
        code, body = self.ask(f"/v1/videos/{name}/content{query}")
        assert code == 200, body
        assert isinstance(body, bytes)
        return body

    def kill(self) -> None:
        """As the machine does that runs out of memory."""
        self.process.kill()
        self.process.wait()

    def end(self, signum: signal.Signals = signal.SIGTERM) -> int:
        """The exit code after a signal."""
        self.process.send_signal(signum)
        return self.process.wait(PATIENCE)


@contextlib.contextmanager
def running(
    place: Path, *flags: str | Path, environment: dict[str, str]
) -> Iterator[Running]:
    """A server that ends with the block."""
    server = Running(place, *flags, environment=environment)
    try:
        yield server
    finally:
        server.kill()
