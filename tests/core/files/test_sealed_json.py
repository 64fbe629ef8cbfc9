"""The sidecar of a video comes back as written, or is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.core.files.runs import refusal
from tpuport.core.files.sealed_json import read_sidecar, sidecar_bytes, sidecar_path


def test_a_sidecar_comes_back_as_written_and_never_is_run_json(tmp_path: Path) -> None:
    path = sidecar_path(tmp_path / "run.mp4")
    assert path == tmp_path / "run.mp4.json"
    assert sidecar_path(tmp_path / "run") == tmp_path / "run.png.json"
    path.write_bytes(sidecar_bytes({"seed": 7, "size": (480, 720)}))
    assert read_sidecar(path) == {"seed": 7, "size": [480, 720]}
    document = json.loads(path.read_text())
    assert (document["schema"], document["schema_version"]) == ("tpuport.sidecar", 2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text[:-9], "is not JSON, or is cut short"),
        (lambda text: text.replace("sidecar", "run"), 'not "tpuport.sidecar"'),
        (lambda text: text.replace('on": 2', 'on": 9'), "has schema_version 9"),
        (lambda text: text.replace("7", "8", 1), "was altered"),
        (None, "is missing"),
    ],
)
def test_a_sidecar_is_refused_like_a_run_json(
    tmp_path: Path, change: Any, expected: str
) -> None:
    path = tmp_path / "video.mp4.json"
    path.write_bytes(sidecar_bytes({"seed": 7}))
    if change is None:
        path.unlink()
    else:
        path.write_text(change(path.read_text()))
    message = refusal(read_sidecar, path)
    assert message.startswith(f"{path}: ")
    assert expected in message
