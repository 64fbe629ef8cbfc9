"""Mistakes that need no library are told before one is imported, by their flag."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from tests.cli.tools import Cli
from tpuport.cli.asked import environment
from tpuport.cli.runs import variants

PROMPT = ("--prompt", "a fox")
BY_UPSTREAM = ("--backend", "diffusers")


@pytest.fixture(autouse=True)
def _no_imports(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some files, and libraries that cannot be imported."""
    monkeypatch.setattr(environment, "import_libraries", None)
    monkeypatch.setattr(variants, "import_libraries", None)
    Path("file").write_text("no picture, no video, no tensors")
    Path("folder").mkdir()
    Path("none.mp4").write_text("no video")
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save("image.png")
    Image.fromarray(np.zeros((8, 32, 3), np.uint8)).save("flat.png")
    save_file({"noise": np.zeros((3, 4), np.float32)}, "plane.safetensors")
    save_file({"noise": np.zeros((1, 1, 1, 1, 1), np.int32)}, "whole.safetensors")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), '--prompt is missing; say what to show, such as --prompt "a red fox'),
        (("--variant", "5b"), "--prompt is missing"),
        (("--weights", "THUDM/CogVideoX-5b"), "--prompt is missing"),
        (("--prompt", ""), "--prompt: '' is empty; say what to show, such as"),
        (("--prompt", " "), "--prompt: ' ' is empty"),
        (
            (*PROMPT, "--model", "cogvideo"),
            "--model: no model is called 'cogvideo'; in",
        ),
        ((*PROMPT, "--variant", "x"), "--variant: model 'cogvideox' has no variant x"),
        ((*PROMPT, "--vae", "x"), "--vae x: cogvideox has torchax, "),
        ((*PROMPT, "--sharding", "x"), "--sharding 'x': cogvideox has default, "),
        ((*PROMPT, "--weights", ""), "--weights: '' is empty; give a folder or a"),
        ((*PROMPT, "--weights", "./no"), "--weights: weights folder './no' does not"),
        ((*PROMPT, "--weights", "file"), "--weights: weights 'file' is a file; a"),
        (
            (*PROMPT, "--weights", "folder"),
            "model_index.json is missing; the folder is",
        ),
        (
            (*PROMPT, "--image", "no.png"),
            "--image no.png does not exist; check the name",
        ),
        ((*PROMPT, "--image", "folder"), "--image folder is a folder; name a PNG or"),
        ((*PROMPT, "--image", "file"), "--image file cannot be read: cannot identify"),
        ((*PROMPT, "--image", "flat.png"), "--image flat.png is 32x8; each side needs"),
        (
            (*PROMPT, "--video", "no.mp4"),
            "--video no.mp4 does not exist; check the name",
        ),
        ((*PROMPT, "--video", "folder"), "--video folder holds no frame; give an mp4"),
        ((*PROMPT, "--video", "none.mp4"), "--video none.mp4 cannot be read: "),
        ((*PROMPT, "--image", "a", "--video", "b"), "--image and --video exclude each"),
        ((*PROMPT, *BY_UPSTREAM, "--vae", "flax"), "--vae: is not for --backend di"),
        ((*PROMPT, *BY_UPSTREAM, "--on-host", "vae"), "--on-host: is not for --back"),
        ((*PROMPT, *BY_UPSTREAM, "--executables", "b"), "--executables: is not for "),
        (
            (*PROMPT, "--strength", "0.5"),
            "--strength 0.5: is for a video to start from",
        ),
        ((*PROMPT, "--latents", "no"), "--latents no cannot be read: No such file"),
        ((*PROMPT, "--latents", "folder"), "--latents folder cannot be read: Is a dir"),
        ((*PROMPT, "--latents", "file"), "--latents file is not a safetensors file"),
        ((*PROMPT, "--latents", "plane.safetensors"), "holds F32 of shape [3, 4]; flo"),
        ((*PROMPT, "--latents", "whole.safetensors"), "holds I32 of shape [1, 1, 1, 1"),
        ((*PROMPT, "--lora", "no.safetensors"), "--lora: LoRA no.safetensors does not"),
        ((*PROMPT, "--lora", "folder"), "--lora: LoRA folder: holds no safetensors f"),
        (
            (*PROMPT, "--executables", "no"),
            "--executables: the folder of executables n",
        ),
        ((*PROMPT, "--executables", "folder"), "manifest.json: is missing"),
        (
            (*PROMPT, "--out", "video.avi"),
            "--out: video.avi: no video can be written as",
        ),
        ((*PROMPT, "--out", ""), "give a file such as fox.mp4, or a folder"),
        (
            (*PROMPT, "--out", "file/video.mp4"),
            "--out: file/video.mp4: cannot be writt",
        ),
        (
            (*PROMPT, "--image", "image.png", "--out", "image.png/"),
            "is a file, and PNG",
        ),
        ((*PROMPT, "--report", "folder"), "--report folder: is a folder; name a file"),
        ((*PROMPT, "--run-dir", "file"), "--run-dir file: file is not a folder"),
        ((*PROMPT, "--profile-calls", "2"), "--profile-calls goes with --profile only"),
        ((*PROMPT, "--profile", "file/deep"), "--profile file/deep: "),
        (
            (*PROMPT, "--profile", "."),
            "--profile .: holds file, which is no profile of",
        ),
    ],
)
def test_a_run_is_refused_by_its_flag(
    cli: Cli, args: tuple[str, ...], said: str
) -> None:
    before = sorted(os.listdir())
    ran = cli("generate", *args)
    assert said in ran.err
    assert ran.code in (1, 2)  # 1 for files that are damaged
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("encode", "--run-dir", "run"), "--prompt is missing"),
        (("encode",), "--run-dir is missing; name a folder, such as --run-dir fox"),
        (("decode", "--run-dir", "run", "--out", "a.avi"), "--out: a.avi: no video"),
        (("denoise", "--run-dir", "run", "--profile-calls", "2"), "--profile-calls go"),
        (("resume", "folder"), "folder: holds no run"),
        (("bench", "--image", "file"), "--image file cannot be read"),
        (("bench", "--model", "x"), "--model: no model is called 'x'"),
        (
            ("check", "cogvideo"),
            "'cogvideo' is no plugin, no folder and no hub id; did",
        ),
        (("check", "folder"), "folder has neither model_index.json, as a pipeline has"),
        (("check", "wan", "--topology", "v6"), "--topology: unknown TPU topology 'v6'"),
        (("new-model", "x"), "--class is missing; name a pipeline of diffusers, such"),
        (
            ("new-model", "x", "--class", "WanPipeline", "--weights", "folder"),
            "model_index.json is missing",
        ),
    ],
)
def test_other_commands_are_refused_too(
    cli: Cli, args: tuple[str, ...], said: str
) -> None:
    ran = cli(*args)
    assert said in ran.err
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1


def test_what_is_right_is_not_refused_before_the_libraries(cli: Cli) -> None:
    """The libraries are what cannot be called here."""
    for args in ((*PROMPT, "--out", "fox.gif"), (*PROMPT, "--weights", "some/hub-id")):
        assert "'NoneType' object is not callable" in cli("generate", *args).err
