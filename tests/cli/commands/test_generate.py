"""``tpuport generate``: what it writes, says and refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.cli.tools import ASKED, UPSTREAM, Cli, Made
from tests.core.files.videos import read_back
from tpuport.cli.runs.video_run import VideoRun
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.sealed_json import read_sidecar
from tpuport.errors import WriteError

# --- one run, looked at from all sides


def test_every_prompt_gives_a_video(made: Made) -> None:
    assert [path.name for path in made.videos] == ["fox-000.gif", "fox-001.gif"]
    for path in made.videos:
        assert read_back(path) == (5, 16, 32, 10.0)


def test_json_has_what_a_script_needs(made: Made) -> None:
    document = made.ran.json
    assert document["command"] == "generate"
    assert document["pipeline"] == "WanPipeline"
    assert [v["prompt"] for v in document["videos"]] == ["a fox runs", "a cat"]
    assert [v["seed"] for v in document["videos"]] == [7, 7]
    assert document["run_dir"] == str(made.folder / "run")
    assert (document["dtype"], document["mesh"]) == ("float32", "dp=1,sp=1,tp=1")
    stages = [stage["stage"] for stage in document["report"]["stages"]]
    assert stages == ["encode", "denoise", "decode"]


def test_plain_lines_say_what_happens(made: Made) -> None:
    lines = made.ran.err.splitlines()
    assert "\x1b" not in made.ran.err
    # So many a person reads, with the report and the second video.
    assert len(lines) <= 12 + 2, made.ran.err
    said = "making 2 videos by WanPipeline: 32x16, 5 frames at 10 fps, 2 steps, seed 7"
    assert said in lines
    (told,) = [line for line in lines if line.startswith("denoise")]
    assert re.search(r"^denoise: 2 steps in .* s by diffusers, .* s a step$", told)
    summary = [line.split()[0] for line in lines if line.startswith("  ")]
    assert summary == ["compiled", "a", "in"]
    # Where the videos are is last.
    assert lines[-2:] == [f"wrote {path}" for path in made.videos]


def test_the_sidecar_has_every_setting_and_a_summary(made: Made) -> None:
    path = Path(made.ran.json["videos"][1]["sidecar"])
    assert path.stat().st_size <= 6000
    sidecar = read_sidecar(path)
    assert sidecar["pipeline"] == "WanPipeline"
    assert all(sidecar["weights"]["fingerprints"].values())
    request = sidecar["request"]
    assert (request["prompts"], request["seeds"]) == (["a cat"], [[7]])
    assert request["negative_prompts"] == ["blurry"]
    assert request["flags"]["num_inference_steps"] == 2
    sha256, size = hash_output(path.with_suffix(""))
    output = {"file": "fox-001.gif", "kind": "gif", "sha256": sha256, "bytes": size}
    assert sidecar["output"] == output
    assert {"python", "tpuport", "torch", "jax"} <= set(sidecar["versions"])
    assert sidecar["how"]["backend"] == "diffusers"
    assert sidecar["how"]["weights_on"] == "chip"
    assert sidecar["summary"]["peak_host_bytes"] > 0


def test_the_report_is_the_whole_document(made: Made) -> None:
    file = made.folder / "new/report.json"
    assert json.loads(file.read_text()) == made.ran.json
    assert f"wrote {file}" in made.ran.err.splitlines()


def test_stderr_has_only_our_own_lines(
    cache: Path, folder: Path, tmp_path: Path
) -> None:
    """In a process of its own, where the libraries are imported for the first time.

    Also: the default name, and no run left behind.
    """
    command = [sys.executable, "-m", "tpuport", "generate", "--weights", str(folder)]
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [*command, *UPSTREAM, "--seed", "7", "--cache-dir", str(cache)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    known = (
        "importing torch, jax and diffusers",
        *("making", "encode", "denoise", "decode", "  ", "wrote wan-seed7.mp4"),
    )
    slow = re.compile(r"[a-z ]+ \.\.\. .*\d s$")  # a work of more than five seconds
    lines = [x for x in done.stderr.splitlines() if x and not slow.match(x)]
    assert [x for x in lines if not x.startswith(known)] == []
    assert read_back(tmp_path / "wan-seed7.mp4")[:3] == (5, 16, 32)
    assert list((cache / "runs").glob("*")) == []


# --- the default model


def test_without_a_model_the_demo_is_made(cli: Cli) -> None:
    """Its folder is made once, and its variant gives defaults that flags replace."""
    asked = ("generate", "--prompt", "a fox", "--size", "96x64", "--frames", "9")
    asked = (*asked, "--steps", "2", "--backend", "diffusers", "--json")
    ran = cli.good(*asked)
    assert re.search("^cogvideox demo: ", ran.err, re.MULTILINE)
    assert ran.json["pipeline"] == "CogVideoXPipeline"
    sidecar = read_sidecar(Path(ran.json["videos"][0]["sidecar"]))
    assert sidecar["request"]["flags"]["fps"] == 8
    assert sidecar["request"]["flags"]["num_inference_steps"] == 2
    assert read_back(ran.json["videos"][0]["path"]) == (9, 64, 96, 8.0)


# --- files


def test_a_run_of_a_clip(cli: Cli) -> None:
    """No output replaces an input, and a replay wants the same file."""
    frames = np.random.default_rng(0).integers(0, 255, (9, 64, 96, 3), np.uint8)
    pictures = [Image.fromarray(frame) for frame in frames]
    pictures[0].save("in.gif", save_all=True, append_images=pictures[1:], loop=0)
    before = Path("in.gif").read_bytes()
    asked = ("generate", "--prompt", "a fox", "--video", "in.gif", "--strength", "0.5")
    asked = (*asked, "--size", "96x64", "--steps", "2", "--backend", "diffusers")
    for flags in (("--out", "in.gif"), ("--report", "in.gif")):
        ran = cli.refused("in.gif, which the run reads", *asked, *flags, "--overwrite")
        assert "loading" not in ran.err
    assert Path("in.gif").read_bytes() == before
    ran = cli.good(*asked, "--out", "v.gif")
    assert "making 1 video by CogVideoXVideoToVideoPipeline" in ran.err
    assert read_back("v.gif")[:3] == (9, 64, 96)
    cli.good("replay", "v.gif")
    pictures[1].save("in.gif", save_all=True, append_images=pictures[2:], loop=0)
    changed = cli("replay", "v.gif")
    assert (changed.code, "in.gif: has sha256 " in changed.last) == (1, True)


def test_a_prompt_over_the_limit_is_warned_of(cli: Cli, folder: Path) -> None:
    asked = ("generate", "--weights", folder, *UPSTREAM[2:], "--out", "v.gif")
    said = "warning: a prompt has at least "
    assert said not in cli.good(*asked, "--prompt", "panda fox").err
    ran = cli.good(*asked, "--prompt", "panda fox " * 200)
    (line,) = (x for x in ran.err.splitlines() if x.startswith(said))
    assert line.endswith(" tokens, and WanPipeline reads the first 16")


def test_a_video_that_is_there_is_kept_unless_told_otherwise(
    cli: Cli, run: Path, folder: Path
) -> None:
    decode = ("decode", "--run-dir", run, "--out", "fox.gif", "--json")
    decode = (*decode, "--backend", "diffusers", "--weights", folder)
    Path("fox-001.gif").write_text("mine")
    ran = cli.good(*decode)
    assert [v["path"] for v in ran.json["videos"]] == ["fox-000.gif", "fox-001-2.gif"]
    said = "fox-001.gif is there (--overwrite replaces it): the video goes to"
    assert f"{said} fox-001-2.gif" in ran.err.splitlines()
    assert Path("fox-001.gif").read_text() == "mine"
    ran = cli.good(*decode, "--overwrite")
    assert [v["path"] for v in ran.json["videos"]] == ["fox-000.gif", "fox-001.gif"]
    assert hash_output(Path("fox-001.gif")) == hash_output(Path("fox-001-2.gif"))


def test_a_report_that_cannot_be_written_is_refused_before_the_run(
    cli: Cli, folder: Path, run: Path, sidecar: Path
) -> None:
    Path("file").touch()
    weights = ("--weights", folder)
    for command in (
        ("generate", *weights, *ASKED),
        ("encode", *weights, *ASKED, "--run-dir", "run"),
        ("decode", "--run-dir", run, "--out", "v.gif"),
        ("replay", sidecar),
    ):
        ran = cli(*command, "--report", "file/report.json")
        assert ran.code == 2, command
        assert ran.last.startswith("error: --report file: file is not a folder; mo")
        assert "loading" not in ran.err
    ran = cli("generate", *weights, *ASKED, "--report", ".")
    assert ran.last == "error: --report .: is a folder; name a file"
    Path("file").write_text("mine")
    ran = cli("generate", *weights, *ASKED, "--report", "file")
    assert (
        ran.last == "error: --report file: is there, and no report; name another file"
    )
    out = ("--out", "v.gif", "--report", "v.gif.json")
    for command in (("generate", *weights, *ASKED), ("replay", sidecar)):
        last = cli(*command, *out).last
        assert last == "error: --report v.gif.json: is a file of the video v.gif"


# --- when it ends early


def interrupted(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let every run end in an error after its last step."""
    whole = VideoRun.called

    def called(self: VideoRun, *args: Any) -> Any:
        whole(self, *args)
        raise error

    monkeypatch.setattr(VideoRun, "called", called)


EVERY = (*UPSTREAM, "--checkpoint-every", "1")


def test_ctrl_c_keeps_what_is_finished(
    cli: Cli, cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupted(patch, KeyboardInterrupt())
        asked = ("generate", "--weights", folder, *EVERY, "--out", "v.gif")
        ran = cli(*asked, "--cache-dir", cache)
    assert ran.code == 130
    *_, first, second = ran.err.splitlines()
    assert first == "interrupted"
    assert second.startswith("finished: step 2; kept in ")
    _, _, command = second.partition("Go on with: ")
    (kept,) = (cache / "runs").iterdir()
    assert f"kept in {kept}." in second
    assert not Path("v.gif").exists()
    program, *args = command.split()
    assert program == "tpuport"
    cli.good(*args)
    assert read_back("v.gif")[:3] == (5, 16, 32)
    assert not kept.exists()


def test_ctrl_c_before_anything_is_kept_leaves_nothing(
    cli: Cli, cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def called(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(VideoRun, "called", called)
    ran = cli("generate", "--weights", folder, *EVERY)
    assert ran.code == 130
    assert "run the same command again" in ran.last
    assert list((cache / "runs").glob("*")) == []


def test_a_video_that_cannot_be_written_loses_nothing(
    cli: Cli, cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*args: Any, **options: Any) -> None:
        raise WriteError("v.mp4: cannot be written: No space left on device")

    monkeypatch.setattr("tpuport.core.files.outputs.VideoWriter.write", write)
    ran = cli("generate", "--weights", folder, *EVERY, "--out", "v.mp4")
    assert ran.code == 1
    assert "error: v.mp4: cannot be written: No space left" in ran.err
    (kept,) = (cache / "runs").iterdir()
    assert f"Go on with: tpuport resume {kept.name}" in ran.last
    shutil.rmtree(kept)


def test_an_unexpected_error_is_one_line(
    cli: Cli, cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, RuntimeError("two\nlines"))
    asked = ("generate", "--weights", folder, *UPSTREAM, "--run-dir", "run")
    ran = cli(*asked)
    assert ran.code == 1
    said = "error: unexpected RuntimeError: two lines; run again with --debug"
    assert said in ran.err.splitlines()
    ran = cli(*asked, "--debug")
    assert ran.code == 1
    assert "Traceback" in ran.err
    assert "error: unexpected RuntimeError: two lines" in ran.err.splitlines()


# --- what is wrong with a video


@pytest.mark.parametrize(
    ("value", "said", "out"),
    [(float("nan"), "NaN", "v.gif"), (0.0, "all 5 frames are black", "frames/")],
)
def test_a_video_that_is_refused_gets_no_name(
    cli: Cli,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
    said: str,
    out: str,
) -> None:
    from tpuport.cli.runs import video_run

    whole: Callable[..., Any] = video_run.made_of

    def spoilt(output: Any, pipeline: Any) -> Any:
        found = whole(output, pipeline)
        found.frames[:] = value
        return found

    monkeypatch.setattr(video_run, "made_of", spoilt)
    ran = cli("generate", "--weights", folder, *UPSTREAM, "--out", out)
    assert ran.code == 1
    assert said in ran.err
    assert not [path for path in Path().rglob("*") if path.suffix in (".gif", ".png")]


# --- bad input


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--dtype", "float16"), "float32, bfloat16"),
        (("--attention", "flash"), "auto, splash"),
        (("--attention", "splash:block_q=128"), "--attention splash is for TPU only"),
        (("--vae-tiling", "auto"), "auto' is gone: give on or off"),
        (("--no-jit-stage", "decod"), "--no-jit-stage: 'decod' is none of encode, "),
        (("--cache", "deepcache:order=2"), "is not a setting of"),
        (("--sharding", "all"), "sharding 'all': wan has default"),
        (("--frames", "10000000"), "of memory; about "),
        (("--out", "fox.gif", "--fps", "0.001"), "and .gif holds 655 s; ask for --fps"),
        (
            ("--steps", "1001", "--option", "scheduler=DDIMScheduler"),
            "--steps 1001: DDIMScheduler refuses this: `num_inference_steps`: 1001 can",
        ),
        (
            ("--mesh", "dp=2,tp=8"),
            "device_count=16 tries it on this machine; tpuport plan --topology v6e-16",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(
    cli: Cli, folder: Path, args: tuple[str, ...], said: str
) -> None:
    Path("file").touch()
    ran = cli("generate", "--weights", folder, *ASKED, *args)
    assert ran.code == 2, ran.err
    assert said in ran.last
    assert ran.last.startswith("error: ")
    assert "loading" not in ran.err
    assert os.listdir() == ["file"]


def test_no_prompt_and_weights_that_are_not_there_are_refused(
    cli: Cli, folder: Path
) -> None:
    cli.refused("--prompt", "generate", "--weights", folder, *ASKED[2:])
    unknown = ("generate", *ASKED, "--weights", "nobody/nothing")
    cli.refused("hub id 'nobody/nothing' is not in the cache", *unknown, code=1)


def test_damaged_weights_are_refused(cli: Cli, copied: Path) -> None:
    (file,) = (copied / "text_encoder").glob("*.safetensors")
    tensors = load_file(file)
    tensors["encoder.final_layer_norm.weight"] *= float("nan")
    save_file(tensors, file, {"format": "pt"})
    asked = ("generate", "--weights", copied, *UPSTREAM)
    ran = cli.refused("holds NaN or infinite values", *asked, code=1)
    assert str(copied) in ran.last
