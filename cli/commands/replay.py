"""``tpuport replay``: the video of a sidecar made again, and whether it is the same."""

from __future__ import annotations

import platform
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.video_run import Again, VideoRun, find
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import give_out, print_summary, say
from tpuport.core.files.fingerprint import hash_output, versions
from tpuport.core.files.sealed_json import read_sidecar, sidecar_path
from tpuport.core.files.sources import here
from tpuport.core.run.progress import Display
from tpuport.core.spec.run_settings import typed
from tpuport.errors import (
    ArtifactError,
    AttentionError,
    MissingArtifactError,
    ReplayError,
    UsageError,
    WeightsError,
)

if TYPE_CHECKING:
    from tpuport.core.pipelines.sidecar import Sidecar


@command("replay")
def replay(
    settings: Settings,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A video, or the JSON file beside it.")
    ],
) -> None:
    """Make a recorded video again, and compare the frames.

    All settings come from the JSON. The frames must be the same bit for bit. With --out
    the video is written too.

    Example: tpuport replay panda.mp4.json
    """
    prepare(debug=settings.debug)
    sidecar = _sidecar_of(Path(here(file)).expanduser())
    read_sidecar(sidecar)  # refused before torch is imported
    document = _replay(sidecar, settings)
    if not document["same"]:
        give_out(document, as_json=False, report=settings.report)
        raise ReplayError(
            f"{sidecar}: the frames are not the recorded ones: recorded "
            f"{document['recorded_sha256']}, now {document['frames_sha256']}; "
            f"{document['changes']}"
        )
    say(f"the same frames as {sidecar}: {document['frames_sha256']}")
    give_out(document, as_json=settings.json, report=settings.report)


def _replay(file: Path, asked: Settings) -> dict[str, Any]:
    """Make the video of a sidecar again; the document of the command."""
    from tpuport.core.pipelines import sidecar

    started = time.perf_counter()
    recorded = sidecar.read(file)
    video = _check_video(file, recorded)
    again = replace(_again(file, recorded), files=(file, *([video] if video else [])))
    settings = _recorded(file, recorded, asked)
    prompt = textwrap.shorten(recorded["request"]["prompts"][0] or "", 80)
    say(f"replaying {file} ({recorded['pipeline']}, {prompt!r})")
    with Display(signals.check) as display:
        run = VideoRun.prepared(settings, find(settings, display), display, again=again)
        _check_same(file, recorded, run)
        outputs = None
        if asked.out is not None:
            outputs = run.outputs("")
        videos, report = run.make(outputs, started)
    print_summary(report)
    for made in videos:
        say(f"wrote {made.path}")
    return {
        "command": "replay",
        "sidecar": str(file),
        "same": run.digests == [recorded["frames_sha256"]],
        "recorded_sha256": recorded["frames_sha256"],
        "frames_sha256": run.digests[0],
        "changes": _changes(recorded),
        "videos": [video.as_dict() for video in videos],
        "settings": recorded["request"],
        "report": report.as_dict(),
    }


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
    """The video beside a sidecar, found to be its own; ``None`` where there is none."""
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


def _again(file: Path, recorded: Sidecar) -> Again:
    """The call that made the recorded video."""
    request = recorded["request"]
    prompts, seeds = request["prompts"], next(iter(request["seeds"]), [])
    given = len(request["negative_prompts"])
    if not len(prompts) == len(seeds) == given or not 0 <= recorded["video"] < len(
        prompts
    ):
        raise ArtifactError(
            f"{file}: names video {recorded['video']} of {len(prompts)} prompts "
            f"and {len(seeds)} seeds; it cannot be replayed"
        )
    return Again(
        videos=tuple(zip(prompts, seeds, strict=True)),
        video=recorded["video"],
        noise=recorded["noise"],
    )


def _recorded(file: Path, recorded: Sidecar, asked: Settings) -> Settings:
    """The settings of a recorded run; where the user gave some, those."""
    request = recorded["request"]
    given = {**request["flags"], **recorded["how"], "options": request["options"]}
    try:
        read = typed(Settings, given)
    except (UsageError, AttentionError) as error:
        raise ArtifactError(f"{file}: {error}; it cannot be replayed") from error
    return replace(
        asked,
        model=None,
        weights=asked.weights or recorded["weights"]["source"],
        prompt=tuple(p for p in request["prompts"] if p is not None),
        negative_prompt=request["negative_prompts"][0],
        seed=tuple(request["seeds"][0])[:1],
        batch=len(request["prompts"]),
        **read,
    )


def _check_same(file: Path, recorded: Sidecar, run: VideoRun) -> None:
    """Refuse other weights or other images than the recorded ones, before the work."""
    if run.folder.class_name != recorded["pipeline"]:
        raise WeightsError(
            f"{run.folder.reference}: is of {run.folder.class_name}, and {file} was "
            f"made by {recorded['pipeline']}; name the same checkpoint with --weights"
        )
    for name, wanted in recorded["weights"]["fingerprints"].items():
        found = run.folder.checkpoint.fingerprints([name]).get(name, "none")
        if found != wanted:
            raise WeightsError(
                f"{run.folder.reference}: {name} is not what {file} was made with "
                f"(recorded {wanted[:16]}, found {found[:16]}); name the same "
                "checkpoint with --weights"
            )
    if run.inputs != recorded["inputs"]:
        differing = set(run.inputs.items()) ^ set(recorded["inputs"].items())
        raise ArtifactError(
            f"{sorted(differing)[0][0]}: is not the file that {file} records"
        )


def _changes(recorded: Sidecar) -> str:
    """What differs between the recorded machine and this one, in words."""
    then = {**recorded["versions"], "system": recorded["platform"].get("system")}
    now = {**versions(), "system": platform.platform()}
    differences = [
        f"{name} {then.get(name) or 'unknown'} then, {now[name] or 'unknown'} now"
        for name in now
        if then.get(name) != now[name]
    ]
    return "; ".join(differences) or "no version differs"
