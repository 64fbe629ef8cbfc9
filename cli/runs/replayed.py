"""The video of a sidecar made again."""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.video_run import Again, VideoRun, Wanted, file_digest, find
from tpuport.cli.shown.output import print_summary, say
from tpuport.core.files.fingerprint import hash_output, versions
from tpuport.core.files.sealed_json import show
from tpuport.core.pipelines import sidecar
from tpuport.core.pipelines.sidecar import Sidecar
from tpuport.core.reports import Reporter, plural
from tpuport.core.spec.lora_choice import LoraChoice
from tpuport.core.spec.run_settings import typed
from tpuport.errors import ArtifactError, AttentionError, UsageError, WeightsError


def replayed(
    file: Path, asked: Settings, reporter: Reporter, *, started: float
) -> dict[str, Any]:
    """Make the video of a sidecar again; the document of the command.

    Args:
        started: when the command began, on the clock of :func:`time.perf_counter`.
    """
    recorded = sidecar.read(file)
    video = _check_video(file, recorded)
    wanted = _wanted(file, recorded)
    again = Again(
        video=recorded["video"],
        noise=recorded["noise"],
        files=(file, *([video] if video else [])),
    )
    settings = _recorded(file, recorded, asked)
    inputs = _inputs(file, recorded, settings)
    prompt = textwrap.shorten(recorded["request"]["prompts"][0] or "", 80)
    say(f"replaying {file} ({recorded['pipeline']}, {prompt!r})")
    folder = find(settings, reporter)
    run = VideoRun.prepared(settings, folder, reporter, again=again, wanted=wanted)
    _check_same(file, recorded, run, inputs)
    outputs = None if asked.out is None else run.outputs("")
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


def _wanted(file: Path, recorded: Sidecar) -> tuple[Wanted, ...]:
    """The videos of the recorded call."""
    request = recorded["request"]
    prompts, seeds = request["prompts"], next(iter(request["seeds"]), [])
    given = request["negative_prompts"]
    if not len(prompts) == len(seeds) == len(given) or not 0 <= recorded["video"] < len(
        prompts
    ):
        raise ArtifactError(
            f"{file}: names video {recorded['video']} of {len(prompts)} prompts "
            f"and {len(seeds)} seeds; it cannot be replayed"
        )
    return tuple(map(Wanted, prompts, given, seeds))


def _recorded(file: Path, recorded: Sidecar, asked: Settings) -> Settings:
    """The settings of a recorded run; where the user gave some, those."""
    request = recorded["request"]
    given = {**request["flags"], **recorded["how"], "options": request["options"]}
    loras = recorded["weights"].get("loras", [])
    fused = [LoraChoice(one["source"], one["scale"], one["component"]) for one in loras]
    if not asked.lora:
        given["lora"] = fused
    if asked.image is not None:
        if given.get("image") is None:
            raise UsageError(f"--image: {file} was made from no image; leave it out")
        given["image"] = asked.image
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
        batch_size=len(request["prompts"]),
        **read,
    )


def _inputs(file: Path, recorded: Sidecar, settings: Settings) -> dict[str, str]:
    """The digests of the recorded images and videos by the files that they are now.

    Raises:
        ArtifactError: one is not there, or is another.
    """
    image, found = recorded["request"]["flags"].get("image"), {}
    for name, wanted in recorded["inputs"].items():
        now, how = name, "put it there"
        if name == image:
            now, how = str(settings.image), "name it with --image"
        there = Path(now).expanduser().is_file()
        digest = file_digest(Path(now)) if there else ""
        if digest != wanted:
            why = f"has sha256 {digest[:16]}" if there else "is not there"
            raise ArtifactError(
                f"{now}: {why}, and {file} records a file with sha256 {wanted}; {how}"
            )
        found[now] = wanted
    return found


def _check_same(
    file: Path, recorded: Sidecar, run: VideoRun, inputs: Mapping[str, str]
) -> None:
    """Refuse other weights or more images than the recorded ones, before the work."""
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
    _check_loras(file, recorded, run)
    if more := sorted(run.inputs.keys() - inputs.keys()):
        raise ArtifactError(f"{more[0]}: is a file now, of which {file} knows nothing")


def _check_loras(file: Path, recorded: Sidecar, run: VideoRun) -> None:
    """Refuse other LoRAs than the recorded ones, wherever their files are now."""
    wanted = recorded["weights"].get("loras", [])
    found = [lora.as_dict() for lora in run.folder.loras]
    if len(found) != len(wanted):
        raise UsageError(
            f"--lora: {file} was made with {plural(len(wanted), 'LoRA')}; name as many"
        )
    for now, then in zip(found, wanted, strict=True):
        for key in ("sha256", "settings_sha256", "scale", "component"):
            values = then.get(key, ""), now.get(key, "")
            if values[0] != values[1]:
                shown = [show(value)[:18] for value in values]
                raise WeightsError(
                    f"LoRA {now['source']}: is not what {file} was made with (recorded "
                    f"{key} {shown[0]}, found {shown[1]}); name the same with --lora"
                )


def _changes(recorded: Sidecar) -> str:
    then = {**recorded["versions"], "system": recorded["platform"].get("system")}
    now = {**versions(), "system": platform.platform()}
    differences = [
        f"{name} {then.get(name) or 'unknown'} then, {now[name] or 'unknown'} now"
        for name in now
        if then.get(name) != now[name]
    ]
    return "; ".join(differences) or "no version differs"
