"""Runs stages on a run directory, and reads what a run directory records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.cli.asked.noise import Noise, read_noise
from tpuport.cli.asked.settings import Settings
from tpuport.core.enums import Backend, Pixels, Place, Task
from tpuport.core.files.outputs import Outputs, Video, VideoFiles
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.run_record import STAGES
from tpuport.core.files.sources import Source, read_image, read_video
from tpuport.core.reports import RunReport, StageReport
from tpuport.core.run.records import (
    FileRecord,
    Report,
    SourceRecord,
    recorded_stage,
)
from tpuport.core.run.sidecar import stage_note
from tpuport.core.spec.choices import choices
from tpuport.core.spec.component import TORCHAX
from tpuport.core.spec.request import Request
from tpuport.core.spec.requests import recorded_request, recorded_variant
from tpuport.errors import ArtifactError, UsageError
from tpuport.plugins import get_port

if TYPE_CHECKING:
    from tpuport.core.run.session import Session


def _request(session: Session, run: RunDirectory) -> Request:
    return recorded_request(session.port, run.settings, run.file)


def run_stage(
    session: Session,
    run: RunDirectory,
    name: str,
    *,
    noise: Noise | None = None,
    source: Source | None = None,
    inputs: Mapping[str, Any] | None = None,
    files: VideoFiles | None = None,
) -> tuple[dict[str, Any], StageReport]:
    """Run one stage, and record in run.json what a replay will need.

    Args:
        noise: of ``encode``, which writes the initial latents for ``denoise``.
        source: of ``encode``, which reads the image or video.
        inputs: of a later stage, where they were read before.
        files: of ``decode``; they get the frames, as bytes, while frames are made.
    """
    extra = {}
    if noise is not None:
        count = len(_request(session, run).prompts)
        extra["initial_latents"] = noise.for_videos(count)
    return session.run_stage_in(
        run,
        name,
        source=source,
        inputs=inputs,
        extra=extra,
        note=stage_note(
            session.settings,
            noise=None if noise is None else noise.record(),
            source=source,
        ),
        pixels=Pixels.UINT8,
        on_frames=None if files is None else files.take,
    )


def reusable(
    session: Session, run: RunDirectory, name: str, say: Callable[[str], None]
) -> bool:
    """Whether a stage is finished and was run as this session would run the stage.

    ``say`` is told what differs.
    """
    if not run.finished(name):
        return False
    record: Mapping[str, Any] = recorded_stage(run, name)
    nothing = StageReport(stage=name, backend="", unit="", total_seconds=0.0)
    now = session.stage_record(nothing)
    note = stage_note(session.settings)
    then = record.get("note") or {}
    keys = ["backend", "attention", *(["encode_on"] if name == STAGES[0] else [])]
    # Blocks change only stages that have native forms.
    components = session.port.stage(name).components
    native = any(session.port.components[c].native is not None for c in components)
    # Components that the stage does not use change nothing.
    used = session.port.stage(name).components_for(_request(session, run))
    chosen = choices(session.port, used)
    # Upstream's code has no other way to run.
    upstream = session.settings.backend == Backend.DIFFUSERS or (
        name == STAGES[0] and session.encode_on == Place.HOST
    )
    op_by_op = name in session.settings.no_jit and not upstream
    differences = [
        f"{key} {before}, now {after}"
        for key, before, after in [
            *((key, record[key], now[key]) for key in ("dtype", "mesh", "sharding")),
            *((key, then.get(key), note[key]) for key in keys),
            *([("blocks", record["blocks"], now["blocks"])] if native else []),
            *(
                (part, record["implementations"].get(part, TORCHAX), chosen[part])
                for part in (() if upstream else chosen)
            ),
            ("no_jit", record["op_by_op"], op_by_op),
        ]
        if before != after
    ]
    if differences:
        say(f"{name}: was finished with {'; '.join(differences)}: running it again")
    return not differences


def check_noise(session: Session, run: RunDirectory, noise: Noise | None) -> None:
    """Refuse a run directory whose encode stage kept other initial latents.

    Raises:
        ArtifactError: the initial latents differ.
    """
    import torch

    if not run.finished(STAGES[0]):
        return
    kept = run.read_stage(STAGES[0], session.port.stage(STAGES[0]).writes)
    found = kept.get("initial_latents")
    asked = None if noise is None else noise.for_videos(len(kept["prompt_embeds"]))
    same = found is asked or (
        found is not None and asked is not None and torch.equal(found, asked)
    )
    if not same:
        words = {True: "initial latents", False: "no initial latents"}
        raise ArtifactError(
            f"{run.file}: is of another request: it was made with "
            f"{words[found is not None]}, asked with "
            f"{'others' if found is not None and noise else words[noise is not None]}; "
            "use another run directory"
        )


def decode_videos(
    session: Session,
    run: RunDirectory,
    outputs: Outputs,
    before: Sequence[StageReport],
    started: float,
) -> tuple[list[Video], RunReport]:
    """Decode a run into files.

    Args:
        before: the reports of the stages that were run before.
        started: when the first stage began, by ``time.perf_counter``.

    Returns:
        the videos, and the report of all stages.

    Raises:
        OutputError, ArtifactError: a file cannot be written.
    """
    request = _request(session, run)
    with VideoFiles(outputs, request.fps, request.num_frames) as files:
        inputs = session.read_inputs(run, STAGES[2])
        _, stage = run_stage(session, run, STAGES[2], inputs=inputs, files=files)
        report = session.run_report([*before, stage], time.perf_counter() - started)
        note = {"note": stage_note(session.settings)}
        decode = {**session.stage_record(stage), **note}
        records: dict[str, Mapping[str, Any]]
        records = {name: recorded_stage(run, name) for name in STAGES[:2]}
        origin = session.origin({**records, STAGES[2]: decode})
        origin = replace(origin, fingerprints=lambda: run.weights)
        # With sidecars, and recorded in run.json.
        videos = files.publish(
            partial(origin.describe, request, inputs["latents"], report)
        )
        run.record_output(STAGES[2], [video.path for video in videos], decode)
    return videos, report


def describe_results(
    command: str,
    session: Session,
    run: RunDirectory,
    report: RunReport,
    videos: Sequence[Video] = (),
) -> dict[str, Any]:
    """The JSON that every command that runs stages prints."""
    return {
        "command": command,
        "model": session.port.name,
        "variant": session.variant.name,
        "weights": session.checkpoint.reference,
        "videos": [video.as_dict() for video in videos],
        "dtype": session.dtype,
        "mesh": report.mesh,
        "attention": str(session.settings.attention),
        "blocks": session.port.blocks,
        "implementations": dict(report.implementations),
        "backend": session.settings.backend,
        "report": report.as_dict(),
        "settings": run.settings,
    }


# --- runs that exist


def open_existing(settings: Settings, stage: str) -> tuple[RunDirectory, Settings]:
    """The run directory to run a stage in, and the settings that the run implies.

    Model, variant and weights come from run.json where the user gave none.

    Raises:
        UsageError: ``--run-dir`` is missing.
        ArtifactError: the run directory is not usable, or of another model or variant.
    """
    if settings.run_dir is None:
        raise UsageError("--run-dir is missing; name the folder of the run")
    run = RunDirectory.open(settings.run_dir)
    run.check_request(model=settings.model, variant=settings.variant)
    port = get_port(run.model)
    weights, first = settings.weights, stage == STAGES[0]
    if weights is None:
        report = encode_report(run) if first else recorded_stage(run, STAGES[0])
        weights = report and report["weights"]
    return run, replace(
        settings,
        model=run.model,
        variant=recorded_variant(port, run.variant, run.file),
        weights=weights,
        # Other stages never run the text encoder: its heads need not fit the mesh.
        encode_on=settings.encode_on if first else Place.HOST,
    )


def encode_report(run: RunDirectory) -> Report | None:
    """The report of encode in run.json; ``None`` if encode was never finished.

    Raises:
        ArtifactError: the record is not usable.
    """
    try:
        run.report(STAGES[0])
    except ArtifactError:
        return None
    return recorded_stage(run, STAGES[0])


def inputs_of(run: RunDirectory) -> list[Path]:
    """The files that a run was made from, which no output may replace.

    Raises:
        ArtifactError: the record of encode is not usable.
    """
    report = encode_report(run)
    note = {} if report is None else report.get("note", {})
    source, noise = note.get("source"), note.get("initial_latents")
    names = [*(source["files"] if source else ()), *([noise["file"]] if noise else ())]
    return [Path(name) for name in names]


def recorded_noise(entry: FileRecord | None, by: Path) -> Noise | None:
    """The initial noise that the file ``by`` records, read from the same file.

    Raises:
        ArtifactError: the file has changed.
    """
    if entry is None:
        return None
    noise = read_noise(entry["file"])
    assert noise is not None
    if noise.sha256 != entry["sha256"]:
        raise ArtifactError(
            f"{entry['file']}: is not the file of initial latents that {by} records "
            f"(recorded sha256 {entry['sha256'][:16]}, found {noise.sha256[:16]})"
        )
    return noise


def recorded_source(
    entry: SourceRecord | None, by: Path, request: Request
) -> Source | None:
    """The image or video that the file ``by`` records, with the same pixels.

    Raises:
        ArtifactError: the pixels have changed, or came from memory.
    """
    if not request.sources:
        return None
    if not entry or not entry["files"]:
        raise ArtifactError(
            f"{by}: does not say which file the video is made from; name the file with "
            "--image or --video where the command has them, or begin a new run"
        )
    names = entry["files"]
    if request.task == Task.IMAGE:
        source = read_image(names)
    else:
        frames = request.num_frames
        source = read_video(names[0], frames).first(frames)
    if source.digests_for(len(request.prompts)) != request.sources:
        raise ArtifactError(f"{names[0]}: is not the {source.kind} that {by} records")
    return source
