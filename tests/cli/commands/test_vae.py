"""``--vae`` and ``--vae-tiling``: what they take, what is recorded and replayed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.asked.test_settings import parse, refused
from tests.cli.commands.test_plan import needs_libtpu, plan
from tests.cli.tools import SMALL, Cli, Ran
from tests.core.files.videos import read_back
from tests.core.plan.test_search import measured, plan_of
from tpuport.cli.shown.plan_text import text
from tpuport.core.files.sealed_json import read_sidecar
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.spec.tiling import TilingDecision


def stage_of(ran: Ran, name: str) -> dict[str, Any]:
    stages = {stage["stage"]: stage for stage in ran.json["report"]["stages"]}
    found: dict[str, Any] = stages[name]
    return found


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "fox.png"
    draw = np.random.default_rng(0)
    Image.fromarray(draw.integers(0, 256, (64, 96, 3), np.uint8)).save(path)
    return path


# --- what it takes


def test_the_key_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("vae: flax\n")
    assert parse("--config", file).implementations == {"vae": "flax"}
    assert parse("--config", file, "--vae", "torchax").vae == "torchax"
    assert parse().implementations == {"vae": "torchax"}


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("generate", ()),
        ("encode", ("--run-dir", "run")),
        ("bench", ()),
        ("compile", ("--out", "built")),
        ("plan", ("--topology", "v6e-8")),
    ],
    ids=["generate", "encode", "bench", "compile", "plan"],
)
def test_what_a_model_does_not_have_is_refused_in_one_line(
    command: str, more: tuple[str, ...], cli: Cli
) -> None:
    for model, vae, has in (
        ("hunyuanvideo", "flax", "torchax"),
        ("cogvideox", "fast", "torchax, flax"),
    ):
        ran = cli(command, *more, "--model", model, "--vae", vae)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err == f"error: vae '{vae}': {model} has {has}\n"


def test_decode_of_a_run_refuses_it_too(cli: Cli, run: Path) -> None:
    ran = cli("decode", "--run-dir", run, "--vae", "fast")
    assert (ran.code, ran.last) == (2, "error: vae 'fast': cogvideox has torchax, flax")


def test_upstreams_own_backend_has_its_own(cli: Cli) -> None:
    ran = cli(
        *("generate", "--prompt", "a fox", "--vae", "flax"),
        *("--backend", "diffusers"),
    )
    assert ran.code == 2
    assert ran.last.startswith("error: --vae flax is not upstream's")


def test_models_lists_them(cli: Cli) -> None:
    lines = cli("models").out.splitlines()
    assert lines.count("  --vae: torchax, flax") == 1
    found = {
        m["model"]: m["implementations"]
        for m in cli("models", "--json").json["models"]
        if "implementations" in m
    }
    assert found == {"cogvideox": {"vae": ["torchax", "flax"]}, "hunyuanvideo": {}}


# --- what is recorded, and what becomes of it


def test_decode_of_a_finished_run_and_its_replay(cli: Cli, run: Path) -> None:
    ran = cli("decode", "--run-dir", run, "--vae", "flax", "--out", "v.gif", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["implementations"] == {"vae": "flax"}
    assert ran.json["report"]["implementations"] == {"vae": "flax"}
    assert stage_of(ran, "decode")["patches"] == []
    sidecar = read_sidecar(Path("v-000.gif.json"))
    found = {name: s["implementations"] for name, s in sidecar["stages"].items()}
    wanted = {"encode": {"vae": "torchax"}, "denoise": {}, "decode": {"vae": "flax"}}
    assert found == wanted
    ran = cli("replay", "v-000.gif.json", "--out", "again.gif", "--json")
    assert ran.code == 0, ran.err
    assert stage_of(ran, "decode")["patches"] == []
    assert stage_of(ran, "encode")["patches"]
    again = read_sidecar(Path("again.gif.json"))
    assert again["stages"]["decode"]["implementations"] == {"vae": "flax"}
    assert read_back("again.gif") == read_back("v-000.gif")


def test_text_to_video_reuses_what_another_autoencoder_has_no_part_in(
    cli: Cli, run: Path
) -> None:
    ran = cli(
        *("generate", "--prompt", "a panda", "--prompt", "a fox", "--seed", "7"),
        *(*SMALL, "--negative-prompt", "blurry", "--run-dir", run, "--vae", "flax"),
        *("--out", "v.gif", "--json"),
    )
    assert ran.code == 0, ran.err
    assert ran.json["reused"] == ["encode", "denoise"]
    assert ran.json["implementations"] == {"vae": "flax"}


def test_an_encoded_image_is_of_the_autoencoder_that_encoded_it(
    cli: Cli, image: Path
) -> None:
    asked = ("--prompt", "a fox", "--image", image, *SMALL, "--variant", "demo-i2v")
    ran = cli("encode", *asked, "--run-dir", "run", "--vae", "flax", "--json")
    assert ran.code == 0, ran.err
    again = cli("generate", *asked, "--run-dir", "run", "--out", "v.gif", "--json")
    assert again.code == 0, again.err
    assert again.json["reused"] == []
    assert "encode: was finished with vae flax, now torchax: " in again.err
    shutil.rmtree("run")


def test_on_the_host_an_image_is_encoded_by_upstreams_and_recorded_so(
    cli: Cli, image: Path
) -> None:
    ran = cli(
        *("encode", "--prompt", "a fox", "--image", image, *SMALL, "--json"),
        *("--variant", "demo-i2v", "--vae", "flax", "--encode-on", "host"),
        *("--run-dir", "run"),
    )
    assert ran.code == 0, ran.err
    assert "its vae is upstream's, not flax" in ran.err
    assert ran.json["implementations"] == {}
    assert ran.json["report"]["implementations"] == {}
    record = json.loads(Path("run/run.json").read_text())
    assert record["stages"]["encode"]["report"]["implementations"] == {}
    assert not any(line.split() == ["vae", "flax"] for line in ran.err.splitlines())
    shutil.rmtree("run")


def test_the_programs_of_one_are_no_programs_of_the_other(cli: Cli, run: Path) -> None:
    asked = ("--stage", "decode", "--vae", "flax", "--out", "built", "--json")
    ran = cli("compile", *SMALL, *asked)
    assert ran.code == 0, ran.err
    manifest = json.loads(Path("built/manifest.json").read_text())
    assert manifest["implementations"] == {"vae": "flax"}
    ran = cli("decode", "--run-dir", run, "--executables", "built")
    assert ran.code == 1
    assert "implementation flax -> torchax" in ran.err
    ran = cli(
        *("decode", "--run-dir", run, "--executables", "built", "--vae", "flax"),
        *("--no-compile-cache", "--json"),
    )
    assert ran.code == 0, ran.err
    assert ran.json["report"]["warm"] is True
    # A folder is for a whole run, of which this is another stage.
    asked = ("denoise", "--run-dir", run, "--executables", "built")
    assert "implementation flax -> torchax" in cli(*asked).err
    ran = cli(*asked, "--vae", "flax")
    assert ran.code == 0, ran.err


# --- plans


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("vae", ["torchax", "flax"])
def test_a_plan_of_decode(vae: str, tmp_path: Path) -> None:
    # XLA's convolutions for a TPU take minutes, however small: one program.
    small = ("--size", "48x32", "--frames", "9", "--stage", "decode", "--json")
    done = plan(tmp_path, "--topology", "v6e-1", *small, "--vae", vae)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["implementations"] == {"vae": vae}
    programs = found["stages"]["decode"]["programs"]
    assert [(p["program"], p["calls"]) for p in programs] == [("first uint8", 1)]
    assert found["fits"] is True
    assert found["stage_seconds"]["decode"] > 0
    (weights,) = found["sharding_plans"]
    assert weights["component"] == "vae"


# --- --vae-tiling


@pytest.mark.parametrize(
    ("written", "meant"),
    [("on", "on"), ("off", "off"), ("auto", "auto"), ("'on'", "on"), ("false", "off")],
)
def test_tiling_as_the_key_of_a_file(written: str, meant: str, tmp_path: Path) -> None:
    # A bare on or off is a boolean in YAML.
    file = tmp_path / "run.yaml"
    file.write_text(f"vae_tiling: {written}\n")
    assert parse("--config", file).vae_tiling == meant
    assert parse("--config", file, "--vae-tiling", "auto").vae_tiling == "auto"
    assert parse().vae_tiling == "auto"


def test_other_words_are_refused() -> None:
    found = refused("--vae-tiling", "maybe")
    assert found == "--vae-tiling: 'maybe' is none of auto, on, off"


@pytest.mark.parametrize("model", ["cogvideox", "hunyuanvideo"])
def test_it_is_no_option_of_a_model(model: str, cli: Cli) -> None:
    ran = cli(
        *("generate", "--model", model, "--prompt", "a cat"),
        *("--option", "vae_tiling=on"),
    )
    assert ran.code == 2
    assert "has no option 'vae_tiling'" in ran.err


def test_decode_of_a_finished_run_with_another_setting(cli: Cli, run: Path) -> None:
    ran = cli("decode", "--run-dir", run, "--vae-tiling", "on", "--json")
    assert ran.code == 0, ran.err
    (stage,) = ran.json["report"]["stages"]
    tiling = stage["tiling"]
    # One tile of upstream's holds such a small picture.
    assert (tiling["asked"], tiling["tiled"], tiling["tiles"]) == ("on", False, "")
    assert "decode: untiled, as the picture is one of upstream's tiles" in ran.err
    # What the compiler says of so small a picture is far from what the machine has.
    assert 0 < tiling["needed"] < min(2**27, tiling["limit"])
    sidecar = json.loads(Path(ran.json["videos"][0]["sidecar"]).read_text())
    assert sidecar["stages"]["decode"]["vae_tiling"] == "off"


def test_a_plan_says_how_decode_runs() -> None:
    decided = TilingDecision(
        stage="decode",
        asked="auto",
        tiles="2 x 3 tiles",
        tiled=True,
        limit=31 * 2**30,
        needed=4 * 2**30,
        untiled=40 * 2**30,
    )
    tiling = {"decode": decided.as_dict()}
    made: Any = plan_of(MeshSpec(), measured(4, 0.5), tiling=tiling)
    assert made.as_dict()["tiling"]["decode"]["untiled"] == 40 * 2**30
    assert decided.line() in text(made).splitlines()
