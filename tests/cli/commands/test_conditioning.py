"""Images, videos, size classes and step caches on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.tools import SMALL, Cli
from tests.core.files.videos import read_back, write_video
from tpuport.cli.commands import bench
from tpuport.core.files.sealed_json import read_sidecar

HUNYUAN = ("--model", "hunyuanvideo", "--frames", "5", "--steps", "2")
COG = ("--model", "cogvideox", *SMALL)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A picture of 90 x 64 pixels."""
    rows = np.linspace(0, 255, 64)[:, None, None] * np.ones((1, 90, 3))
    path = tmp_path / "picture.png"
    Image.fromarray(rows.astype(np.uint8)).save(path)
    return path


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """A video of 12 frames of 64 x 96."""
    rng = np.random.default_rng(0)
    frames = np.linspace(0, 1, 12)[:, None, None, None] * np.ones((1, 64, 96, 3))
    path = tmp_path / "clip.mp4"
    write_video(path, np.clip(frames + 0.1 * rng.random(frames.shape), 0, 1), 8)
    return path


def test_image_to_video_from_the_command_to_its_replay(
    cli: Cli, image: Path, tmp_path: Path
) -> None:
    command = ("generate", *HUNYUAN, "--prompt", 'a fox says "hi"', "--image", image)
    ran = cli(*command, "--run-dir", "run", "--out", "v.mp4", "--json")
    assert ran.code == 0, ran.err
    # A size class of 128 x 128 pixels in about the shape of the picture.
    assert read_back("v.mp4") == (5, 112, 144, 24.0)
    settings = ran.json["settings"]
    assert settings["task"] == "i2v"
    assert len(settings["sources"]) == 1
    sidecar = read_sidecar(Path(ran.json["videos"][0]["sidecar"]))
    assert sidecar["source"] == {"kind": "image", "files": [str(image)]}
    # The same command goes on from the finished stages.
    again = cli(*command, "--run-dir", "run", "--out", "v.mp4", "--json")
    assert again.json["reused"] == ["encode", "denoise"]
    replayed = cli("replay", "v.mp4.json", "--json")
    assert replayed.code == 0, replayed.err
    assert replayed.json["same"]
    # Another picture is another request, and no replay of the first.
    Image.open(image).rotate(180).save(image)
    other = cli(*command, "--run-dir", "run")
    assert other.code != 0
    assert "settings.sources" in other.last
    replayed = cli("replay", "v.mp4.json")
    assert "is not the image that" in replayed.last


def test_the_stages_by_themselves(cli: Cli, image: Path) -> None:
    encoded = cli(
        "encode", *HUNYUAN, "--prompt", "rain", "--image", image, "--run-dir", "run"
    )
    assert encoded.code == 0, encoded.err
    # A picture is never replaced by what was made from it.
    moving = image.rename("picture.gif")
    image.symlink_to(moving)
    ran = cli("decode", "--run-dir", "run", "--out", moving, "--overwrite")
    assert (ran.code, "which the run reads" in ran.last) == (2, True)
    # What comes after the encoders needs no picture any more.
    image.unlink()
    for stage in ("denoise", "decode"):
        ran = cli(
            stage, "--run-dir", "run", *(["--out", "v.gif"] * (stage[:3] == "dec"))
        )
        assert ran.code == 0, ran.err
    assert read_back("v.gif")[:3] == (5, 112, 144)


def test_video_to_video(cli: Cli, clip: Path) -> None:
    command = ("generate", *COG, "--prompt", "a panda", "--video", clip)
    ran = cli(*command, "--steps", "4", "--strength", "0.5", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["settings"]["task"] == "v2v"
    assert ran.json["settings"]["strength"] == 0.5
    # The texts of a batch are a call, and so is every chunk of the video.
    assert re.search(r"^encode.* [0-9]+ calls in ", ran.err, re.MULTILINE)
    encode = ran.json["report"]["stages"][0]
    assert encode["unit"] == "call"
    assert encode["steady_calls"] + len(encode["compiles"]) > 1
    denoise = ran.json["report"]["stages"][1]
    # Half of the four steps.
    assert denoise["steady_calls"] + 1 == 2
    assert cli("replay", ran.json["videos"][0]["sidecar"]).code == 0


def test_a_size_class_and_an_aspect_ratio(cli: Cli) -> None:
    ran = cli(
        *("encode", *HUNYUAN, "--prompt", "rain", "--run-dir", "run", "--json"),
        *("--resolution", "demo", "--aspect-ratio", "9:16"),
    )
    assert ran.code == 0, ran.err
    settings = ran.json["settings"]
    assert (settings["height"], settings["width"]) == (160, 96)


def test_a_step_cache_is_recorded_and_replayed(cli: Cli) -> None:
    cache = "taylorseer:start=1,end=4,interval=2,order=1"
    ran = cli(
        *("generate", *COG, "--steps", "5", "--prompt", "a panda", "--json"),
        *("--cache", cache, "--out", "v.gif"),
    )
    assert ran.code == 0, ran.err
    assert ran.json["settings"]["step_cache"] == cache
    (denoise,) = (s for s in ran.json["report"]["stages"] if s["stage"] == "denoise")
    names = [compiled["program"] for compiled in denoise["compiles"]]
    assert names == ["step_full", "step_cached"]
    assert cli("replay", "v.gif.json", "--json").json["same"]


def test_the_bench_shows_what_a_step_cache_costs(cli: Cli) -> None:
    ran = cli("bench", *COG, "--steps", "10", "--quality", "--repeat", "1", "--json")
    assert ran.code == 0, ran.err
    result = ran.json
    prices = result["step_caches"]
    assert [name.partition(":")[0] for name in prices] == ["deepcache", "taylorseer"]
    for name, price in prices.items():
        assert 5 < price["psnr"] < 100
        assert 0 < price["ssim"] < 1
        steady = result["backends"]
        exact = steady["tpuport"]["steady"]["stages"]["denoise"]
        assert price["denoise_speedup"] == pytest.approx(
            exact / steady[name]["steady"]["stages"]["denoise"]
        )
    text = "\n".join(bench._text(result))
    assert "none (exact)" in text
    assert "dB" in text
    one = cli("bench", *COG, "--cache", "deepcache", "--repeat", "1", "--json")
    # Never a speed-up without its price.
    assert one.code == 2
    assert "would cache none of 2 steps" in one.last


BAD = {
    "no such image": (("--image", "nope.png"), "image nope.png does not exist"),
    "an address": (("--image", "https://a.b/c.png"), "is an address; download it"),
    "no image": (("--image", "text.txt"), "image text.txt cannot be read"),
    "tiny image": (("--image", "tiny.png"), "tiny.png is 8x8; each side needs"),
    "both": (("--image", "a", "--video", "b"), "exclude each other"),
    "strength alone": (("--strength", "0.5"), "--strength goes with --video only"),
    "size class": (
        ("--resolution", "4k"),
        "'4k': variant demo has the size classes demo, 480p",
    ),
    "aspect": (("--aspect-ratio", "16"), "'16' is not WIDTH:HEIGHT"),
    "bucket and size": (("--aspect-ratio", "1:1", "--size", "64x64"), "exclude"),
    "cache name": (("--cache", "deepcash"), "did you mean deepcache"),
    "cache range": (("--cache", "deepcache:start=7"), "nearest valid: 6"),
    "cache setting": (("--cache", "deepcache:order=2"), "is not a setting of"),
    "sharding": (("--sharding", "all"), "has default, gathered, replicated-attention"),
    "task": (("--video", "clip.mp4"), "not from a video"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_that_says_what_to_do(
    name: str, cli: Cli, clip: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("not a picture")
    Image.new("RGB", (8, 8)).save(tmp_path / "tiny.png")
    args, words = BAD[name]
    frames = ("--frames", "5") if name == "task" else ()
    ran = cli("generate", "--model", "hunyuanvideo", "--prompt", "a", *frames, *args)
    assert ran.code == 2, ran.err
    assert ran.last.startswith("error: ")
    assert words in ran.last
    assert "Traceback" not in ran.err


def test_a_video_shorter_than_asked(cli: Cli, clip: Path) -> None:
    ran = cli("generate", *COG, "--frames", "17", "--prompt", "a", "--video", clip)
    assert ran.code == 2
    assert "has 12 frames and 17 are asked for" in ran.last


def test_a_strength_out_of_range(cli: Cli, clip: Path) -> None:
    for strength in ("0", "1.5"):
        ran = cli(
            *("generate", *COG, "--prompt", "a"),
            *("--video", clip, "--strength", strength),
        )
        assert ran.code == 2
        assert "must be above 0 and at most 1" in ran.last


def test_what_models_says_of_tasks_and_layouts(cli: Cli) -> None:
    (model,) = (
        m
        for m in cli("models", "--json").json["models"]
        if m["model"] == "hunyuanvideo"
    )
    tasks = {v["variant"]: v["tasks"] for v in model["variants"]}
    assert tasks["demo"] == ["t2v", "i2v"]
    assert tasks["1.5-720p-i2v"] == ["i2v"]
    layouts = ["default", "gathered", "replicated-attention", "replicated-out"]
    assert model["sharding"] == layouts
    text = cli("models").out
    assert "--resolution: demo, 480p, 720p" in text
    assert "text+image" in text


def test_a_yaml_file_says_the_same(cli: Cli, image: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        json.dumps(
            {
                "model": "hunyuanvideo",
                "prompt": "rain",
                "image": str(image),
                "frames": 5,
                "steps": 2,
                "aspect_ratio": "1:1",
            }
        )
    )
    ran = cli("encode", "--config", file, "--run-dir", "run", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["settings"]["task"] == "i2v"
    assert ran.json["settings"]["height"] == ran.json["settings"]["width"] == 128


EARLY = {
    "image for text": (("--variant", "13b", "--image", "tiny-enough.png"), "13b makes"),
    "no image": (("--variant", "1.5-480p-i2v"), "from an image (--image)"),
    "distilled": (
        ("--variant", "1.5-480p-t2v-cfg-distilled", "--guidance", "6"),
        "takes no other than 1",
    ),
    "size class": (
        ("--variant", "13b", "--resolution", "720p"),
        "no size classes; use --size",
    ),
    "cache": (
        ("--variant", "13b", "--steps", "2", "--cache", "deepcache"),
        "none of 2",
    ),
    "upstream": (("--cache", "deepcache", "--backend", "diffusers"), "not upstream's"),
}


@pytest.mark.parametrize("name", EARLY)
def test_a_published_variant_is_checked_before_the_hub_is_asked(
    name: str, cli: Cli, tmp_path: Path
) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "tiny-enough.png")
    args, words = EARLY[name]
    ran = cli("generate", "--model", "hunyuanvideo", "--prompt", "a", *args)
    assert ran.code == 2, ran.err
    assert words in ran.last
    assert "hub" not in ran.err


def test_flags_win_over_a_file_that_says_the_same_otherwise(
    cli: Cli, image: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    content = {"prompt": "rain", "video": "clip.mp4", "strength": 0.5, "steps": 2}
    content |= {"model": "hunyuanvideo", "frames": 5, "resolution": "480p"}
    file.write_text(json.dumps(content))
    ran = cli(
        *("encode", "--config", file, "--run-dir", "run", "--json"),
        *("--image", image, "--size", "64x48"),
    )
    assert ran.code == 0, ran.err
    settings = ran.json["settings"]
    assert settings["prompts"] == ["rain"]
    assert (settings["task"], settings["strength"]) == ("i2v", None)
    assert (settings["height"], settings["width"]) == (48, 64)


def test_a_gif_is_a_video(cli: Cli, clip: Path, tmp_path: Path) -> None:
    frames = np.random.default_rng(0).random((9, 64, 96, 3))
    write_video(tmp_path / "clip.gif", frames, 8)
    ran = cli(
        *("encode", *COG, "--prompt", "a", "--run-dir", "run", "--json"),
        *("--video", tmp_path / "clip.gif"),
    )
    assert ran.code == 0, ran.err
    assert ran.json["settings"]["task"] == "v2v"
