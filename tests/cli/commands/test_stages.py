"""The stage commands on a run directory that was copied from elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from math import nan
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.tools import SMALL, Cli, Made
from tests.core.files.videos import read_back
from tests.tolerances import TOLERANCES
from tpuport import api
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.run_lock import working_in
from tpuport.core.files.sealed_json import read_sidecar

SETTINGS = ("--prompt", "a panda", "--prompt", "a fox", "--seed", "7", *SMALL)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_stages_in_a_row_are_generate(cli: Cli, made: Made) -> None:
    ran = cli(
        "encode", *SETTINGS, "--negative-prompt", "blurry", "--run-dir", "a", "--json"
    )
    assert ran.code == 0, ran.err
    assert ran.json["files"] == ["a/embeddings.safetensors"]
    shutil.move("a", "elsewhere")
    ran = cli("denoise", "--run-dir", "elsewhere", "--json")
    assert ran.code == 0, ran.err
    (stage,) = ran.json["report"]["stages"]
    assert stage["stage"] == "denoise"
    ran = cli("decode", "--run-dir", "elsewhere", "--json", "--report", "r.json")
    assert ran.code == 0, ran.err
    assert json.loads(Path("r.json").read_text()) == ran.json
    expected = [Path("elsewhere/video-000.mp4"), Path("elsewhere/video-001.mp4")]
    assert [Path(v["path"]) for v in ran.json["videos"]] == expected
    assert ran.json["settings"] == made.ran.json["settings"]
    for ours, theirs in zip(expected, made.videos, strict=True):
        assert sha256(ours) == sha256(theirs)


def test_a_stage_reads_only_its_own_components(
    cli: Cli, run: Path, weights: Path
) -> None:
    """The text encoder's weights are garbage, and denoise does not notice."""
    (latents,) = load_file(run / "latents.safetensors").values()
    for name in ("text_encoder", "vae"):
        (file,) = (weights / name).glob("*.safetensors")
        file.write_bytes(b"garbage")
    ran = cli("denoise", "--run-dir", run, "--weights", weights)
    assert ran.code == 0, ran.err
    (again,) = load_file(run / "latents.safetensors").values()
    assert latents.equal(again)


def test_other_weights_are_refused(cli: Cli, run: Path, weights: Path) -> None:
    (file,) = (weights / "transformer").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    ran = cli("denoise", "--run-dir", run, "--weights", weights)
    assert ran.code == 1
    assert "other weights for transformer" in ran.last


def test_upstream_runs_any_stage_on_the_same_files(cli: Cli, run: Path) -> None:
    (ours,) = load_file(run / "latents.safetensors").values()
    ran = cli("denoise", "--run-dir", run, "--backend", "diffusers")
    assert ran.code == 0, ran.err
    (theirs,) = load_file(run / "latents.safetensors").values()
    assert (ours - theirs).abs().max() < TOLERANCES["video float32"]
    ran = cli("decode", "--run-dir", run, "--out", "v.webm")
    assert ran.code == 0, ran.err
    sidecar = read_sidecar(Path("v-000.webm.json"))
    backends = {name: s["backend"] for name, s in sidecar["stages"].items()}
    wanted = {"encode": "tpuport", "denoise": "diffusers", "decode": "tpuport"}
    assert backends == wanted
    assert read_back("v-001.webm")[:3] == (9, 64, 96)


def test_a_run_of_another_model_is_refused(cli: Cli, run: Path) -> None:
    ran = cli("denoise", "--run-dir", run, "--model", "other")
    assert ran.code == 1
    assert "other" in ran.last
    assert "cogvideox" in ran.last


def test_what_is_not_finished_is_asked_for(cli: Cli, run: Path) -> None:
    for command in ("encode", "denoise", "decode"):
        prompt = ("--prompt", "a") if command == "encode" else ()
        ran = cli(command, *prompt)
        assert ran.code == 2
        assert "--run-dir is missing" in ran.last
    ran = cli("denoise", "--run-dir", "none")
    assert ran.code == 2
    assert "does not exist" in ran.last
    (run / "latents.safetensors").unlink()
    ran = cli("decode", "--run-dir", run)
    assert ran.code == 1
    assert f"tpuport denoise --run-dir {run}" in ran.last


def test_latents_of_the_user_are_refused_before_the_work(cli: Cli, run: Path) -> None:
    RunDirectory.open(run).invalidate_after("encode")
    (run / "latents.safetensors").write_bytes(b"mine")
    ran = cli("denoise", "--run-dir", run)
    assert ran.code == 1
    assert "latents.safetensors: is there and was not made by this run" in ran.err
    assert "denoise: " not in ran.err
    assert (run / "latents.safetensors").read_bytes() == b"mine"


def test_altered_files_are_refused_by_name(cli: Cli, run: Path) -> None:
    file = run / "latents.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    ran = cli("decode", "--run-dir", run)
    assert ran.code == 1
    assert "latents.safetensors: is cut short" in ran.last
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    ran = cli("decode", "--run-dir", run)
    assert ran.code == 1
    assert "latents.safetensors: is not the file" in ran.last
    document = json.loads((run / "run.json").read_text())
    document["settings"]["num_inference_steps"] = 3
    (run / "run.json").write_text(json.dumps(document))
    ran = cli("decode", "--run-dir", run)
    assert ran.code == 1
    assert "run.json: was altered" in ran.last


def test_damaged_embeddings_are_made_again_as_the_hint_says(
    cli: Cli, run: Path
) -> None:
    """What to make is read from run.json, and nothing else may be said of it."""
    run = Path(run.name)  # a line of an error has no room for a long path, twice
    file = run / "embeddings.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    ran = cli("denoise", "--run-dir", run)
    assert ran.code == 1
    assert f"run `tpuport encode --run-dir {run}` again" in ran.last
    refused = cli("encode", "--run-dir", run, "--steps", "3")
    assert refused.code == 2
    assert "--steps: " in refused.last
    ran = cli("encode", "--run-dir", run)
    assert ran.code == 0, ran.err
    assert file.read_bytes() == whole


def test_a_run_directory_that_is_in_use_is_refused_at_once(
    cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "open_session", None)
    before = (run / "run.json").read_bytes()
    prompt = ("--prompt", "a")
    commands = (("encode",), ("denoise",), ("decode",), ("generate", *prompt))
    with working_in(run):
        for command in (*commands, ("encode", *prompt)):
            ran = cli(*command, "--run-dir", run)
            assert ran.code == 1
            assert f"process {os.getpid()} is at work in this run dir" in ran.last
    assert (run / "run.json").read_bytes() == before


def test_a_file_for_a_run_directory_is_refused_at_once(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "open_session", None)
    Path("file").touch()
    for folder in ("file", "file/run"):
        for command in ("generate", "encode"):
            ran = cli(command, "--prompt", "a", "--run-dir", folder)
            assert ran.code == 2
            assert ran.last.startswith(f"error: --run-dir {folder}: ")
            assert "file is not a folder; move it away" in ran.last


def test_weights_that_give_nan_are_found_by_the_stage_that_runs_them(
    cli: Cli, weights: Path
) -> None:
    (file,) = (weights / "text_encoder").glob("*.safetensors")
    tensors = load_file(file)
    how = ("--prompt", "a", *SMALL, "--weights", weights, "--run-dir")
    for value, more in ((nan, ()), (3e38, ()), (3e38, ("--encode-on", "host"))):
        tensors["encoder.final_layer_norm.weight"][:] = value
        save_file(tensors, file, metadata={"format": "pt"})
        ran = cli("encode", *how, f"r{value}", *more)
        assert ran.code == 1
        if value is nan:  # found while the weights are read
            assert "encoder.final_layer_norm.weight holds NaN" in ran.last
            continue
        said = "error: encode: the prompt_embeds are not finite; check the weights of "
        assert ran.last == f"{said}text_encoder"
    assert not list(Path().glob("r*/embeddings.safetensors"))
    ran = cli("encode", *how, "r", "--dtype", "bfloat16")
    assert ran.last == f"{said}text_encoder, or try --dtype float32"


def test_an_unwritable_output_is_found_before_the_work(cli: Cli, run: Path) -> None:
    Path("file").touch()
    ran = cli("decode", "--run-dir", run, "--out", "file/v.mp4")
    assert ran.code == 2
    assert "started" not in ran.err
