"""The JSON beside a video that a whole pipeline made: what a replay needs."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from typing_extensions import TypedDict

from tpuport.core.enums import Backend, Blocks, Dtype, Tiling, WeightsOn
from tpuport.core.files.sealed_json import read_sidecar
from tpuport.core.files.typed import checked


class FusedLora(TypedDict):
    """A LoRA in the weights: its file or hub id, and the sha256 of the file.

    ``settings_sha256`` is of peft's ``adapter_config.json`` beside the file.
    """

    source: str
    scale: float
    component: str
    sha256: str
    settings_sha256: NotRequired[str]


class Weights(TypedDict):
    """Where the weights came from, and their fingerprints by component."""

    source: str
    fingerprints: dict[str, str]
    loras: NotRequired[list[FusedLora]]


class Request(TypedDict):
    """The prompt and the seed of the video, and the flags that were given.

    A prompt that was not given is ``null``: upstream has a default of its own.
    """

    prompts: list[str | None]
    negative_prompts: list[str | None]
    seeds: list[list[int]]
    flags: dict[str, Any]
    options: dict[str, Any]


class How(TypedDict):
    """How the pipeline was run."""

    backend: Backend
    dtype: Dtype
    mesh: str
    attention: str
    on_host: list[str]
    blocks: Blocks
    sharding: str
    weights_on: NotRequired[WeightsOn]
    vae: str
    vae_tiling: Tiling | None


class Output(TypedDict):
    """The file of a video, or its folder of frames."""

    file: str
    kind: str
    sha256: str
    bytes: int


class Sidecar(TypedDict):
    """The JSON.

    ``video`` says which video of the call it is that ``request`` is of, and ``noise``
    which of the noises of ``--latents`` the call's first was made from. ``batch`` is
    the digest of the request, of a video that ``tpuport batch`` made. ``inputs`` are
    the digests of images and videos by their file, and ``frames_sha256`` is of the
    frames: see :func:`frames_digest`.
    """

    pipeline: str
    weights: Weights
    request: Request
    video: int
    noise: int
    batch: NotRequired[str]
    inputs: dict[str, str]
    how: How
    versions: dict[str, str | None]
    platform: dict[str, Any]
    output: Output
    frames_sha256: str
    summary: dict[str, Any]


def read(file: Path) -> Sidecar:
    """A sidecar with all that a replay needs.

    Raises:
        ArtifactError: it is not usable.
    """
    return checked(Sidecar, read_sidecar(file), file, "it cannot be replayed")


def frames_digest(frames: np.ndarray) -> str:
    """sha256 of the float32 frames of one video, and their shape."""
    digest = hashlib.sha256(str(frames.shape).encode())
    digest.update(np.ascontiguousarray(frames, np.float32).tobytes())
    return digest.hexdigest()
