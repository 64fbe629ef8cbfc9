"""``tpuport replay``: the same latents, or why not."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tpuport
from tests.cli.tools import Cli, Made
from tests.core.files.videos import read_back
from tpuport.core.files.sealed_json import read_sidecar, sidecar_bytes
from tpuport.errors import OutputError, UsageError


@pytest.fixture
def sidecar(made: Made) -> Path:
    """The sidecar of the second of two videos."""
    return Path(made.ran.json["videos"][1]["sidecar"])


def altered(sidecar: Path, **changes: Any) -> Path:
    """A copy in the current folder that says something else."""
    path = Path("altered.json")
    path.write_bytes(sidecar_bytes({**read_sidecar(sidecar), **changes}))
    return path


def test_a_replay_gives_the_same_bytes(cli: Cli, cache: Path, sidecar: Path) -> None:
    """Also: the sidecar is found by its video, and what is replayed is said."""
    video = sidecar.with_suffix("")
    ran = cli("replay", video, "--out", "again.gif", "--json")
    assert ran.code == 0, ran.err
    assert ran.last.startswith(f"the same latents as {sidecar}: ")
    assert ran.err.splitlines()[0] == (
        f"replaying {sidecar} (cogvideox demo, 'a fox'): making 1 video from text: "
        "96x64, 9 frames at 8 fps, 2 steps, guidance 6, seed 7"
    )
    assert ran.json["same"] is True
    assert ran.json["latents_sha256"] == read_sidecar(sidecar)["latents_sha256"]
    assert read_back("again.gif")[:3] == (9, 64, 96)
    assert read_sidecar(Path("again.gif.json"))["request"]["prompts"] == ["a fox"]
    assert list((cache / "runs").iterdir()) == []


def test_a_recording_elsewhere_is_not_fetched(cli: Cli) -> None:
    ran = cli("replay", "https://example.com/fox.mp4")
    assert ran.code == 2
    assert "is an address; download it" in ran.last


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


def copied(sidecar: Path, name: str) -> Path:
    """A video and its sidecar under another name in the current folder."""
    shutil.copy(sidecar.with_suffix(""), f"{name}.mp4")
    return Path(shutil.copy(sidecar, f"{name}.mp4.json"))


def test_a_sidecar_beside_another_video_is_refused(cli: Cli, sidecar: Path) -> None:
    own = copied(sidecar, "fox")
    with Path("fox.mp4").open("ab") as file:
        file.write(b"!")
    for named in (own, "fox.mp4", "fox"):
        ran = cli("replay", named)
        assert ran.code == 1
        assert "fox.mp4: is not the video of fox.mp4.json" in ran.last


def test_a_replay_keeps_what_it_compares_with(cli: Cli, sidecar: Path) -> None:
    own = copied(sidecar, "fox")
    before = {file: file.read_bytes() for file in (own, Path("fox.mp4"))}
    for flags in (("--out", "fox.mp4"), ("--report", own), ("--report", "fox.mp4")):
        ran = cli("replay", "fox.mp4", *flags, "--overwrite")
        assert ran.code == 2
        assert "which the run reads" in ran.last
    assert {file: file.read_bytes() for file in before} == before


@pytest.mark.parametrize(
    ("where", "field", "value", "said", "code"),
    [
        ("request", "num_inference_steps", 0, "0 denoising steps", 1),
        ("request", "num_frames", 10, "10", 2),
        ("denoise", "mesh", "pp=2", "pp", 2),
    ],
)
def test_what_is_wrong_in_a_sidecar_is_said_with_its_name(
    cli: Cli, sidecar: Path, where: str, field: str, value: Any, said: str, code: int
) -> None:
    recorded = read_sidecar(sidecar)
    {**recorded, **recorded["stages"]}[where][field] = value
    ran = cli("replay", altered(sidecar, **recorded))
    assert ran.code == code
    assert ran.last.startswith("error: altered.json: ")
    assert said in ran.last


def test_a_variant_that_the_model_has_not_is_refused(cli: Cli, sidecar: Path) -> None:
    ran = cli("replay", altered(sidecar, variant="../x"))
    assert ran.code == 1
    assert ran.last.startswith("error: altered.json: has no usable variant (model ")


# --- from Python


def test_a_result_is_saved_with_a_sidecar_that_replays(
    cli: Cli, cache: Path, made: Made
) -> None:
    size = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 2}
    asked = {**size, "seed": 7, "negative_prompt": "blurry", "pixels": "uint8"}
    with tpuport.load("cogvideox", cache_dir=cache) as session:
        result = session.generate("a fox", **asked)
        taken = session.generate("a fox", **asked, on_frames=lambda *_: None)
        given = session.generate("a fox", **asked, latents=torch.zeros(1, 4, 16, 8, 12))
    # As a worker hands it on, without the session.
    result = pickle.loads(pickle.dumps(result))
    assert result.save("fox.mp4") == [Path("fox.mp4")]
    assert result.save("fox") == [Path("fox-2.mp4")]
    assert result.save("fox.mp4", overwrite=True) == [Path("fox.mp4")]
    sidecar = read_sidecar(Path("fox.mp4.json"))
    then = made.ran.json["videos"][1]["latents_sha256"]
    assert sidecar["latents_sha256"] == then
    by_command = read_sidecar(Path(made.ran.json["videos"][1]["sidecar"]))
    assert sidecar["weights"] == by_command["weights"]
    assert sidecar["request"] == by_command["request"]
    assert sidecar.keys() == by_command.keys()
    assert cli("replay", "fox.mp4").code == 0
    with pytest.raises(UsageError, match="on_frames took them"):
        taken.save("taken.mp4")
    slow = replace(result, request=replace(result.request, fps=0.01))
    with pytest.raises(OutputError, match=r"ask for fps 0\.0"):  # no flag
        slow.save("slow.gif")
    # Latents in memory: a replay would start from others.
    given.save("given.gif")
    ran = cli("replay", "given.gif")
    assert ran.code == 1
    assert "made from tensors in memory (initial_latents)" in ran.last
