"""``tpuport serve``: a server of videos over HTTP; its engines, here or on Ray."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.cli.asked.environment import DEFAULT_MODEL, check_cache, prepare
from tpuport.cli.asked.first import check_read
from tpuport.cli.asked.options import command, flag
from tpuport.cli.asked.settings import Settings, of_server
from tpuport.cli.batches.cluster import Slice, slice_of
from tpuport.cli.runs.variants import check_model
from tpuport.cli.server.fields import Limits, Shape
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import give_out, say
from tpuport.core.files.folders import check_folder
from tpuport.core.files.run_lock import working_in
from tpuport.core.run.progress import Display
from tpuport.core.spec import kinds
from tpuport.core.spec.run_settings import DEMO, read_value
from tpuport.errors import UsageError, quoted

if TYPE_CHECKING:
    from tpuport.cli.server.work import MakeEngine

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@command(
    "serve",
    host=flag("--host HOST", "Where to listen; 0.0.0.0 is every network."),
    port=flag("--port N", "0 takes a free one.", min=0, max=65535),
    folder=flag("--folder FOLDER", "Jobs and videos. (default: in the cache folder)"),
    api_key_file=flag("--api-key-file FILE", "Keys of clients, one a line."),
    queue=flag("--queue N", "The most jobs that wait; the server refuses more.", min=1),
    keep=flag(
        "--keep TIME",
        "How long jobs that have ended are kept, such as 7d, 12h or 30m.",
    ),
    shapes=flag(
        "--shapes WxHxF",
        "Sizes and frames that requests may have; may be repeated.",
    ),
    max_steps=flag("--max-steps N", "The most steps of a video.", min=1),
    loras=flag("--loras FOLDER", "LoRA files that requests may name."),
    name=flag("--name HOST", "A name, as before a proxy here; may be repeated."),
    allow_urls=flag("--allow-urls", "Open public https addresses of images."),
    ray=flag("--ray ADDRESS|local", "A Ray cluster; local starts one here."),
    replicas=flag(
        "--replicas N",
        "Engines on the cluster. (default: all its slices, or one CPU)",
        min=1,
    ),
    topology=flag("--topology NAME", "The slice of each engine, such as v6e-8."),
)
def serve(
    settings: Settings,
    host: str = "127.0.0.1",
    port: int = 8000,
    folder: str | None = None,
    api_key_file: str | None = None,
    queue: int = 64,
    keep: str = "7d",
    shapes: list[str] | None = None,
    max_steps: int = 200,
    loras: str | None = None,
    name: list[str] | None = None,
    allow_urls: bool = False,
    ray: str | None = None,
    replicas: int | None = None,
    topology: str | None = None,
) -> None:
    """Serve videos over HTTP, as OpenAI's /v1/videos.

    The other flags are for all requests that say nothing else. With --batch-size N,
    waiting jobs share a call where an engine measures that this is faster.

    Example: tpuport serve --model wan --steps 30 --api-key-file keys.txt
    """
    prepare(debug=settings.debug)
    _check_installed()
    from tpuport.cli.server.guard import read_keys

    def place(text: str | None, name: str) -> Path | None:
        return None if text is None else read_value(kinds.path, text, name).absolute()

    found = [read_value(Shape.parse, one, "--shapes") for one in shapes or ()]
    file = place(api_key_file, "--api-key-file")
    named = _loras(place(loras, "--loras"))
    of_all = of_server(settings)
    check_read(of_all)
    check_model(of_all, prompt=False)
    asked = _Asked(
        below=_here(of_all),
        shapes=list({shape.key: shape for shape in found}.values()),
        keys=() if file is None else read_keys(file),
        limits=Limits(steps=max_steps, loras=named),
        keep=read_value(_seconds, keep, "--keep"),
        queue=queue,
        urls=allow_urls,
        names=tuple(name or ()),
    )
    cluster = _Cluster(ray, replicas, _slice_of_one_host(ray, replicas, topology))
    own = place(folder, "--folder") or check_cache(settings) / "serve"
    check_folder("--folder", own)
    with (
        _listening(host, port) as listening,
        working_in(own),
        _engines(cluster, own, debug=settings.debug) as engines,
    ):
        _serve(listening, own, host, asked, engines)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What the flags say, but for where to listen.

    Attributes:
        keep: seconds.
    """

    below: Settings
    shapes: list[Shape]
    keys: tuple[str, ...]
    limits: Limits
    keep: float
    queue: int
    urls: bool
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Cluster:
    """Where engines are.

    Attributes:
        address: of Ray; ``None`` for one engine beside the server.
        count: ``None`` for all slices.
        where: the slice of each.
    """

    address: str | None
    count: int | None
    where: Slice


def _slice_of_one_host(
    ray: str | None, replicas: int | None, topology: str | None
) -> Slice:
    found = slice_of(ray, replicas, topology)
    if found.hosts > 1:
        raise UsageError(
            f"--topology {topology}: has {found.hosts} hosts, and an engine of serve "
            "is on one; name a slice of one host, such as v6e-8"
        )
    return found


@contextlib.contextmanager
def _engines(
    cluster: _Cluster, folder: Path, *, debug: bool
) -> Iterator[Sequence[MakeEngine]]:
    """What starts each engine."""
    from tpuport.cli.server.child import MAKES
    from tpuport.cli.server.worker import Worker

    if cluster.address is None:
        yield [functools.partial(Worker, MAKES, debug=debug)]
        return
    from tpuport.cli.server.actors import ray_engines

    with contextlib.ExitStack() as stack:
        with Display(signals.check) as display:
            found = ray_engines(
                *(cluster.address, cluster.count, cluster.where),
                *(folder, display),
                debug=debug,
            )
            engines = stack.enter_context(found)
        yield engines


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"{error.name} is not installed: pip install 'tpuport[serve]'"
        ) from error


def _here(settings: Settings) -> Settings:
    """The settings with a folder of weights by its whole name."""
    weights = settings.weights
    if weights is not None and Path(weights).expanduser().is_dir():
        weights = Path(weights).expanduser().absolute()
    return replace(settings, weights=weights, lora=_absolute(settings))


def _absolute(settings: Settings) -> Any:
    return tuple(choice.absolute() for choice in settings.lora)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if found is None or not int(found[1]):
        raise ValueError("is no time, such as 7d, 12h, 30m or 90s")
    return float(int(found[1]) * _UNITS[found[2]])


def _loras(folder: Path | None) -> dict[str, Path]:
    """The files of a folder by the names that requests use."""
    if folder is None:
        return {}
    if not folder.is_dir():
        raise UsageError(
            f"--loras {folder}: is no folder; name the folder of the LoRA files"
        )
    found = {file.stem: file for file in sorted(folder.glob("*.safetensors"))}
    if not found:
        raise UsageError(
            f"--loras {folder}: has no .safetensors file; put the LoRAs there, or "
            "leave the flag out"
        )
    return found


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"--host {host} --port {port}: cannot be listened to: {error}; choose "
            "another"
        ) from error


def _model_name(settings: Settings) -> str:
    """What clients call the model."""
    if settings.model or settings.weights in (None, DEMO):
        parts = (settings.model or DEFAULT_MODEL, settings.variant)
        return "-".join(filter(None, parts))
    weights = settings.weights
    return weights.name if isinstance(weights, Path) else str(weights)


def _serve(
    listening: socket.socket,
    folder: Path,
    host: str,
    asked: _Asked,
    engines: Sequence[MakeEngine],
) -> None:
    """Answer until a signal ends the server."""
    import uvicorn

    from tpuport.cli.server.api import Service, application
    from tpuport.cli.server.dispatcher import Dispatcher
    from tpuport.cli.server.guard import Guard, PatientProtocol, is_loopback
    from tpuport.cli.server.jobs import Jobs
    from tpuport.cli.server.metrics import Metrics
    from tpuport.cli.server.worker import Checks

    # What is wrong in a form, its client is told.
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)
    jobs, metrics, below = Jobs(folder / "jobs.sqlite3"), Metrics(), asked.below
    local = is_loopback(host)
    if not local and not asked.keys:
        say(
            f"WARNING: {quoted(host)} IS OPEN: EVERYBODY WHO REACHES THIS MACHINE CAN "
            "MAKE AND SEE VIDEOS; use --api-key-file"
        )
    made = Dispatcher(
        *(jobs, folder, below, asked.shapes),
        engines=engines,
        keep=asked.keep,
        checks=Checks(debug=below.debug),
        metrics=metrics,
    )
    service = Service(
        dispatcher=made,
        metrics=metrics,
        model=_model_name(below),
        limits=asked.limits,
        queue=asked.queue,
        urls=asked.urls,
        created=int(time.time()),
    )
    app = application(service)
    config = uvicorn.Config(
        Guard(app, keys=asked.keys, local=local, metrics=metrics, names=asked.names),
        log_level="critical",
        access_log=False,
        server_header=False,
        http=PatientProtocol,
        ws="none",
        limit_concurrency=1000,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=5,
    )
    name, port = listening.getsockname()[:2]
    url = f"http://{f'[{name}]' if ':' in name else name}:{port}"
    document = {"command": "serve", "url": url, "folder": str(folder)}
    try:
        made.start()
        give_out(document, as_json=below.json)
        sys.stdout.flush()
        say(f"serving on {url}; loads now, and says when it is ready")
        uvicorn.Server(config).run(sockets=[listening])
    except BaseException as error:
        if signals.ended_by(error):
            error.add_note(
                f"jobs are kept in {folder}; the same command goes on with those that "
                "have not ended"
            )
        raise
    finally:
        made.close()
        jobs.close()
