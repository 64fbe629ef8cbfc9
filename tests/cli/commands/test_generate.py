"""``tpuport generate``: what it writes, says, reuses and refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.tools import SMALL, Cli, Made
from tests.core.files.videos import read_back
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.sealed_json import read_sidecar
from tpuport.core.run.session import Session
from tpuport.core.run.sidecar import latents_digest
from tpuport.errors import WriteError

PANDA = ("generate", "--prompt", "a panda", *SMALL)


# --- one run, looked at from all sides


def test_every_prompt_gives_a_video(made: Made) -> None:
    assert [path.name for path in made.videos] == ["video-000.mp4", "video-001.mp4"]
    for path in made.videos:
        assert read_back(path) == (9, 64, 96, 8.0)


def test_json_has_what_a_script_needs(made: Made) -> None:
    document = made.ran.json
    assert [v["prompt"] for v in document["videos"]] == ["a panda", "a fox"]
    assert [v["seed"] for v in document["videos"]] == [7, 7]
    assert document["settings"]["num_inference_steps"] == 2
    assert document["run_dir"] == str(made.run)
    assert document["variant"] == "demo"
    stages = {stage["stage"]: stage for stage in document["report"]["stages"]}
    assert list(stages) == ["encode", "denoise", "decode"]
    # Two videos, and each program was compiled once.
    assert [len(s["compiles"]) for s in stages.values()] == [1, 1, 1]


def test_plain_lines_say_what_happens(made: Made) -> None:
    lines = made.ran.err.splitlines()
    assert "\x1b" not in made.ran.err
    assert sum("its weights are random" in line for line in lines) == 1
    # So many a person reads, with the report and the second video.
    assert len(lines) <= 12 + 2, made.ran.err
    said = "making 2 videos from text: 96x64, 9 frames at 8 fps, 2 steps, guidance 6"
    assert f"{said}, seed 7, 7" in lines
    (told,) = [line for line in lines if line.startswith("denoise")]
    assert re.search(r" 4 steps in .* s, compiling .* s a step$", told)
    summary = [line.split()[0] for line in lines if line.startswith("  ")]
    assert summary == ["compiled", "cut", "a", "in"]
    # Where the videos are is last.
    assert lines[-2:] == [f"wrote {path}" for path in made.videos]


def test_the_sidecar_has_every_setting_and_a_summary(made: Made) -> None:
    path = Path(made.ran.json["videos"][1]["sidecar"])
    assert path.stat().st_size <= 6000
    sidecar = read_sidecar(path)
    assert (sidecar["model"], sidecar["variant"]) == ("cogvideox", "demo")
    assert sidecar["weights"]["source"] == "demo"
    assert all(sidecar["weights"]["fingerprints"].values())
    request = sidecar["request"]
    assert (request["prompts"], request["seeds"]) == (["a fox"], [[7]])
    assert request["negative_prompts"] == ["blurry"]
    sha256, size = hash_output(path.with_suffix(""))
    output = {"file": "video-001.mp4", "kind": "mp4", "sha256": sha256, "bytes": size}
    assert sidecar["output"] == output
    assert sidecar["initial_latents"] is None
    assert sidecar["platform"]["backend"] == "cpu"
    assert sidecar["summary"]["peak_host_bytes"] > 0
    assert list(sidecar["stages"]) == ["decode", "denoise", "encode"]
    for how in sidecar["stages"].values():
        assert (how["dtype"], how["mesh"]) == ("float32", "dp=1,sp=1,tp=1")
        assert (how["attention"], how["backend"]) == ("auto", "tpuport")
        assert {"python", "tpuport", "torch", "jax"} <= set(how["versions"])
        assert how["programs"] == {"loaded": 0, "cached": 0, "compiled": 1}
        assert how["total_seconds"] >= how["compile_seconds"] > 0
    assert sidecar["stages"]["denoise"]["seconds_per_call"] > 0


def test_the_report_is_the_whole_document(made: Made) -> None:
    file = made.folder / "new" / "report.json"
    document = json.loads(file.read_text())
    assert document == made.ran.json
    assert f"wrote {file}" in made.ran.err.splitlines()
    # What a sidecar leaves out.
    for stage in document["report"]["stages"]:
        for name in ("compiles", "sharding", "attention", "patches", "convolutions"):
            assert name in stage
    assert document["report"]["stages"][1]["attention"]


def test_a_report_that_cannot_be_written_is_refused_before_the_run(
    cli: Cli, made: Made
) -> None:
    Path("file").touch()
    sidecar = made.ran.json["videos"][0]["sidecar"]
    run = ("--run-dir", made.run)
    for command in (
        ("generate", "--prompt", "a"),
        ("encode", "--prompt", "a", "--run-dir", "run"),
        ("denoise", *run),
        ("decode", *run, "--out", "v.gif"),
        ("replay", sidecar),
        ("plan", "--topology", "v6e-8"),
        ("compile", "--out", "built"),
    ):
        ran = cli(*command, "--report", "file/report.json")
        assert ran.code == 2, command
        assert ran.last.startswith("error: --report file: file is not a folder; mo")
        assert "encode: " not in ran.err
    ran = cli("generate", "--prompt", "a", "--report", ".")
    assert ran.last == "error: --report .: is a folder; name a file"
    Path("file").write_text("mine")
    ran = cli("generate", "--prompt", "a", "--report", "file")
    assert (
        ran.last == "error: --report file: is there, and no report; name another file"
    )
    out = ("--out", "v.gif", "--report", "v.gif.json")
    for command in (("generate", "--prompt", "a"), ("replay", sidecar)):
        last = cli(*command, *out).last
        assert last == "error: --report v.gif.json: is a file of the video v.gif"


def test_the_digest_is_of_the_video_s_own_latents(made: Made) -> None:
    latents = load_file(made.run / "latents.safetensors")["latents"]
    for index, video in enumerate(made.ran.json["videos"]):
        assert video["latents_sha256"] == latents_digest(latents[index : index + 1])


def test_each_video_is_as_if_alone(cli: Cli, made: Made) -> None:
    """Also: the default name, and no run directory left behind."""
    args = ("--prompt", "a fox", "--negative-prompt", "blurry", "--seed", "7")
    ran = cli("generate", *args, *SMALL, "--json")
    assert ran.code == 0, ran.err
    (video,) = ran.json["videos"]
    assert video["path"] == "cogvideox-demo-seed7.mp4"
    assert Path(video["path"]).is_file()
    assert video["latents_sha256"] == made.ran.json["videos"][1]["latents_sha256"]
    assert list(Path(os.environ["TPUPORT_CACHE_DIR"], "runs").iterdir()) == []


def test_stderr_has_only_our_own_lines(cache: Path, tmp_path: Path) -> None:
    """In a process of its own, where the libraries are imported for the first time."""
    command = [sys.executable, "-m", "tpuport", *PANDA, "--out", "v.gif"]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [*command, "--cache-dir", str(cache), "--encode-on", "host"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    known = (
        "importing torch, jax and diffusers",
        "using",
        "making",
        "encode",
        "denoise",
        "decode",
        "  ",
    )
    known = (*known, "wrote v.gif")
    assert [x for x in done.stderr.splitlines() if x and not x.startswith(known)] == []
    assert read_back(tmp_path / "v.gif")[:3] == (9, 64, 96)


# --- run directories


def test_finished_stages_are_reused(cli: Cli, run: Path, made: Made) -> None:
    args = ("--prompt", "a panda", "--prompt", "a fox", "--seed", "7", *SMALL)
    args = (*args, "--negative-prompt", "blurry", "--run-dir", str(run))
    ran = cli("generate", *args, "--out", "frames/", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["reused"] == ["encode", "denoise"]
    assert f"denoise: finished in {run}, reused" in ran.err.splitlines()
    assert read_back("frames/001")[:3] == (9, 64, 96)
    sidecars = [video["sidecar"] for video in ran.json["videos"]]
    assert sidecars == ["frames/000.png.json", "frames/001.png.json"]
    then, now = made.ran.json["videos"], ran.json["videos"]
    key = "latents_sha256"
    assert [v[key] for v in now] == [v[key] for v in then]

    # Asked for in another way, they are not.
    ran = cli("generate", *args, "--out", "v.gif", "--backend", "diffusers", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["reused"] == []
    assert "encode: was finished with backend tpuport, now diffusers" in ran.err


def test_a_run_directory_of_other_settings_is_refused(cli: Cli, run: Path) -> None:
    before = (run / "run.json").read_bytes()
    ran = cli(*PANDA, "--run-dir", run)
    assert ran.code == 1
    assert "settings.seeds" in ran.last
    assert (run / "run.json").read_bytes() == before
    assert "Go on with" not in ran.err


def test_a_run_directory_of_another_schema_is_refused(cli: Cli, run: Path) -> None:
    document = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**document, "schema_version": 0}))
    for command in (PANDA, ("denoise",), ("decode",)):
        ran = cli(*command, "--run-dir", run)
        assert ran.code == 1
        assert "schema_version 0" in ran.last


def test_initial_latents_come_from_a_file(cli: Cli, tmp_path: Path) -> None:
    noise = torch.randn(1, 4, 16, 8, 12, generator=torch.Generator().manual_seed(1))
    save_file({"noise": noise}, "noise.safetensors")
    args = (*PANDA, "--latents", "noise.safetensors", "--run-dir", "r")
    ran = cli(*args, "--out", "v.gif", "--json")
    assert ran.code == 0, ran.err
    sidecar = read_sidecar(Path("v.gif.json"))
    assert sidecar["initial_latents"]["file"] == str(tmp_path / "noise.safetensors")
    assert torch.equal(load_file("r/embeddings.safetensors")["initial_latents"], noise)
    # It is part of what the run directory is of.
    again = cli(*args, "--out", "v.gif", "--json")
    assert again.json["reused"] == ["encode", "denoise"]
    other = cli(*PANDA, "--run-dir", "r", "--out", "v.gif")
    assert other.code == 1
    assert "initial latents" in other.last
    # And a replay reads the same file, and no other.
    assert cli("replay", "v.gif.json").code == 0
    save_file({"noise": noise + 1}, "noise.safetensors")
    changed = cli("replay", "v.gif.json")
    assert changed.code == 1
    assert "noise.safetensors" in changed.last


# --- what is there already


def test_no_output_replaces_an_input(cli: Cli, made: Made) -> None:
    """Refused before the work; an earlier video is kept, and that is said."""
    shutil.copy(made.videos[0], "in.mp4")
    before = Path("in.mp4").read_bytes()
    run = (*PANDA, "--video", "in.mp4", "--overwrite")
    for flags in (("--out", "in.mp4"), ("--out", "in"), ("--report", "in.mp4")):
        ran = cli(*run, *flags)
        assert ran.code == 2
        assert "in.mp4, which the run reads" in ran.last
        assert "started" not in ran.err
    assert Path("in.mp4").read_bytes() == before


def test_a_video_that_is_there_is_kept_unless_told_otherwise(
    cli: Cli, run: Path
) -> None:
    decode = ("decode", "--run-dir", run, "--out", "fox.gif", "--json")
    Path("fox-001.gif").write_text("mine")
    ran = cli(*decode)
    assert [v["path"] for v in ran.json["videos"]] == ["fox-000.gif", "fox-001-2.gif"]
    said = "fox-001.gif is there (--overwrite replaces it): the video goes to"
    assert f"{said} fox-001-2.gif" in ran.err.splitlines()
    assert Path("fox-001.gif").read_text() == "mine"
    ran = cli(*decode, "--overwrite")
    assert [v["path"] for v in ran.json["videos"]] == ["fox-000.gif", "fox-001.gif"]
    assert hash_output(Path("fox-001.gif")) == hash_output(Path("fox-001-2.gif"))


def test_a_gif_that_lasts_too_long_is_refused_before_the_work(cli: Cli) -> None:
    ran = cli(*PANDA, "--fps", "0.001", "--out", "fox.gif")
    assert ran.code == 2
    assert "and .gif holds 655 s; ask for --fps 0.015 or more" in ran.last
    assert "started" not in ran.err


# --- when it ends early


def interrupted(monkeypatch: pytest.MonkeyPatch, stage: str, error: Any) -> None:
    """Let a stage of every session end in an error."""
    whole = Session.run_stage

    def run_stage(self: Session, name: str, *args: Any, **options: Any) -> Any:
        if name == stage:
            raise error
        return whole(self, name, *args, **options)

    monkeypatch.setattr(Session, "run_stage", run_stage)


def test_ctrl_c_keeps_what_is_finished(
    cli: Cli, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupted(patch, "denoise", KeyboardInterrupt())
        ran = cli(*PANDA, "--out", "v.gif", "--cache-dir", cache)
    assert ran.code == 130
    *_, first, second = ran.err.splitlines()
    assert first == "interrupted"
    assert second.startswith("finished: encode; kept in ")
    _, _, command = second.partition("Go on with: ")
    (kept,) = (cache / "runs").iterdir()
    assert f"kept in {kept}." in second
    assert not Path("v.gif").exists()
    program, *args = command.split()
    assert program == "tpuport"
    assert cli(*args).code == 0
    assert read_back("v.gif")[:3] == (9, 64, 96)
    assert not kept.exists()


def test_ctrl_c_before_anything_is_finished_leaves_nothing(
    cli: Cli, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, "encode", KeyboardInterrupt())
    ran = cli(*PANDA)
    assert ran.code == 130
    assert "run the same command again" in ran.last
    assert list((cache / "runs").iterdir()) == []


def test_a_video_that_cannot_be_written_loses_nothing(
    cli: Cli, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(*args: Any, **options: Any) -> None:
        raise WriteError("v.mp4: cannot be written: No space left on device")

    monkeypatch.setattr("tpuport.core.files.outputs.VideoWriter.append", append)
    ran = cli(*PANDA, "--out", "v.mp4")
    assert ran.code == 1
    assert "error: v.mp4: cannot be written: No space left" in ran.err
    (kept,) = (cache / "runs").iterdir()
    assert f"Go on with: tpuport resume {kept.name}" in ran.last
    assert (kept / "latents.safetensors").is_file()
    shutil.rmtree(kept)


def test_an_unexpected_error_is_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, "encode", RuntimeError("two\nlines"))
    ran = cli(*PANDA)
    assert ran.code == 1
    said = "error: unexpected RuntimeError: two lines; run again with --debug"
    assert ran.last == said
    ran = cli(*PANDA, "--debug")
    assert ran.code == 1
    assert "Traceback" in ran.err
    assert ran.last == "error: unexpected RuntimeError: two lines"


# --- bad input


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--model", "cogvideo"), "installed: cogvideox"),
        (("--variant", "7b"), "demo, demo-i2v, 2b, 5b, 5b-i2v, 1.5-5b, 1.5-5b-i2v"),
        (("--frames", "10"), "nearest valid: 9 or 17"),
        (("--size", "100x64"), "nearest valid: 96 or 112"),
        (
            ("--size", "97x65"),
            "height 65 and width 97 asked for; demo needs a multiple of 16; nearest "
            "valid: 64 or 80 and 96 or 112",
        ),
        (("--prompt", "a\udcffb"), "character 2 is half of a surrogate"),
        (("--steps", "0"), "--steps: 0"),
        (("--seed", "-1"), "seed -1"),
        (("--fps", "0"), "fps 0"),
        (("--mesh", "pp=2"), "'pp'"),
        (("--mesh", "dp=3,tp=3"), "there are 8"),
        (("--mesh", "tp=3"), "legal tp values: 1, 2, 4, 8"),
        (("--mesh", "dp=4"), "legal dp values: 1, 2"),
        (("--dtype", "float16"), "float32, bfloat16"),
        (("--attention", "flash"), "auto, splash"),
        (("--backend", "cuda"), "tpuport, diffusers"),
        (("-o", "sampler=x"), "did you mean scheduler?"),
        (("-o", "xyz=x"), "scheduler, dynamic_cfg"),
        (("-o", "scheduler=x"), "checkpoint, ddim, dpm"),
        (("--latents", "none.safetensors"), "none.safetensors cannot be read"),
        (("--out", "video.avi"), ".mp4, .gif, .webm"),
        (("--out", ""), "give a file such as fox.mp4, or a folder"),
        (("--out", "-"), "give a file such as fox.mp4, or a folder"),
        (("--out", "file/video.mp4"), "file"),
        (("--cache-dir", "file/cache"), "--cache-dir"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    cli: Cli, made: Made, args: tuple[str, str], said: str
) -> None:
    Path("file").touch()
    flags = {a for a in args if a.startswith("--")}
    small = [v for i in (0, 2, 4) if SMALL[i] not in flags for v in SMALL[i : i + 2]]
    ran = cli("generate", "--prompt", "a", *small, *args)
    assert ran.code == 2
    assert said in ran.last
    assert ran.last.startswith("error: ")
    assert "encode: " not in ran.err
    assert os.listdir() == ["file"]


def test_a_kernel_for_tpus_is_refused_before_anything_is_opened(cli: Cli) -> None:
    ran = cli(*PANDA, "--attention", "splash:block_q=128")
    assert ran.code == 2
    assert ran.last.startswith("error: --attention splash is for TPU only")
    assert "demo checkpoint" not in ran.err


def test_a_mesh_too_large_for_these_cpus_is_told_where_it_would_do(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Said before torch and diffusers are imported.
    monkeypatch.setattr("tpuport.api.import_libraries", None)
    ran = cli(*PANDA, "--mesh", "dp=2,tp=8")
    assert ran.code == 2
    assert "needs 16 devices, there are 8" in ran.last
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=16 tries it" in ran.last
    assert ran.last.endswith("tpuport plan --topology v6e-16 plans it")


def test_no_prompt_is_refused(cli: Cli) -> None:
    ran = cli("generate", *SMALL)
    assert ran.code == 2
    assert "--prompt" in ran.last


def test_a_prompt_over_the_limit_is_warned_of(cli: Cli) -> None:
    ran = cli("encode", "--prompt", "panda fox " * 200, *SMALL, "--run-dir", "r")
    assert ran.code == 0
    assert any(
        line.startswith("warning: a prompt is ") for line in ran.err.splitlines()
    )


def test_weights_that_are_not_there_are_refused(cli: Cli) -> None:
    ran = cli(*PANDA, "--weights", "./none")
    assert ran.code == 2
    assert "does not exist" in ran.last
    ran = cli(*PANDA, "--executables", "none")
    assert ran.code == 2
    assert "the folder of executables none does not exist" in ran.last
    ran = cli(*PANDA, "--weights", "nobody/nothing")
    assert ran.code == 1
    assert "hub id 'nobody/nothing' is not in the cache" in ran.last


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("no component", "text_encoder/"),
        ("truncated", "truncated"),
        ("missing", "missing tensor"),
        ("extra", "extra tensor"),
        ("pickle", "pickle"),
        ("no index", "model_index.json"),
    ],
)
def test_damaged_weights_are_refused(
    cli: Cli, weights: Path, damage: str, said: str
) -> None:
    folder = weights / "text_encoder"
    (file,) = folder.glob("*.safetensors")
    if damage == "no component":
        shutil.rmtree(folder)
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "pickle":
        file.rename(folder / "pytorch_model.bin")
    elif damage == "no index":
        (weights / "model_index.json").unlink()
    else:
        tensors = load_file(file)
        if damage == "missing":
            tensors.pop("encoder.final_layer_norm.weight")
        else:
            tensors["encoder.stray.weight"] = torch.zeros(1)
        save_file(tensors, file)
    ran = cli(*PANDA, "--weights", weights)
    assert ran.code == 1
    assert said in ran.last
    assert str(weights) in ran.last
