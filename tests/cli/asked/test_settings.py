"""Flags over a YAML file over the environment; what each may hold."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.cli.tools import call
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings, gather
from tpuport.core.enums import Blocks, Place, Tiling
from tpuport.core.files.stores import StorePath
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.spec.run_settings import RunSettings
from tpuport.errors import UsageError

_seen: list[Settings] = []


def parse(*args: str | Path) -> Settings:
    """The settings that ``tpuport generate ARGS`` runs with."""
    app = typer.Typer(add_completion=False)

    @command("generate")
    def keep(settings: Settings) -> None:
        _seen.append(settings)

    def run(context: typer.Context, **options: Any) -> None:
        _seen.append(gather(context, "G"))

    run.__signature__ = inspect.signature(keep)  # type: ignore[attr-defined]
    run.__annotations__ = keep.__annotations__
    app.command()(run)
    typer.main.get_command(app).main(
        args=[str(arg) for arg in args], standalone_mode=False
    )
    return _seen.pop()


def refused(*args: str | Path) -> str:
    """What is said when ``tpuport generate ARGS`` is refused."""
    with pytest.raises(UsageError) as caught:
        parse(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def file(tmp_path: Path) -> Any:
    """Writes a YAML file; returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return path

    return write


def test_defaults_are_left_to_the_variant(file: Any, tmp_path: Path) -> None:
    assert parse() == parse("--config", file("# nothing\n")) == Settings()
    assert "does not exist" in refused("--config", tmp_path / "none.yaml")


NUMBERS = {"num_inference_steps": 3, "num_frames": 9, "guidance_scale": 2.5}
OPTIONS = {"scheduler": "ddim", "use_dynamic_cfg": "on"}


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (("--steps", "3", "--frames", "9", "--guidance", "2.5"), NUMBERS),
        (
            ("--num-inference-steps=3", "--num-frames=9", "--guidance-scale=2.5"),
            NUMBERS,
        ),
        (("--size", "720x480"), {"width": 720, "height": 480}),
        (("--seed", "1,2", "--seed", "3"), {"seed": (1, 2, 3)}),
        (("--seed", "0"), {"seed": (0,)}),
        (
            ("-o", "scheduler=ddim", "--option", "use-dynamic-cfg=on"),
            {"options": OPTIONS},
        ),
    ],
)
def test_a_flag_says_what_it_means(args: tuple[str, ...], meant: Any) -> None:
    assert parse(*args) == Settings(**meant)


@pytest.mark.parametrize(
    "flag", ["--image", "--video", "--latents", "--config", "--run-dir"]
)
def test_an_address_is_refused_by_every_flag(flag: str) -> None:
    for address in ("HTTP://a.b/c", "s3://b/c", "data:image/png;base64,A"):
        said = refused(flag, address)
        assert said.startswith(f"{flag}: '{address}' is an address; download it")


@pytest.mark.parametrize("flag", ["--weights", "--executables", "--report"])
def test_a_store_is_named_by_a_known_scheme(flag: str) -> None:
    found = getattr(parse(flag, "s3://b/c/"), flag.removeprefix("--"))
    assert str(found) == "s3://b/c"
    said = refused(flag, "foo://b/c")
    assert "'foo://b/c' is no address of a known store; gs:// and s3://" in said


def test_a_prompt_file_has_a_prompt_on_each_line(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("# animals\n\n a panda \na fox # with a tail\n")
    expected = ("a panda", "a fox # with a tail")
    assert parse("--prompt-file", prompts).prompt == expected


def test_a_prompt_file_that_is_none_is_refused(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n# nothing\n")
    assert "holds no prompt" in refused("--prompt-file", prompts)
    assert "does not exist" in refused("--prompt-file", tmp_path / "none.txt")
    assert "cannot be read" in refused("--prompt-file", tmp_path)
    prompts.write_bytes(b"\xff\xfe\xfa")
    assert "UTF-8" in refused("--prompt-file", prompts)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        *(
            (("--size", size), "WIDTHxHEIGHT")
            for size in ("720", "axb", "1x2x3", "-1x5")
        ),
        (("--size", "96x0"), "--size: '96x0' is empty"),
        (("--size", "96x64", "--height", "64"), "--size and --height exclude each"),
        (("--prompt", "b", "--prompt-file", __file__), "--prompt and --prompt-file ex"),
        (("--seed", "1,x"), "integer"),
        (("-o", "scheduler"), "NAME=VALUE"),
        (("--steps", "0"), "--steps: 0"),
        (("--steps", "-3"), "--steps: -3"),
        (("--vae-tiling", "maybe"), "'maybe' is none of on, off"),
        (("--fps", "0"), "--fps: 0.0 is not positive; give a number such as 8"),
        (("--guidance", "nan"), "--guidance: nan is no finite number"),
        (("--strength", "5"), "--strength: 5.0 is not in (0, 1]; give a number such"),
        (("--seed", "9" * 20), "has more than 64 bits; give a seed such as 7"),
        (("--resolution", "4k"), "--resolution: '4k' is no size class; give one such"),
        (("--aspect-ratio", "9:1"), "--aspect-ratio: '9:1' is out of range: shapes go"),
        (("--resolution", "480p", "--width", "8"), "--resolution and --width exclude"),
        (("--aspect-ratio", "1:1", "--size", "8x8"), "--aspect-ratio and --size excl"),
    ],
)
def test_a_flag_that_is_wrong_is_refused(args: tuple[str, ...], said: str) -> None:
    assert said in refused(*args)


# --- the file


def test_a_file_may_hold_any_setting(file: Any) -> None:
    settings = parse(
        "--config",
        file(
            "model: cogvideox\nvariant: 2b\nprompts: [a, b]\nnegative-prompt: c\n"
            "size: 96x64\nnum_frames: 9\nfps: 12\nnum-inference-steps: 4\n"
            "guidance_scale: 1\nseed: [1, '2,3']\nmesh: {dp: 2, tp: 4}\n"
            "encode_on: host\nblocks: upstream\nvae_tiling: on\n"
            "options: {scheduler: ddim, use_dynamic_cfg: false}\n"
            "out: v.gif\nrun-dir: r\nno_compile_cache: true\njson: true\nlatents:\n"
        ),
    )
    assert settings == Settings(
        model="cogvideox",
        variant="2b",
        prompt=("a", "b"),
        negative_prompt="c",
        width=96,
        height=64,
        num_frames=9,
        fps=12.0,
        num_inference_steps=4,
        guidance_scale=1.0,
        seed=(1, 2, 3),
        mesh=MeshSpec(dp=2, tp=4),
        encode_on=Place.HOST,
        blocks=Blocks.UPSTREAM,
        vae_tiling=Tiling.ON,  # a bare on is a boolean in YAML
        options={"scheduler": "ddim", "use_dynamic_cfg": False},
        out="v.gif",
        run_dir=Path("r"),
        compile_cache=False,
        json=True,
    )


def test_stages_op_by_op_are_named_or_all(file: Any) -> None:
    config = file("no-jit-stage: [denoise, decode]")
    assert parse("--config", config).no_jit == ("denoise", "decode")
    assert parse("--config", config, "--no-jit-stage", "encode").no_jit == ("encode",)
    settings = parse("--config", file("no_jit: true"))
    assert settings.no_jit == ("encode", "denoise", "decode")
    assert parse().no_jit == ()


def test_flags_win_over_the_file(file: Any) -> None:
    config = file("steps: 4\nframes: 17\nprompt: from the file\nseed: 5\n")
    args = ("--num-inference-steps", "2", "--prompt", "a flag", "--seed", "0")
    settings = parse("--config", config, *args)
    assert (settings.num_inference_steps, settings.num_frames) == (2, 17)
    assert (settings.prompt, settings.seed) == (("a flag",), (0,))


def test_a_flag_replaces_what_the_file_says_otherwise(
    file: Any, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n")
    config = file("size: 96x64\nprompt: a\n")
    settings = parse("--config", config, "--height", "32", "--prompt-file", prompts)
    assert (settings.width, settings.height) == (96, 32)
    assert settings.prompt == ("one",)
    config = file("height: 32\nwidth: 32\n")
    settings = parse("--config", config, "--size", "96x64")
    assert (settings.width, settings.height) == (96, 64)
    config = file("video: clip.mp4\nstrength: 0.5\nresolution: 480p\n")
    settings = parse("--config", config, "--image", "a.png", "--size", "64x48")
    assert (settings.image, settings.video, settings.strength) == ("a.png", None, None)
    assert (settings.height, settings.resolution) == (48, None)


def test_the_file_wins_over_the_environment(
    file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPUPORT_CACHE_DIR", "/from/environment")
    assert parse().cache_dir == Path("/from/environment")
    config = file("cache_dir: /from/file\n")
    assert parse("--config", config).cache_dir == Path("/from/file")
    assert parse("--config", config, "--cache-dir", "/c").cache_dir == Path("/c")


def test_a_cache_is_in_a_store_or_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPUPORT_CACHE_DIR", "/here")
    store = StorePath("gs", "bucket/cache")
    there = parse("--cache-dir", "gs://bucket/cache/")
    assert (there.cache_dir, there.cache_store) == (None, store)
    monkeypatch.setenv("TPUPORT_CACHE_DIR", "gs://bucket/cache")
    assert (parse().cache_dir, parse().cache_store) == (None, store)
    here = parse("--cache-dir", "/here")
    assert (here.cache_dir, here.cache_store) == (Path("/here"), None)
    kept = RunSettings.read({"cache_dir": "gs://bucket/cache"})
    assert kept.compiled_dir == store / "compiled"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stpes: 4", "did you mean steps?"),
        ("qqq: 4", "the keys are the flags in --help"),
        ("steps: many", "steps: 'many' is not an integer"),
        ("steps: [2]", "steps: [2] is a list, not an integer"),
        ("model: [a]", "model: ['a'] is a list, not text"),
        ("steps: true", "is not an integer"),
        ("guidance: high", "is not a number"),
        ("prompt: 3", "is not text"),
        ("json: 1", "neither true nor false"),
        ("blocks: fast", "blocks: 'fast' is none of native, upstream"),
        ("options: {a: 2020-01-01}", "holds more than texts, numbers and lists"),
        (
            "steps: 1\nnum-inference-steps: 2",
            "steps and num-inference-steps are the same setting",
        ),
        ("prompt: a\nprompt_file: b", "exclude each other"),
        ("- a\n- b", "holds list"),
        ("a: [", "is not YAML"),
        ("steps: 2\nframes: 9\nsteps: 3", "lines 1 and 3 both have the key 'steps'"),
        # Nine such lines would be 10^9 times the text.
        ("model: &a [x, x]\nprompt: [*a, *a]", "line 2 has the alias *a"),
        ('prompt: "a\\ud800b"', "character 2 is half of a surrogate pair"),
        ('out: "a\\0b.mp4"', "has a NUL character"),
        ("a: " + "[" * 10**4, "is not YAML"),
        ("a" * (17 << 20), "is larger than 16 MiB"),
    ],
)
def test_a_file_that_is_wrong_is_refused(file: Any, text: str, said: str) -> None:
    config = file(text)
    message = refused("--config", config)
    assert said in message
    assert str(config) in message


def test_what_a_command_reads_is_known(file: Any, tmp_path: Path) -> None:
    """No output may be one of these."""
    prompts, weights = tmp_path / "prompts.txt", tmp_path / "weights"
    prompts.write_text("a fox\n")
    weights.mkdir()
    config = file(f"prompt_file: {prompts}\nvideo: in.gif\n")
    flags = ("--latents", "n.safetensors", "--run-dir", "run", "--weights", weights)
    read = parse("--config", config, *flags).inputs()
    files = ("in.gif", "n.safetensors", "run/run.json", weights, config, prompts)
    assert sorted(read) == sorted(Path(one) for one in files)
    assert parse("--weights", "some/model").inputs() == []  # a hub id


def test_a_value_off_its_rule_names_the_file_that_gave_it(
    file: Any, folder: Path
) -> None:
    config = file("prompt: a\nframes: 9\nsize: 33x16\n")
    ran = call("generate", "--config", config, "--weights", folder)
    assert ran.code == 2
    assert ran.last == f"{config} gives: prompt, frames, size"
    line = ran.err.splitlines()[-2]
    assert line.startswith("error: --size 33x16: WanPipeline refuses this: ")
    assert line.endswith("; try --size 32x16")
