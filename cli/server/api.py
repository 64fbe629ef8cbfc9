"""The paths of the server: what OpenAI's clients call, and what looks at the server."""

from __future__ import annotations

import asyncio
import functools
import re
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from tpuport.cli.asked.settings import Settings
from tpuport.cli.server.bodies import KEY, asked_of, digest_of, key_of
from tpuport.cli.server.dispatcher import Dispatcher
from tpuport.cli.server.fields import (
    IMAGE,
    MOST_VIDEOS,
    Limits,
    Wanted,
    plain,
    seconds_text,
    too_many_steps,
    understood,
)
from tpuport.cli.server.guard import MOST_BODY
from tpuport.cli.server.jobs import COMPLETED, FAILED, QUEUED, RUNNING, Job, new_id
from tpuport.cli.server.messages import SHEET, THUMBNAIL, Refused
from tpuport.cli.server.metrics import Metrics
from tpuport.cli.server.uploads import MOST_PIXELS, image_of, kept_image
from tpuport.cli.server.work import READY, video_name
from tpuport.core.files.sealed_json import sidecar_path
from tpuport.errors import TpuportError, did_you_mean, in_one_line, quoted

#: Bytes of the disk that stay free.
FREE = 1 << 30
#: Requests that are looked at at the same time.
_AT_ONCE = 8
#: Seconds after which a client asks again, of a job and of a full queue.
_POLL, _RETRY = b"500", "5"
_VARIANTS = {
    "video": ("video/mp4", ""),
    "thumbnail": ("image/webp", THUMBNAIL),
    "spritesheet": ("image/jpeg", SHEET),
    "preview": ("image/png", ""),
    "sidecar": ("application/json", ""),
}
_RANGE = re.compile(r"\s*(?:([0-9]{1,18})-([0-9]{0,18})|-[0-9]{1,18})\s*")
#: The page: each file at its name, the first one at /.
_PAGE = ("index.html", "page.css", "page.js")
#: A new version is seen at once, and no other site shows the page in its own.
_OF_PAGE = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


@dataclass(frozen=True, kw_only=True)
class Service:
    """What answers requests.

    Attributes:
        model: its name for clients.
        queue: jobs that may wait.
        urls: images may be addresses.
    """

    dispatcher: Dispatcher
    metrics: Metrics
    model: str
    limits: Limits
    queue: int
    urls: bool
    created: int

    # --- jobs

    def shown(self, job: Job) -> dict[str, Any]:
        """A job as clients read it."""
        live, videos = self.dispatcher.work_of(job.id), len(job.asked["seeds"])
        if live is None and job.status == RUNNING:  # it may have ended meanwhile
            job = self.dispatcher.jobs.get(job.id) or job
        asked, result = job.asked, job.result
        frames = result.get("frames") or asked["num_frames"]
        total, step = asked["steps"] * videos, 0
        if live is not None:
            total, step = live.steps * videos, live.done_of(videos)
        progress = min(int(100 * step / max(total, 1)), 99)
        if job.status == COMPLETED:
            step, progress = total, 100
        preview = (
            job.status == RUNNING and self.dispatcher.files.preview(job.id).exists()
        )
        return {
            "id": job.id,
            "object": "video",
            "model": asked["model"],
            "status": job.status,
            "progress": progress,
            "created_at": int(job.created),
            "completed_at": job.ended and int(job.ended),
            "expires_at": job.expires and int(job.expires),
            "prompt": asked["fields"]["prompt"],
            "size": asked["size"] or "",
            "seconds": seconds_text(frames, asked["fps"]),
            "error": _told(job.error),
            "remixed_from_video_id": None,
            "tpuport": {
                "stage": live.what if live else None,
                "step": step,
                "steps": total,
                "seconds_left": live.seconds_left if live else None,
                "position": self.dispatcher.jobs.position(job)
                if job.status == QUEUED
                else None,
                "preview": preview,
                "seeds": asked["seeds"],
                "num_frames": asked["num_frames"],
                "frames": result.get("frames"),
                "fps": asked["fps"],
                "settings": asked["fields"],
                **{
                    name: result.get(name)
                    for name in (
                        *("stages", "total_seconds"),
                        *("peak_host_bytes", "peak_device_bytes"),
                    )
                },
            },
        }

    def job(self, name: str, owner: str) -> Job:
        """A job of an owner.

        Raises:
            Refused: there is none.
        """
        found = self.dispatcher.jobs.get(name, owner)
        if found is None:
            raise Refused(404, f"there is no video {quoted(name)}")
        return found

    def check_room(self) -> None:
        """Refuse a request before it is looked at.

        Raises:
            Refused: the server is not ready, its queue or its disk is full.
        """
        if self.dispatcher.status != READY:
            why = self.dispatcher.error or (
                f"the server is {self.dispatcher.status}; ask again once /ready "
                "answers 200"
            )
            raise Refused(503, why)
        if self.dispatcher.jobs.count(QUEUED) >= self.queue:
            raise Refused(429, f"{self.queue} jobs wait already; ask again later")
        if shutil.disk_usage(self.dispatcher.files.folder).free < FREE:
            raise Refused(507, "the disk of the server is full")

    def add(
        self, given: dict[str, Any], image: Any, owner: str, once: str | None
    ) -> Job:
        """Check a request as `generate` does, and put it into the queue.

        Args:
            given: its fields.
            image: bytes, an address, or nothing.
            once: a key of the client's; the same request with the same key is the same
                job.

        Raises:
            Refused: it cannot be made, or the key is of another request.
        """
        body = "" if once is None else digest_of(given, image)
        if found := self._before(owner, once, body):
            return found
        made = self.dispatcher
        wanted = understood(
            given,
            model=self.model,
            shapes=made.shapes,
            limits=self.limits,
            below=made.below,
        )
        name, added = new_id(), False
        try:
            asked = self._checked(name, wanted, image)
            job = Job(id=name, owner=owner, asked=asked, once=once, body=body)
            added = made.jobs.add(job, self.queue)
        finally:
            if not added:
                shutil.rmtree(made.files.place(name), ignore_errors=True)
        if added:
            made.wake()
            return self.job(name, owner)
        if found := self._before(owner, once, body):  # it came twice at once
            return found
        raise Refused(429, f"{self.queue} jobs wait already; ask again later")

    def _before(self, owner: str, once: str | None, body: str) -> Job | None:
        """The job that was made of the same request before.

        Raises:
            Refused: the key came with another request.
        """
        found = None if once is None else self.dispatcher.jobs.once(owner, once)
        if found is not None and found.body != body:
            message = f"{KEY}: came with another request before; give each its own"
            raise Refused(422, message, KEY)
        return found

    def _checked(self, name: str, wanted: Wanted, image: Any) -> dict[str, Any]:
        """What a job keeps of a request that can be made."""
        made, values = self.dispatcher, dict(wanted.values)
        if image is not None:
            if not made.image:
                message = f"{IMAGE}: {self.model} starts from no image; leave it out"
                raise Refused(400, message, IMAGE)
            data = (
                image if isinstance(image, bytes) else image_of(image, urls=self.urls)
            )
            values["image"] = str(kept_image(data, made.files.place(name)))
        elif made.image == "required":
            raise Refused(400, f"{IMAGE}: is missing; {self.model} needs one", IMAGE)
        try:
            requests = made.files.requests(name, values, wanted.seeds)
        except TpuportError as error:
            raise _refused(in_one_line(error)) from error
        found = made.checks.check(requests[0].settings)
        if found.error:
            raise _refused(found.error)
        if found.facts["steps"] > self.limits.steps:  # the model's own number
            raise too_many_steps(self.limits.steps)
        return {
            "model": self.model,
            "fields": _resolved(found.facts, requests[0].settings) | wanted.fields,
            "values": values,
            "seeds": wanted.seeds,
            "digests": [one.digest for one in requests],
            "steps": found.facts["steps"],
            "fps": found.facts["fps"],
            "num_frames": wanted.shape.num_frames,
            "size": wanted.shape.size,
        }

    def content(self, job: Job, variant: str, index: int) -> tuple[Path, str]:
        """A file of a job, and what it is.

        Raises:
            Refused: it is not there.
        """
        if variant not in _VARIANTS:
            known = ", ".join(_VARIANTS)
            raise Refused(
                400, f"variant: {quoted(variant)} is none of {known}", "variant"
            )
        kind, ending = _VARIANTS[variant]
        if variant == "preview":
            file = self.dispatcher.files.preview(job.id)
            if not file.exists():
                raise Refused(404, f"{job.id} has no preview now")
            return file, kind
        if job.status == FAILED:
            raise Refused(404, f"{job.id} has failed and has no {variant}")
        if job.status != COMPLETED:
            raise Refused(409, f"{job.id} is {job.status}; ask again later")
        if not 0 <= index < len(job.asked["seeds"]):
            count = len(job.asked["seeds"])
            raise Refused(400, f"index: {index} is none of 0 to {count - 1}", "index")
        file = self.dispatcher.files.place(job.id) / video_name(index)
        if variant == "sidecar":
            file = sidecar_path(file)
        return file.with_suffix(ending) if ending else file, kind

    def ready(self) -> dict[str, Any]:
        """What ``/ready`` tells."""
        made = self.dispatcher
        return {
            "status": made.status,
            "error": made.error or None,
            "model": self.model,
            "image": made.image,
            "shapes": [shape.as_dict() for shape in made.shapes],
            "defaults": made.defaults,
            "limits": {
                "num_inference_steps": self.limits.steps,
                "n": MOST_VIDEOS,
                "image_pixels": MOST_PIXELS,
                "body_bytes": MOST_BODY,
            },
            "loras": sorted(self.limits.loras),
            "queue": {"queued": made.jobs.count(QUEUED), "limit": self.queue},
            "engines": {"ready": made.engines_ready, "limit": len(made.slots)},
        }


def _told(error: str) -> dict[str, str] | None:
    return {"code": "failed", "message": plain(error)} if error else None


def _refused(text: str) -> Refused:
    """An error of a run, with the field that is at fault."""
    about, colon, why = text.partition(": ")
    if about.startswith("--option ") and colon:
        option = about.removeprefix("--option ")
        return Refused(400, f"extra: {option}: {plain(why)}", "extra")
    if about.startswith("scheduler="):
        field = "flow_shift" if "flow_shift=" in about else "extra"
        return Refused(400, f"{field}: {plain(why)}", field)
    return Refused(400, plain(text))


def _resolved(facts: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """What a request did not say, so that other flags of a server change nothing."""
    names = ("num_frames", "num_inference_steps", "guidance_scale", "fps")
    found = {name: facts[name] for name in names}
    found["negative_prompt"] = settings.negative_prompt
    return {name: value for name, value in found.items() if value is not None}


def _number(request: Request, name: str, default: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise Refused(400, f"{name}: {quoted(text)} is no number from 0", name)
    if int(text) > most:
        raise Refused(400, f"{name}: {text} is more than {most}", name)
    return int(text)


def application(service: Service) -> FastAPI:
    """The server's paths; keys and limits of bodies are looked at before."""
    app = FastAPI(
        openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False
    )

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        headers = {"Retry-After": _RETRY} if error.status in (429, 503) else None
        return JSONResponse(error.body(), error.status, headers)

    @app.exception_handler(HTTPException)
    async def not_there(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {quoted(request.url.path)}: {error.detail}"
        body = Refused(error.status_code, message).body()
        return JSONResponse(body, error.status_code)

    @app.exception_handler(sqlite3.OperationalError)
    async def full(request: Request, error: sqlite3.OperationalError) -> Response:
        found = Refused(507, f"the jobs cannot be written: {error}")
        return JSONResponse(found.body(), 507)

    @app.exception_handler(Exception)  # the guard hears of the error too
    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse(Refused(500, "the server has failed").body(), 500)

    _add_looks(app, service)
    _add_videos(app, service)
    for name in _PAGE:
        path = "/" if name == _PAGE[0] else f"/{name}"
        app.add_route(path, functools.partial(_of_page, name), methods=["GET"])
    return app


def _add_looks(app: FastAPI, service: Service) -> None:
    """What looks at the server."""

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if service.dispatcher.status == FAILED:
            return JSONResponse({"status": FAILED}, 503)
        return JSONResponse({"status": "ok"})

    @app.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        found = service.ready()
        return JSONResponse(found, 200 if found["status"] == READY else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        made = service.dispatcher
        counts = made.jobs.count(QUEUED), made.jobs.count(RUNNING), made.engines_ready
        text = service.metrics.text(*counts)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != service.model:
            raise Refused(404, f"there is no model {quoted(name)}")
        return JSONResponse(_model(service))


def _add_videos(app: FastAPI, service: Service) -> None:
    """What makes videos."""
    at_once = asyncio.Semaphore(_AT_ONCE)

    @app.post("/v1/videos")
    async def create(request: Request) -> Response:
        owner, once = request.scope["owner"], key_of(request)
        # A job that is there needs no room; its answer was lost.
        if once is None or service.dispatcher.jobs.once(owner, once) is None:
            service.check_room()
        given, image = await asked_of(request)
        async with at_once:
            job = await run_in_threadpool(service.add, given, image, owner, once)
        return JSONResponse(service.shown(job))

    @app.get("/v1/videos")
    async def listed(request: Request) -> Response:
        return JSONResponse(_page(service, request))

    @app.get("/v1/videos/{name}")
    async def get(name: str, request: Request) -> Response:
        job = service.job(name, request.scope["owner"])
        answer = JSONResponse(service.shown(job))
        answer.raw_headers.append((b"openai-poll-after-ms", _POLL))
        return answer

    @app.delete("/v1/videos/{name}")
    async def delete(name: str, request: Request) -> Response:
        job = service.job(name, request.scope["owner"])
        service.dispatcher.jobs.delete(job.id)
        service.dispatcher.deleted(job.id)
        about = {"id": job.id, "object": "video.deleted", "deleted": True}
        return JSONResponse(about)

    @app.get("/v1/videos/{name}/content")
    async def content(name: str, request: Request) -> Response:
        job = service.job(name, request.scope["owner"])
        variant = request.query_params.get("variant", "video")
        index = _number(request, "index", 0, MOST_VIDEOS)
        file, kind = service.content(job, variant, index)
        if variant == "preview":  # replaced while it is read
            try:
                return Response(file.read_bytes(), media_type=kind)
            except OSError:
                raise Refused(404, f"{job.id} has no preview now") from None
        if not file.is_file():
            raise Refused(404, f"{job.id} has no {variant} any more")
        _check_range(request.headers.get("range"))
        return FileResponse(file, media_type=kind, filename=f"{job.id}{file.suffix}")


def _check_range(text: str | None) -> None:
    """Refuse a Range that Starlette would answer in words of its own."""
    if text is None:
        return
    unit, _, ranges = text.partition("=")
    found = [_RANGE.fullmatch(one) for one in ranges.split(",")]
    known = unit.strip().lower() == "bytes" and all(found)
    if not known or any(one and one[2] and int(one[1]) > int(one[2]) for one in found):
        message = f"Range: {quoted(text)} names no bytes, such as bytes=0-99"
        raise Refused(400, message, "Range")


def _of_page(name: str, request: Request) -> Response:
    return FileResponse(Path(__file__).parent / "page" / name, headers=_OF_PAGE)


def _model(service: Service) -> dict[str, Any]:
    about = {"id": service.model, "object": "model", "created": service.created}
    return {**about, "owned_by": "tpuport"}


def _page(service: Service, request: Request) -> dict[str, Any]:
    """The jobs that a client asks for."""
    owner, asked = request.scope["owner"], request.query_params
    known = ("after", "limit", "order")
    for name in asked:
        if name not in known:
            hint = did_you_mean(name, known, f"there are {', '.join(known)}")
            raise Refused(400, f"unknown field {quoted(name)}; {hint}", name[:100])
    limit = _number(request, "limit", 20, 100)
    if not limit:
        raise Refused(400, "limit: give 1 to 100", "limit")
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise Refused(400, f"order: {quoted(order)} is none of asc, desc", "order")
    after = None
    if "after" in asked:
        after = service.job(asked["after"], owner)
    up = order == "asc"
    found = service.dispatcher.jobs.page(owner, after, limit + 1, up=up)
    shown = [service.shown(job) for job in found[:limit]]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(found) > limit,
    }
