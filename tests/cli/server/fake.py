"""A small server of the contract in docs/serve.md, in this process, for its clients."""

from __future__ import annotations

import email.parser
import email.policy
import hashlib
import json
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from PIL import Image

from tpuport.core.files.sealed_json import sidecar_bytes

SHAPE = {"size": "96x64", "num_frames": 9, "fps": 8.0, "seconds": "1.125"}


@dataclass
class Job:
    """A job: its document, and what was uploaded for it."""

    document: dict[str, Any]
    image: bytes | None = None


@dataclass
class Fake:
    """Jobs outlive the socket, as those of a server that is started again.

    Attributes:
        video, preview: bytes of all videos and previews.
        key: that requests must have; empty for none.
        pace: seconds that a step takes; a step waits while ``held`` is set.
        asked: method, path and headers of every request.
        answers: statuses that the next requests get in place of an answer.
        lost: so many answers to new jobs never arrive.
        moved: the address of another server, that every answer names.
    """

    video: bytes
    preview: bytes
    key: str = ""
    pace: float = 0.01
    jobs: dict[str, Job] = field(default_factory=dict)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    lost: int = 0
    moved: str = ""
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    port: int = 0

    def __post_init__(self) -> None:
        self.held = threading.Event()
        self._ended = threading.Event()
        self._http: ThreadingHTTPServer | None = None
        threading.Thread(target=self._engine, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, at the port of the last time."""
        fake = self

        class Handler(_Handler):
            server_of = fake

        self._http = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.01,)).start()

    def stop(self) -> None:
        """Be gone: nothing listens."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def end(self) -> None:
        self.stop()
        self._ended.set()

    def add(self, fields: dict[str, Any], image: bytes | None) -> dict[str, Any]:
        """A new job, last in the queue."""
        seed, count = int(fields.get("seed", 0)), int(fields.get("n", 1))
        about = {
            "stage": None,
            "step": 0,
            "seconds_left": None,
            "preview": False,
            "steps": int(fields.get("num_inference_steps", 10)),
            "position": 1,
            "seeds": list(range(seed, seed + count)),
            "num_frames": 9,
            "fps": 8.0,
            "settings": fields,
            "stages": None,
            "total_seconds": None,
            "peak_host_bytes": None,
            "peak_device_bytes": None,
        }
        document = {
            "id": f"video_{secrets.token_hex(8)}",
            "object": "video",
            "model": "fake",
            "status": "queued",
            "progress": 0,
            "error": None,
            "created_at": int(time.time()),
            "completed_at": None,
            "expires_at": None,
            "prompt": fields["prompt"],
            "size": "96x64",
            "seconds": "1.125",
            "remixed_from_video_id": None,
            "tpuport": about,
        }
        self.jobs[document["id"]] = Job(document, image)
        return document

    def _engine(self) -> None:
        while not self._ended.wait(self.pace):
            waits = [j.document for j in list(self.jobs.values())]
            open_jobs = [d for d in waits if d["status"] in ("queued", "in_progress")]
            for place, document in enumerate(open_jobs):
                if document["status"] == "queued":
                    document["tpuport"]["position"] = place + 1
            if open_jobs and not self.held.is_set():
                self._step(open_jobs[0])

    def _step(self, document: dict[str, Any]) -> None:
        about = document["tpuport"]
        if document["status"] == "queued":
            document["status"] = "in_progress"
            about |= {"position": None, "stage": "encode"}
        elif about["stage"] == "encode":
            about["stage"] = "denoise"
        elif about["step"] < about["steps"]:
            about["step"] += 1
            about["preview"] = True
            document["progress"] = 100 * about["step"] // about["steps"]
        elif "fail" in document["prompt"]:
            document["error"] = {"code": "failed", "message": "the frames are NaN"}
            document["status"] = "failed"
        else:
            about |= {"stages": {"encode": 0.1, "denoise": 1.0}, "total_seconds": 1.1}
            about |= {"preview": False, "peak_host_bytes": 2**30}
            document |= {"status": "completed", "completed_at": int(time.time())}


class _Handler(BaseHTTPRequestHandler):
    """One request a connection, so that none outlives the socket."""

    server_of: Fake

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def _send(self, status: int, body: Any, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(data)

    def _refuse(self, status: int, said: str, param: str | None = None) -> None:
        error = {"message": said, "type": "error", "param": param, "code": None}
        self._send(status, {"error": error})

    def _answers(self) -> None:
        fake = self.server_of
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        fake.asked.append((self.command, self.path, dict(self.headers)))
        if fake.moved:
            self.send_response(302)
            self.send_header("Location", fake.moved + self.path)
            return self.end_headers()
        if fake.answers:
            return self._refuse(fake.answers.pop(0), "the server is not up")
        if fake.key and self.headers.get("Authorization") != f"Bearer {fake.key}":
            return self._refuse(401, "no such key")
        path = urlsplit(self.path)
        asked = {name: one[0] for name, one in parse_qs(path.query).items()}
        match (self.command, *path.path.strip("/").split("/")):
            case "POST", "v1", "videos":
                self._create(body)
            case "GET", "v1", "videos", name if name in fake.jobs:
                self._send(200, fake.jobs[name].document)
            case "GET", "v1", "videos", name, "content" if name in fake.jobs:
                self._content(fake.jobs[name], asked.get("variant", "video"))
            case "DELETE", "v1", "videos", name if name in fake.jobs:
                del fake.jobs[name]
                self._send(200, {"id": name, "deleted": True})
            case _:
                self._refuse(404, "no such job")
        return None

    do_GET = do_POST = do_DELETE = _answers

    def _create(self, body: bytes) -> None:
        kind, image = self.headers["Content-Type"], None
        if kind.startswith("multipart/"):
            fields, image = _form(kind, body)
        else:
            fields = json.loads(body)
        if fields.get("size", "96x64") != "96x64":
            return self._refuse(400, "'8x8' is not ready; ready: 96x64", "size")
        fake, key = self.server_of, self.headers["Idempotency-Key"]
        if key not in fake.keys:
            fake.keys[key] = fake.add(fields, image)
        if fake.lost:
            fake.lost -= 1
            return self.connection.shutdown(socket.SHUT_RDWR)
        return self._send(200, fake.keys[key])

    def _content(self, job: Job, variant: str) -> None:
        if variant == "video":
            self._send(200, self.server_of.video, "video/mp4")
        elif variant == "preview":
            self._send(200, self.server_of.preview, "image/png")
        elif job.image is None:
            self._send(200, {"sidecar of": job.document["prompt"]})
        else:
            named = {"request": {"flags": {"image": "/srv/image.png"}}}
            named["inputs"] = {"/srv/image.png": hashlib.sha256(job.image).hexdigest()}
            self._send(200, sidecar_bytes(named))


def _form(kind: str, body: bytes) -> tuple[dict[str, Any], bytes | None]:
    parser = email.parser.BytesParser(policy=email.policy.HTTP)
    message = parser.parsebytes(f"Content-Type: {kind}\r\n\r\n".encode() + body)
    fields: dict[str, Any] = {}
    image = None
    for part in message.iter_parts():  # type: ignore[attr-defined]
        name = part.get_param("name", header="content-disposition")
        if part.get_filename():
            image = part.get_payload(decode=True)
        else:
            fields[name] = part.get_payload(decode=True).decode()
    return fields, image


def picture() -> Image.Image:
    """Of one colour."""
    return Image.fromarray(np.full((16, 16, 3), (200, 60, 20), np.uint8))
