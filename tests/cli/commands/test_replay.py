"""``tpuport replay``: the same latents, or why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tools import Cli, Made
from tests.core.files.videos import read_back
from tpuport.core.files.sealed_json import read_sidecar, write_sidecar


@pytest.fixture
def sidecar(made: Made) -> Path:
    """The sidecar of the second of two videos."""
    return Path(made.ran.json["videos"][1]["sidecar"])


def altered(sidecar: Path, **changes: Any) -> Path:
    """A copy in the current folder that says something else."""
    path = Path("altered.json")
    write_sidecar(path, {**read_sidecar(sidecar), **changes})
    return path


def test_a_replay_gives_the_same_bytes(cli: Cli, cache: Path, sidecar: Path) -> None:
    ran = cli("replay", sidecar, "--out", "again.gif", "--json")
    assert ran.code == 0, ran.err
    assert "the same latents" in ran.last
    assert ran.json["same"] is True
    assert ran.json["latents_sha256"] == read_sidecar(sidecar)["latents_sha256"]
    assert read_back("again.gif")[:3] == (9, 64, 96)
    assert read_sidecar(Path("again.gif.json"))["request"]["prompts"] == ["a fox"]
    assert list((cache / "runs").iterdir()) == []


def test_other_latents_name_both_digests_and_what_changed(
    cli: Cli, cache: Path, sidecar: Path
) -> None:
    recorded = read_sidecar(sidecar)
    stages = recorded["stages"]
    stages["denoise"]["versions"]["jax"] = "0.0.1"
    file = altered(sidecar, latents_sha256="0" * 64, stages=stages)
    ran = cli("replay", file, "--report", "report.json")
    assert ran.code == 1
    assert ran.out == ""
    line = next(x for x in ran.err.splitlines() if x.startswith("error: "))
    assert "0" * 64 in line
    assert recorded["latents_sha256"] in line
    assert "jax 0.0.1 then" in line
    document = json.loads(Path("report.json").read_text())
    assert document["same"] is False
    assert document["latents_sha256"] == recorded["latents_sha256"]
    assert list((cache / "runs").iterdir()) == []


def test_other_weights_are_refused_before_the_work(
    cli: Cli, sidecar: Path, weights: Path
) -> None:
    (file,) = (weights / "vae").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    ran = cli("replay", sidecar, "--weights", weights)
    assert ran.code == 1
    assert "vae is not what" in ran.last
    assert "started" not in ran.err


def test_a_sidecar_that_is_no_sidecar_is_refused(cli: Cli, sidecar: Path) -> None:
    ran = cli("replay", "none.json")
    assert ran.code == 2
    assert "is missing" in ran.last
    Path("text.json").write_text("{")
    assert cli("replay", "text.json").code == 1
    Path("edited.json").write_text(sidecar.read_text().replace("a fox", "a dog"))
    assert "was altered" in cli("replay", "edited.json").last
    older = json.loads(sidecar.read_text()) | {"schema_version": 1}
    Path("older.json").write_text(json.dumps(older))
    last = cli("replay", "older.json").last
    assert "has schema_version 1, and this tpuport reads 2" in last
    assert "make the video again" in last
    ran = cli("replay", altered(sidecar, stages={}))
    assert ran.code == 1
    assert "cannot be replayed" in ran.last
