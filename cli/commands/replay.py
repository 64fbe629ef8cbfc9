"""``tpuport replay``: a recorded run again, and whether its latents are the same."""

from __future__ import annotations

import contextlib
import platform
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuport.cli.asked.cache_folder import cache_folder
from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.noise import Noise
from tpuport.cli.asked.options import command
from tpuport.cli.asked.sessions import (
    check_report,
    in_words,
    open_session,
    outputs_of,
)
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.any_replay import replay_any
from tpuport.cli.runs.kept_runs import new_run
from tpuport.cli.runs.run_stages import (
    decode_videos,
    recorded_noise,
    recorded_source,
    run_stage,
)
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import give_out, print_summary, say
from tpuport.core.files.fingerprint import hash_output, versions
from tpuport.core.files.outputs import Video
from tpuport.core.files.run_record import STAGES
from tpuport.core.files.sealed_json import read_sidecar, sidecar_path
from tpuport.core.files.sources import here
from tpuport.core.reports import Reporter, RunReport, StageReport
from tpuport.core.run.progress import Display
from tpuport.core.run.records import Sidecar
from tpuport.core.run.records import read as read_recorded
from tpuport.core.run.sidecar import latents_digest
from tpuport.core.spec.component import TORCHAX
from tpuport.core.spec.requests import recorded_request, recorded_variant
from tpuport.core.spec.run_settings import RunSettings
from tpuport.errors import (
    ArtifactError,
    AttentionError,
    MissingArtifactError,
    ReplayError,
    UsageError,
    WeightsError,
)
from tpuport.plugins import get_port

if TYPE_CHECKING:
    from tpuport.core.run.session import Session
    from tpuport.core.weights.checkpoint import Checkpoint


@command("replay")
def replay(
    settings: Settings,
    sidecar: Annotated[
        str, typer.Argument(metavar="FILE", help="A video, or the JSON file beside it.")
    ],
) -> None:
    """Repeat a recorded run, and compare its latents bit for bit.

    With --out the video is made and written too.

    Example: tpuport replay panda.mp4.json
    """
    prepare(debug=settings.debug)
    file = _sidecar_of(Path(here(sidecar)).expanduser())
    # Which kind of sidecar, before torch is imported.
    if "pipeline" in read_sidecar(file):
        document = replay_any(file, settings)
        say(f"the same frames as {file}: {document['frames_sha256']}")
    else:
        document = _replay(file, settings)
        say(f"the same latents as {file}: {document['latents_sha256']}")
    give_out(document, as_json=settings.json, report=settings.report)


def _replay(file: Path, asked: Settings) -> dict[str, Any]:
    started = time.perf_counter()
    recorded = _recorded(file)
    video = _check_video(file, recorded)
    with _naming(file):
        stages_as = _settings(file, recorded, asked)
    port = get_port(recorded["model"])
    request = recorded_request(port, recorded["request"], file, "request")
    if not 0 <= recorded["video"] < len(request.prompts):
        raise ArtifactError(
            f"{file}: has no usable video ({recorded['video']} of "
            f"{len(request.prompts)}); it cannot be replayed"
        )
    settings = stages_as[STAGES[0]]
    prompt = textwrap.shorten(request.prompts[recorded["video"]], 80)
    what = f"{recorded['model']} {recorded['variant']}, {prompt!r}"
    say(f"replaying {file} ({what}): {in_words(request)}")
    inputs = _inputs(file, video, recorded)
    if asked.report is not None:
        check_report(asked.report, [*settings.inputs(), *inputs])
    outputs = None
    if asked.out is not None:
        count = len(request.prompts)
        outputs = outputs_of(settings, "", count, request=request, inputs=inputs)
    noise = _noise(file, recorded)
    source = recorded_source(recorded["source"], file, request)
    cache = cache_folder(asked.cache_dir)
    with Display(signals.check) as display, contextlib.ExitStack() as stack:
        sessions = _Sessions(stages_as, cache, display, stack)
        session = sessions.of(STAGES[0])
        _check_weights(file, recorded, session.checkpoint)
        with _naming(file):
            session.check(request)
        folder = stack.enter_context(new_run(cache))
        run = session.open_run(folder, request)
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
    print_summary(report)
    for made in videos:
        say(f"wrote {made.path}")
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


@dataclass
class _Sessions:
    """A session for each stage, as it was run; one for those that ran alike."""

    settings: Mapping[str, Settings]
    cache: Path
    reporter: Reporter
    stack: contextlib.ExitStack
    opened: list[tuple[Settings, Session]] = field(default_factory=list)

    def of(self, stage: str) -> Session:
        """The session that runs a stage as the sidecar records it."""
        asked = self.settings[stage]
        for settings, session in self.opened:
            if settings == asked:
                return session
        session = open_session(asked, cache=self.cache, reporter=self.reporter)
        self.opened.append((asked, self.stack.enter_context(session)))
        return session


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Put the file in front of what is wrong with the settings that are in it."""
    try:
        yield
    except (UsageError, AttentionError) as error:
        raise type(error)(f"{file}: {error}") from error


def _sidecar_of(path: Path) -> Path:
    """The sidecar that was named, or the one of the video that was."""
    if path.is_symlink() and not sidecar_path(path).exists():
        path = path.resolve()
    is_video = path.suffix not in ("", ".json")
    if is_video and not path.exists() and not sidecar_path(path).exists():
        raise MissingArtifactError(
            f"{path} does not exist; name a video, its folder or its JSON"
        )
    if not path.resolve().name:
        raise UsageError(f"{path}: names no video, nor its JSON")
    if path.is_dir():
        return sidecar_path(path.resolve())
    if path.suffix == ".json":
        return path
    return sidecar_path(path if path.suffix else path.with_name(f"{path.name}.mp4"))


def _check_video(file: Path, recorded: Sidecar) -> Path | None:
    """The video beside a sidecar, found to be its own; ``None`` where there is none.

    Raises:
        ArtifactError: it is another video.
    """
    output, name = recorded["output"], file.name.removesuffix(".json")
    folder = output["kind"] == "png"
    video = file.with_name(name.removesuffix(".png") if folder else name)
    if video == file or video.is_dir() != folder or not video.exists():
        say(f"no video lies beside {file}; its settings are enough")
        return None
    found, _ = hash_output(video)
    if found != output["sha256"]:
        raise ArtifactError(
            f"{video}: is not the video of {file} (recorded sha256 "
            f"{output['sha256'][:16]}, found {found[:16]}); it was altered or "
            "replaced: move it away to replay the settings alone"
        )
    return video


def _inputs(file: Path, video: Path | None, recorded: Sidecar) -> list[Path]:
    """What a replay reads and compares with, which it must not replace."""
    noise, source = recorded["initial_latents"], recorded["source"]
    files = [noise["file"]] if noise else []
    files += source["files"] if source else []
    return [file, *([video] if video else []), *(Path(name) for name in files)]


def _recorded(file: Path) -> Sidecar:
    """A sidecar of which a replay is possible.

    Raises:
        ArtifactError: it is not.
    """
    recorded = read_recorded(file)
    if given := recorded["given"]:
        raise ArtifactError(
            f"{file}: the video was made from tensors in memory ({', '.join(given)}); "
            "it cannot be replayed"
        )
    return recorded


def _settings(file: Path, recorded: Sidecar, asked: Settings) -> dict[str, Settings]:
    """The settings of each stage, with what the user gave in their place."""
    port = get_port(recorded["model"])
    variant = recorded_variant(port, recorded["variant"], file)
    stages: Mapping[str, Any] = recorded["stages"]
    names = ("dtype", "mesh", "attention", "backend", "sharding", "blocks")
    found: dict[str, Settings] = {}
    for stage in STAGES:
        how = {
            **{name: stages[stage][name] for name in names},
            "vae": stages[stage]["implementations"].get("vae", TORCHAX),
            # One for all stages, since it is of decode alone.
            "vae_tiling": stages[STAGES[2]]["vae_tiling"],
        }
        read = RunSettings.read(how, named=str)
        found[stage] = changed(
            asked,
            **{name: getattr(read, name) for name in how},
            model=recorded["model"],
            variant=variant,
            weights=asked.weights or recorded["weights"]["source"],
            encode_on=stages[STAGES[0]]["encode_on"],
        )
    return found


def _noise(file: Path, recorded: Sidecar) -> Noise | None:
    """The initial noise that the sidecar names, of the videos of its batch."""
    entry = recorded["initial_latents"]
    noise = recorded_noise(entry, file)
    if entry is not None and noise is not None and len(noise.tensor) > 1:
        count = len(recorded["request"]["prompts"])
        first = entry["index"] - recorded["video"]
        noise = changed(noise, tensor=noise.tensor[first : first + count])
    return noise


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
