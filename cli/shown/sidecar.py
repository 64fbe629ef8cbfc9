"""The JSON beside a video: what a replay needs, and a summary for people."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired

from typing_extensions import TypedDict

from tpuport.cli.shown.outputs import Outputs
from tpuport.core.enums import Backend, Blocks, Dtype, Place, Tiling
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.run_record import STAGES
from tpuport.core.files.sealed_json import read_sidecar
from tpuport.core.files.typed import checked
from tpuport.core.reports import RunReport
from tpuport.core.spec.requests import recorded_request

if TYPE_CHECKING:
    import torch

    from tpuport.core.run.session import Session


class FileRecord(TypedDict):
    """The initial latents of a run."""

    file: str
    sha256: str


class NoiseRecord(FileRecord):
    """The initial latents of a video: its place in the file."""

    index: int


class SourceRecord(TypedDict):
    """The image or video that a run starts from."""

    kind: str
    files: list[str]


class Note(TypedDict, total=False):
    """What run.json keeps of how a stage was asked for."""

    backend: Backend
    attention: str
    encode_on: Place
    vae_tiling: Tiling
    versions: dict[str, str | None]
    initial_latents: FileRecord | None
    source: SourceRecord | None


class Compile(TypedDict):
    """Of a program made ready: where it came from."""

    loaded: bool
    cached: bool


class Tiled(TypedDict):
    """Of how decode ran."""

    tiled: bool


class Ran(TypedDict):
    """What a sidecar and run.json both say of a stage."""

    backend: Backend
    dtype: Dtype
    mesh: str
    sharding: str
    blocks: Blocks
    implementations: dict[str, str]
    platform: str
    weights: str
    total_seconds: float
    compile_seconds: float
    first_call_seconds: float
    seconds_per_call: float | None


class Report(Ran):
    """Of the report of a stage in run.json, what is read again."""

    compiles: list[Compile]
    tiling: Tiled | None
    op_by_op: bool
    note: NotRequired[Note]


class HowStage(Ran):
    """How a stage of a video was run."""

    attention: str
    versions: dict[str, str | None]
    programs: dict[str, int]


class HowEncode(HowStage):
    """And where the encoder ran."""

    encode_on: Place


class HowDecode(HowStage):
    """And whether in tiles."""

    vae_tiling: Tiling


class Stages(TypedDict):
    """Of each stage."""

    encode: HowEncode
    denoise: HowStage
    decode: HowDecode


class Weights(TypedDict):
    """Where the weights came from, and their fingerprints by component."""

    source: str
    fingerprints: dict[str, str | None]


class Sidecar(TypedDict):
    """The JSON beside a video; ``video`` is its place in the batch of ``request``."""

    model: str
    variant: str
    weights: Weights
    request: dict[str, Any]
    video: int
    initial_latents: NoiseRecord | None
    source: SourceRecord | None
    stages: Stages
    platform: dict[str, Any]
    output: dict[str, str]
    latents_sha256: str
    summary: dict[str, Any]


def read(file: Path) -> Sidecar:
    """A sidecar with all that a replay needs.

    Raises:
        ArtifactError: it is not usable.
    """
    return checked(Sidecar, read_sidecar(file), file, "it cannot be replayed")


def recorded_stage(run: RunDirectory, name: str) -> Report:
    """What run.json records of a finished stage.

    Raises:
        ArtifactError: the stage is not finished, or the record is not usable.
    """
    at, again = f"stages.{name}.report", f"run `tpuport {name}` again"
    report = run.report(name)
    return checked(Report, report, run.file, again, at=at, extra="ignore")


def describe(
    session: Session,
    run: RunDirectory,
    index: int,
    *,
    latents: torch.Tensor,
    outputs: Outputs,
    report: RunReport,
) -> dict[str, Any]:
    """The sidecar of video ``index`` of a run.

    Where and how a stage ran is in ``stages``, since stages may run on different
    machines. The full report is in what ``--report`` writes.

    Args:
        latents: of all videos of the run, in the leading dim.
    """
    from tpuport.core.run.result import latents_digest

    whole = recorded_request(session.port, run.settings, run.file)
    batch, place = divmod(index, whole.batch_size)
    request = replace(
        whole,
        prompts=whole.prompts[whole.slice(batch)],
        negative_prompts=whole.negative_prompts[whole.slice(batch)],
        seeds=(whole.seeds[batch],),
        sources=whole.sources[whole.slice(batch)],
    )
    given: Mapping[str, Any] = recorded_stage(run, STAGES[0]).get("note") or {}
    noise = given.get("initial_latents")
    path = outputs.paths[index]
    return {
        "model": run.model,
        "variant": run.variant,
        "weights": {
            "source": session.checkpoint.reference,
            "fingerprints": run.weights,
        },
        "request": request.as_dict(),
        "video": place,
        "initial_latents": None if noise is None else {**noise, "index": index},
        "source": given.get("source"),
        "stages": {name: _stage(recorded_stage(run, name), name) for name in STAGES},
        "platform": {
            "system": platform.platform(),
            "backend": session.components.platform,
            "devices": int(session.mesh.devices.size),
            "device_kind": str(session.mesh.devices.flat[0].device_kind),
        },
        "output": {"file": path.name, "kind": outputs.kind},
        "latents_sha256": latents_digest(latents[index : index + 1]),
        "summary": {
            "total_seconds": round(report.total_seconds, 3),
            "peak_host_bytes": report.peak_host_bytes,
            "peak_device_bytes": report.peak_device_bytes,
        },
    }


def _stage(record: Report, name: str) -> dict[str, Any]:
    """How a stage of the run was run, and how long it took."""
    note: Mapping[str, Any] = record.get("note") or {}
    per_call = record["seconds_per_call"]
    entry: dict[str, Any] = {
        "backend": note.get("backend", record["backend"]),
        "attention": note.get("attention", "auto"),
        "dtype": record["dtype"],
        "mesh": record["mesh"],
        "sharding": record["sharding"],
        "blocks": record["blocks"],
        "implementations": record["implementations"],
        "platform": record["platform"],
        "weights": record["weights"],
        "versions": note.get("versions", {}),
        "total_seconds": round(record["total_seconds"], 3),
        "compile_seconds": round(record["compile_seconds"], 3),
        "first_call_seconds": round(record["first_call_seconds"], 3),
        "seconds_per_call": None if per_call is None else round(per_call, 4),
        "programs": _programs(record["compiles"]),
    }
    if name == STAGES[0]:
        entry["encode_on"] = note.get("encode_on", "device")
    if name == STAGES[2]:
        # What was done, which is another video; what was asked where that is not known.
        decided = record["tiling"]
        if decided is None:
            entry["vae_tiling"] = note.get("vae_tiling", "auto")
        else:
            entry["vae_tiling"] = "on" if decided["tiled"] else "off"
    return entry


def _programs(compiles: Iterable[Compile]) -> dict[str, int]:
    """How many programs were loaded, came from jax's cache, and were compiled."""
    counts = {"loaded": 0, "cached": 0, "compiled": 0}
    for made in compiles:
        cached = "cached" if made["cached"] else "compiled"
        counts["loaded" if made["loaded"] else cached] += 1
    return counts
