"""The forms of what run.json and sidecars say of stages and videos, and two readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from tpuport.core.enums import Backend, Blocks, Dtype, Place, Tiling
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.sealed_json import read_sidecar
from tpuport.core.files.typed import checked
from tpuport.core.spec.tiling import Tiled


class FileRecord(TypedDict):
    """The file of initial latents of a run."""

    file: str
    sha256: str


class NoiseRecord(FileRecord):
    """The initial latents of a video; ``index`` is the place in the file."""

    index: int


class SourceRecord(TypedDict):
    """The image or video that a run starts from."""

    kind: str
    files: list[str]


class Note(TypedDict, total=False):
    """How a stage was asked for, in run.json."""

    backend: Backend
    attention: str
    encode_on: Place
    vae_tiling: Tiling
    versions: dict[str, str | None]
    initial_latents: FileRecord | None
    source: SourceRecord | None
    given: list[str]


class Compile(TypedDict):
    """Where a program came from: loaded from a file, or from jax's own cache."""

    loaded: bool
    cached: bool


class Ran(TypedDict):
    """How a stage ran, in sidecars and in run.json."""

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
    """The part of a stage's report in run.json that is read again."""

    compiles: list[Compile]
    tiling: Tiled | None
    op_by_op: bool
    note: NotRequired[Note]


class HowStage(Ran):
    """How a stage ran, in sidecars alone."""

    attention: str
    versions: dict[str, str | None]
    programs: dict[str, int]


class HowEncode(HowStage):
    """How encode ran."""

    encode_on: Place


class HowDecode(HowStage):
    """How decode ran."""

    vae_tiling: Tiling


class Stages(TypedDict):
    """How each stage ran."""

    encode: HowEncode
    denoise: HowStage
    decode: HowDecode


class Weights(TypedDict):
    """Where the weights came from, and the fingerprint of each component."""

    source: str
    fingerprints: dict[str, str | None]


class Output(TypedDict):
    """The file of a video, or its folder of frames."""

    file: str
    kind: str
    sha256: str
    bytes: int


class Sidecar(TypedDict):
    """The JSON beside a video; ``video`` is the video's place in the request."""

    model: str
    variant: str
    weights: Weights
    request: dict[str, Any]
    video: int
    initial_latents: NoiseRecord | None
    source: SourceRecord | None
    given: list[str]
    stages: Stages
    platform: dict[str, Any]
    output: Output
    latents_sha256: str
    summary: dict[str, Any]


def read(file: Path) -> Sidecar:
    """A sidecar with all that a replay needs.

    Raises:
        ArtifactError: the file is no such sidecar.
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
