"""``tpuport replay``: a recorded run again, and whether its latents are the same."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Mapping
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuport.cli.asked.cache_folder import cache_folder, new_run_folder
from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.noise import Noise, read_noise
from tpuport.cli.asked.options import command
from tpuport.cli.asked.sessions import check_report, open_session
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.run_stages import (
    Video,
    decode_videos,
    going_on,
    run_stage,
)
from tpuport.cli.shown.output import give_out, say
from tpuport.cli.shown.outputs import plan_outputs
from tpuport.cli.shown.progress import make_display, print_summary
from tpuport.cli.shown.sidecar import Sidecar, read
from tpuport.cli.shown.versions import versions
from tpuport.core.enums import Task
from tpuport.core.files.run_record import STAGES
from tpuport.core.files.sources import Source, read_image, read_video
from tpuport.core.files.typed import recorded_in
from tpuport.core.reports import Reporter, RunReport, StageReport
from tpuport.core.run.result import latents_digest
from tpuport.core.spec.component import TORCHAX
from tpuport.core.spec.request import Request
from tpuport.core.spec.requests import recorded_request
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.errors import ArtifactError, ReplayError, WeightsError
from tpuport.plugins import get_port

if TYPE_CHECKING:
    from tpuport.core.run.session import Session
    from tpuport.core.weights.checkpoint import Checkpoint


@command("replay")
def replay(
    settings: Settings,
    sidecar: Annotated[
        str, typer.Argument(metavar="FILE.json", help="The JSON beside a video.")
    ],
) -> None:
    """Run a sidecar's settings again and compare the latents, bit for bit.

    With --out the video is made and written too; without it the latents are enough.
    """
    prepare(debug=settings.debug)
    document = _replay(Path(sidecar).expanduser(), settings)
    say(f"the same latents as {sidecar}: {document['latents_sha256']}")
    give_out(document, as_json=settings.json, report=settings.report)


def _replay(file: Path, asked: Settings) -> dict[str, Any]:
    started = time.perf_counter()
    if asked.report is not None:
        check_report(asked.report)
    recorded = read(file)
    settings = _settings(recorded, asked)
    port = get_port(recorded["model"])
    request = recorded_request(port, recorded["request"], file, "request")
    if not 0 <= recorded["video"] < len(request.prompts):
        raise ArtifactError(
            f"{file}: has no usable video ({recorded['video']} of "
            f"{len(request.prompts)}); it cannot be replayed"
        )
    outputs = None
    if asked.out is not None:
        outputs = plan_outputs(asked.out, len(request.prompts), asked.report)
    noise = _noise(file, recorded)
    source = _source(file, recorded, request)
    cache = cache_folder(asked.cache_dir)
    with make_display() as display, contextlib.ExitStack() as stack:
        sessions = _Sessions(file, recorded, settings, cache, display, stack)
        session = sessions.of(STAGES[0])
        _check_weights(file, recorded, session.checkpoint)
        session.check(request)
        run = session.open_run(new_run_folder(cache), request)
        stack.enter_context(
            going_on(run, settings, asked.out or "video.mp4", temporary=True)
        )
        stages: list[StageReport] = []
        for name in STAGES[:2]:
            session = sessions.of(name)
            tensors, stage = run_stage(
                session,
                run,
                name,
                noise=noise if name == STAGES[0] else None,
                source=source if name == STAGES[0] else None,
            )
            stages.append(stage)
        place = recorded["video"]
        digest = latents_digest(tensors["latents"][place : place + 1])
        same = digest == recorded["latents_sha256"]
        videos: list[Video] = []
        if outputs is not None:
            session = sessions.of(STAGES[2])
            videos, report = decode_videos(session, run, outputs, stages, started)
        else:
            report = session.run_report(stages, time.perf_counter() - started)
    _show_results(report, videos)
    document = {
        "command": "replay",
        "sidecar": str(file),
        "same": same,
        "latents_sha256": digest,
        "videos": [video.as_dict() for video in videos],
        "settings": request.as_dict(),
        "report": report.as_dict(),
    }
    if not same:
        give_out(document, as_json=False, report=asked.report)
        raise ReplayError(
            f"{file}: the latents are not the recorded ones: recorded "
            f"{recorded['latents_sha256']}, now {digest}; {_changes(recorded, report)}"
        )
    return document


class _Sessions:
    """A session for each stage, as it was run; one for those that ran alike."""

    def __init__(
        self,
        file: Path,
        recorded: Sidecar,
        settings: Settings,
        cache: Path,
        reporter: Reporter,
        stack: contextlib.ExitStack,
    ) -> None:
        self._file = file
        self._recorded = recorded
        self._settings = settings
        self._cache = cache
        self._reporter = reporter
        self._stack = stack
        self._open: dict[tuple[Any, ...], Session] = {}

    def of(self, stage: str) -> Session:
        """The session that runs a stage as the sidecar records it."""
        stages: Mapping[str, Any] = self._recorded["stages"]
        how = stages[stage]
        names = ("dtype", "mesh", "attention", "backend", "sharding", "blocks")
        changes = {name: how[name] for name in names}
        changes["vae"] = how["implementations"].get("vae", TORCHAX)
        # One for all stages, since it is of decode alone.
        changes["vae_tiling"] = stages[STAGES[2]]["vae_tiling"]
        field = f"stages.{stage}"
        with recorded_in(self._file, field, "it cannot be replayed"):
            made = RunSettings.read(changes, named=str)
        key = tuple(changes.values())
        if key not in self._open:
            session = open_session(
                changed(self._settings, **{n: getattr(made, n) for n in changes}),
                cache=self._cache,
                reporter=self._reporter,
            )
            self._open[key] = self._stack.enter_context(session)
        return self._open[key]


def _settings(recorded: Sidecar, asked: Settings) -> Settings:
    """The settings of the sidecar, with what the user gave in their place."""
    port = get_port(recorded["model"])
    known = recorded["variant"] in port.variant_names()
    return changed(
        asked,
        model=recorded["model"],
        variant=recorded["variant"] if known else None,
        weights=asked.weights or recorded["weights"]["source"],
        encode_on=recorded["stages"]["encode"]["encode_on"],
    )


def _noise(file: Path, recorded: Sidecar) -> Noise | None:
    """The initial noise that the sidecar names, known to be the same file.

    Raises:
        ArtifactError: it is another file now.
    """
    entry = recorded["initial_latents"]
    if entry is None:
        return None
    noise = read_noise(entry["file"])
    assert noise is not None
    if noise.sha256 != entry["sha256"]:
        raise ArtifactError(
            f"{entry['file']}: is not the file of initial latents that {file} records "
            f"(recorded sha256 {entry['sha256'][:16]}, found {noise.sha256[:16]})"
        )
    if len(noise.tensor) > 1:
        count = len(recorded["request"]["prompts"])
        first = entry["index"] - recorded["video"]
        noise = changed(noise, tensor=noise.tensor[first : first + count])
    return noise


def _source(file: Path, recorded: Sidecar, request: Request) -> Source | None:
    """The image or video that the sidecar names, known to have the same pixels.

    Raises:
        ArtifactError: it has others now, or came from memory.
    """
    if not request.sources:
        return None
    entry = recorded["source"]
    if not entry or not entry["files"]:
        raise ArtifactError(
            f"{file}: does not say which file the video was made from; it cannot be "
            "replayed"
        )
    name = entry["files"][0]
    if request.task == Task.IMAGE:
        source = read_image(name)
    else:
        frames = request.num_frames
        source = read_video(name, frames).first(frames)
    if source.digests_for(len(request.prompts)) != request.sources:
        raise ArtifactError(f"{name}: is not the {source.kind} that {file} records")
    return source


def _check_weights(file: Path, recorded: Sidecar, checkpoint: Checkpoint) -> None:
    """Refuse other weights than the recorded ones, before the work.

    Raises:
        WeightsError: a component's fingerprint differs.
    """
    for name, wanted in recorded["weights"]["fingerprints"].items():
        if wanted is None:
            continue
        found = checkpoint.fingerprint(name) if checkpoint.has(name) else "none"
        if found != wanted:
            raise WeightsError(
                f"{checkpoint.source}: {name} is not what {file} was made with "
                f"(recorded {wanted[:16]}, found {found[:16]}); name the same "
                "checkpoint with --weights"
            )


def _show_results(report: RunReport, videos: list[Video]) -> None:
    say("")
    print_summary(report)
    for video in videos:
        say(f"wrote {video.path}")


def _changes(recorded: Sidecar, report: RunReport) -> str:
    """What differs between the recorded machine and this one, in words."""
    then = recorded["stages"]["denoise"]
    before = dict(then["versions"])
    now: dict[str, Any] = versions()
    before["platform"], now["platform"] = then["platform"], report.platform
    before["system"] = recorded["platform"].get("system")
    now["system"] = platform.platform()
    differences = [
        f"{name} {before.get(name) or 'unknown'} then, {now[name] or 'unknown'} now"
        for name in now
        if before.get(name) != now[name]
    ]
    if not differences:
        return "no version differs"
    return "; ".join(differences)
