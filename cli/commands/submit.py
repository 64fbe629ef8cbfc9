"""``tpuport submit``: a video made by a server."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.cli.asked.first import outputs_of
from tpuport.cli.asked.options import command, flag
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import check_report, give_out, say
from tpuport.core.enums import Backend
from tpuport.core.files.atomic import cannot_write, flush, replacing, temporary_beside
from tpuport.core.files.outputs import Outputs
from tpuport.core.files.sealed_json import read_sidecar, sidecar_bytes, sidecar_path
from tpuport.core.files.sources import check_image
from tpuport.core.files.typed import read_text
from tpuport.core.files.video_file import free_output, put_file
from tpuport.core.reports import StageReport
from tpuport.core.run.progress import Display
from tpuport.core.spec import kinds
from tpuport.core.spec.run_settings import WHAT, read_value
from tpuport.errors import ServerError, TpuportError, UsageError

if TYPE_CHECKING:
    from tpuport.cli.server.client import Server

#: Seconds between two looks at a job.
_POLL = 0.5
#: Where a key is where no file is named.
KEY = "TPUPORT_API_KEY"
#: Fields of a request that are settings of the same name.
_SAME = (
    *("model", "negative_prompt", "num_frames", "fps", "num_inference_steps"),
    "guidance_scale",
)


@command(
    "submit",
    server=flag("--server URL", "Such as http://127.0.0.1:8000; required."),
    seconds=flag("--seconds X", "Length of the video, in place of --frames."),
    n=flag("--n N", "Videos, of the seeds from --seed on.", min=1),
    flow_shift=flag("--flow-shift X", "Shift of the schedule of steps."),
    api_key_file=flag("--api-key-file FILE", f"Its first line; else ${KEY}."),
    job=flag("--job ID", "Wait for a job that is there, in place of a new one."),
    prompt=flag("--prompt TEXT", "What to show."),
    seed=flag("--seed N", "Of the first video. (default: 0)"),
    negative_prompt=flag(
        "--negative-prompt TEXT", "What to steer away from.", rich_help_panel=WHAT
    ),
    model=flag("--model NAME", "Refused unless the server has this model."),
    out=flag("--out FILE", "A .mp4 file; several are numbered."),
    lora=flag(
        "--lora NAME[:SCALE]",
        "Add a LoRA that the server has; may be repeated.",
        rich_help_panel=WHAT,
    ),
)
def submit(
    settings: Settings,
    server: str | None = None,
    seconds: float | None = None,
    n: int | None = None,
    flow_shift: float | None = None,
    api_key_file: str | None = None,
    job: str | None = None,
) -> None:
    """Let a server make a video, and write the video here.

    Ctrl-C deletes the job. SIGTERM and SIGHUP leave the job to the server; --job
    waits for the job again.

    Example: tpuport submit --server http://127.0.0.1:8000 --prompt "a fox" --out x.mp4
    """
    if not server:
        raise UsageError("--server is missing; give http://HOST:PORT")
    own = {"seconds": seconds, "n": n, "flow_shift": flow_shift}
    fields = {} if job else request_of(settings, own)
    if job and (not job.isprintable() or "/" in job or settings.prompt):
        raise UsageError("--job is the ID of a job, and goes without --prompt")
    image = None if settings.image is None else check_image(settings.image)
    planned = _outputs(settings, n or 1)
    with Display(signals.check) as display:
        from tpuport.cli.server.client import Server

        waits = functools.partial(_waits, display, server)
        speaks = Server(server, _key(api_key_file), waits)
        begun = speaks.job(job) if job else speaks.create(fields, image)
        done = _made(speaks, begun, settings, display)
        fetched = functools.partial(_fetched, speaks, str(done["id"]), settings.image)
        count = len(done["tpuport"]["seeds"])
        if count != len(planned.wanted):  # of --job
            planned = _outputs(settings, count)
        written = [fetched(index, planned) for index in range(count)]
    paths = [{"path": str(p), "sidecar": str(sidecar_path(p))} for p in written]
    document = {"command": "submit", "job": done, "videos": paths}
    try:
        give_out(document, as_json=settings.json, report=settings.report)
    finally:
        for path in written:
            say(f"wrote {path}")


def request_of(settings: Settings, own: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request, as docs/serve.md has them, of those that are given.

    Args:
        own: of fields that are no settings.

    Raises:
        UsageError: there is no prompt, or several prompts or seeds.
    """
    if not settings.prompt:
        raise UsageError(
            '--prompt is missing; say what to show, such as --prompt "a red fox"'
        )
    if len(settings.prompt) != 1:
        raise UsageError("submit takes one --prompt; `tpuport batch` takes many")
    if len(settings.seed) != 1:
        raise UsageError("submit takes one --seed; --n 3 makes this one and two more")
    given = {name: getattr(settings, name) for name in _SAME} | dict(own)
    fields = {name: value for name, value in given.items() if value is not None}
    fields |= {"prompt": settings.prompt[0], "seed": settings.seed[0]}
    if settings.width is not None:
        fields["size"] = f"{settings.width}x{settings.height}"
    if settings.lora:
        fields["lora"] = [str(choice) for choice in settings.lora]
    if settings.options:
        fields["extra"] = dict(settings.options)
    return fields


def _key(file: str | None) -> str:
    """The key of a file, or of the environment; empty for none."""
    if file is None:
        return os.environ.get(KEY, "").strip()
    path = read_value(kinds.path, file, "--api-key-file")
    lines = [line.strip() for line in read_text(path, "--api-key-file").splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(f"--api-key-file {path}: holds no key; write one a line")
    return keys[0]


def _outputs(settings: Settings, count: int) -> Outputs:
    """Where the videos go, found to be writable."""
    if not settings.out:
        raise UsageError("--out is missing; name a .mp4 file, such as --out fox.mp4")
    if settings.report is not None:
        check_report(settings.report, settings.inputs())
    planned = outputs_of(settings, "", count)
    if planned.kind != "mp4" or not all(isinstance(p, Path) for p in planned.wanted):
        raise UsageError(
            f"--out {settings.out}: a server makes .mp4 files; name one, in no store"
        )
    for remark in planned.remarks():
        say(remark)
    return planned


def _waits(display: Display, server: str, seconds: float) -> None:
    display.mind()
    display.say(f"{server} does not answer; trying again in {seconds:g} s")


def _made(
    server: Server, job: dict[str, Any], settings: Settings, display: Display
) -> dict[str, Any]:
    """A job that is done; a signal on the way says what becomes of the job."""
    name = str(job["id"])
    try:
        with contextlib.closing(_Shown(display)) as shown:
            while True:
                shown.see(job)
                if job["status"] == "completed":
                    return job
                if job["status"] == "failed":
                    reason = (job["error"] or {}).get("message") or "no reason is told"
                    raise ServerError(f"job {name} failed: {reason}")
                time.sleep(_POLL)
                job = server.job(name)
    except BaseException as error:
        if signals.ended_by(error) == signal.SIGINT:
            error.add_note(_deleted(server, name))
        elif not isinstance(error, ServerError) or error.away:
            image = "" if settings.image is None else f" --image {settings.image}"
            error.add_note(
                f"job {name} stays on the server; go on with `tpuport submit --server "
                f"{server.url} --job {name}{image} --out {settings.out}`"
            )
        raise


def _deleted(server: Server, name: str) -> str:
    try:
        server.delete(name)
    except TpuportError as error:
        return f"job {name} could not be deleted: {error}"
    return f"job {name} is deleted"


class _Shown:
    """A job on the project's own progress bar."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._what, self._since = "", 0.0
        self._stage, self._steps = "", 0

    def see(self, job: Mapping[str, Any]) -> None:
        """Show how far the job is."""
        self._display.mind()
        about = job["tpuport"]
        if job["status"] == "queued":
            place = about["position"]
            self._work(f"waiting, number {place} in the queue" if place else "waiting")
        elif job["status"] != "in_progress":
            self.close()
        elif about["stage"] == "denoise" and about["steps"]:
            if self._stage != "denoise":
                self.close()
                self._stage, self._since = "denoise", time.monotonic()
                self._display.stage_started("denoise", about["steps"], "step")
            if about["step"] != self._steps:
                self._steps = about["step"]
                self._display.advanced("denoise", about["step"], about["steps"])
        else:
            self._work(about["stage"] or "starting")

    def close(self) -> None:
        """What is under way has ended."""
        took = time.monotonic() - self._since
        if self._what:
            self._display.ended(self._what, took)
        if self._stage:
            self._display.stage_finished(
                StageReport(
                    stage=self._stage,
                    backend=Backend.TPUPORT,
                    unit="step",
                    total_seconds=took,
                )
            )
        self._what = self._stage = ""
        self._steps = 0

    def _work(self, what: str) -> None:
        if what != self._what:
            self.close()
            self._what, self._since = what, time.monotonic()
            self._display.began(what)


def _fetched(
    server: Server, job: str, image: str | None, index: int, planned: Outputs
) -> Path:
    """A video and its sidecar, each written whole or not at all.

    Args:
        image: the file here that the video was made from.
    """
    wanted = planned.wanted[index]
    assert isinstance(wanted, Path)
    made = temporary_beside(wanted, ".mp4")
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        server.download(job, "video", index, made)
        flush(made)
        while True:
            path = free_output(wanted, "mp4", overwrite=planned.overwrite)
            assert isinstance(path, Path)
            sidecar = sidecar_path(path)
            # Another process may take a name between the look and the rename.
            with contextlib.suppress(FileExistsError), replacing(sidecar) as beside:
                server.download(job, "sidecar", index, beside)
                if image is not None:
                    _name_own(beside, image)
                if planned.overwrite:
                    sidecar.unlink(missing_ok=True)
                put_file(made, path, replace=planned.overwrite)
                return path
    except OSError as error:
        raise cannot_write(wanted, error) from error
    finally:
        made.unlink(missing_ok=True)


def _name_own(sidecar: Path, image: str) -> None:
    """Let a sidecar name the image here, in place of the server's copy.

    Raises:
        ServerError: the video was made from another image.
    """
    data = read_sidecar(sidecar)
    flags, inputs = data["request"]["flags"], data["inputs"]
    theirs = flags.get("image")
    digest = hashlib.sha256(Path(image).expanduser().read_bytes()).hexdigest()
    if inputs.get(theirs) != digest:
        raise ServerError(
            f"--image {image}: is not what the server made the video from (sha256 "
            f"{str(inputs.get(theirs))[:16]} there, {digest[:16]} here); the video "
            "stays there: --job fetches it without --image, or with the other file"
        )
    flags["image"] = image
    data["inputs"] = {
        image if name == theirs else name: found for name, found in inputs.items()
    }
    sidecar.write_bytes(sidecar_bytes(data))
