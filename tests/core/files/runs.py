"""A toy run that the tests of the run directory share."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.sealed_json import document_checksum
from tpuport.core.files.stage_tensors import TensorSpec
from tpuport.errors import ArtifactError

FLOATS = ("float32", "bfloat16")
EMBEDDINGS = (
    TensorSpec(name="prompt", shape=("N", 4, 8), dtypes=FLOATS),
    TensorSpec(name="negative", shape=("N", 4, 8), dtypes=FLOATS),
    TensorSpec(name="mask", shape=("N", 4), dtypes=("int32",), optional=True),
)
LATENTS = (TensorSpec(name="latents", shape=("N", 2, 3), dtypes=("float32",)),)
SETTINGS = {"prompt": "a cat", "steps": 50, "size": [480, 720], "cache": {"every": 2}}


def embeddings(value: float = 1.0) -> dict[str, torch.Tensor]:
    prompt = torch.full((2, 4, 8), value, dtype=torch.bfloat16)
    return {"prompt": prompt, "negative": torch.zeros(2, 4, 8)}


def latents() -> dict[str, torch.Tensor]:
    return {"latents": torch.arange(12.0).reshape(2, 2, 3)}


def encode(run: RunDirectory, value: float = 1.0) -> None:
    run.write_stage("encode", embeddings(value), EMBEDDINGS, {"s": 1.5})


def denoise(run: RunDirectory) -> None:
    run.write_stage("denoise", latents(), LATENTS, {"steps": 50})


def request(**changes: Any) -> dict[str, Any]:
    asked = {"model": "toy", "variant": "small", "settings": SETTINGS, "weights": {}}
    return {**asked, **changes}


def refusal(action: Any, *args: Any, **kwargs: Any) -> str:
    """The message of the ArtifactError that ``action`` raises, which is one line."""
    with pytest.raises(ArtifactError) as caught:
        action(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewrite(run: RunDirectory, change: Any, *, sign: bool = True) -> None:
    """Alter run.json by hand; with ``sign``, as someone who redoes the checksum."""
    document = json.loads(run.file.read_text())
    change(document)
    if sign:
        document["checksum"] = document_checksum(document)
    run.file.write_text(json.dumps(document))


#: What every kind of file ends with on a full disk.
NO_ROOM = (
    "cannot be written: no room is left on the disk; make room, or name another place"
)


def failing(*args: Any, **kwargs: Any) -> None:
    """A full disk."""
    raise OSError(28, "No space left on device")
