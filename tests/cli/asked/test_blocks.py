"""``--blocks``: which programs run, what is recorded of it, and that it replays."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.cli.tools import SMALL, Cli, Made, Ran, call
from tests.tolerances import TOLERANCES
from tpuport.core.files.sealed_json import read_sidecar

SETTINGS = (
    *("--prompt", "a panda", "--prompt", "a fox", "--seed", "7", *SMALL),
    *("--negative-prompt", "blurry"),
)

NATIVE = {"cogvideox-native-forward", "cogvideox-native-block"}


@pytest.fixture(scope="module")
def upstream(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The shared run of these tests with upstream's blocks."""
    folder = tmp_path_factory.mktemp("upstream")
    run = folder / "run"
    ran = call(
        *("generate", *SETTINGS, "--blocks", "upstream", "--run-dir", run),
        *("--out", folder / "video.mp4", "--cache-dir", cache, "--json"),
    )
    assert ran.code == 0, ran.err
    return Made(ran, folder, run, cache)


def denoising(ran: Ran) -> dict[str, Any]:
    """The report of the denoise stage."""
    stages = {s["stage"]: s for s in ran.json["report"]["stages"]}
    found: dict[str, Any] = stages["denoise"]
    return found


def digests(ran: Ran) -> list[str]:
    return [video["latents_sha256"] for video in ran.json["videos"]]


# --- what runs


def test_native_and_upstream_run_other_programs(made: Made, upstream: Made) -> None:
    for run, blocks in ((made, "native"), (upstream, "upstream")):
        assert run.ran.json["blocks"] == blocks
        assert run.ran.json["report"]["blocks"] == blocks
        stage = denoising(run.ran)
        assert stage["attention"]
        # One joint sequence with its padding, or text and video joined in each block.
        padded = [record["padded"] for record in stage["attention"]]
        assert all((found is None) == (blocks == "upstream") for found in padded)
        patches = {patch["name"] for patch in stage["patches"]}
        assert patches & NATIVE == (NATIVE if blocks == "native" else set())


def test_both_give_the_same_latents(made: Made, upstream: Made) -> None:
    (ours,) = load_file(made.run / "latents.safetensors").values()
    (theirs,) = load_file(upstream.run / "latents.safetensors").values()
    difference = float((ours - theirs).abs().max())
    assert difference <= TOLERANCES["video float32"]
    # Two computations: what follows can tell which of them was replayed.
    assert set(digests(made.ran)).isdisjoint(digests(upstream.ran))


def test_bench_says_which_blocks_it_measured(cli: Cli) -> None:
    asked = ("bench", *SMALL, "--repeat", "1", "--blocks", "upstream")
    assert cli(*asked, "--json").json["blocks"] == "upstream"
    assert ", upstream blocks, " in cli(*asked).out.splitlines()[0]


@pytest.mark.parametrize(
    "command",
    ["generate", "encode", "denoise", "decode", "bench", "compile", "plan"],
)
def test_a_wrong_value_lists_the_choices(cli: Cli, command: str) -> None:
    more = ("--topology", "v6e-8") if command == "plan" else ()
    ran = cli(command, *more, "--blocks", "fast")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("error: --blocks: 'fast' is none of native, upstream")


def test_the_config_file_may_say_it(cli: Cli, made: Made, run: Path) -> None:
    Path("blocks.yaml").write_text("blocks: upstream\n")
    ran = cli(
        *("generate", *SETTINGS, "--config", "blocks.yaml", "--run-dir", run),
        *("--out", "v.gif", "--json"),
    )
    assert ran.code == 0, ran.err
    assert ran.json["blocks"] == "upstream"
    # Encoding has no native blocks, so that it stays what it was.
    assert ran.json["reused"] == ["encode"]
    assert "denoise: was finished with blocks native, now upstream: " in ran.err
    again = cli(*("generate", *SETTINGS, "--run-dir", run, "--out", "v.gif", "--json"))
    assert again.json["reused"] == ["encode"]
    assert digests(again) == digests(made.ran)


# --- what is recorded


def test_it_is_recorded_for_each_stage(upstream: Made, cli: Cli) -> None:
    stages = json.loads((upstream.run / "run.json").read_text())["stages"]
    recorded = {name: entry["report"]["blocks"] for name, entry in stages.items()}
    assert recorded == dict.fromkeys(("encode", "denoise", "decode"), "upstream")
    sidecar = read_sidecar(Path(upstream.ran.json["videos"][0]["sidecar"]))
    assert sidecar["stages"]["denoise"]["blocks"] == "upstream"


def test_stages_may_be_run_with_other_blocks(cli: Cli, run: Path, made: Made) -> None:
    ran = cli("denoise", "--run-dir", run, "--blocks", "upstream", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["blocks"] == "upstream"
    assert {record["padded"] for record in denoising(ran)["attention"]} == {None}
    ran = cli("decode", "--run-dir", run, "--out", "v.gif", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["blocks"] == "native"
    sidecar = read_sidecar(Path("v-000.gif.json"))
    found = {name: stage["blocks"] for name, stage in sidecar["stages"].items()}
    wanted = {"encode": "native", "denoise": "upstream", "decode": "native"}
    assert found == wanted
    ran = cli("replay", "v-000.gif.json", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["latents_sha256"] == sidecar["latents_sha256"]


# --- executables


def test_executables_of_other_blocks_are_refused_by_name(cli: Cli, run: Path) -> None:
    asked = ("--stage", "denoise", "--blocks", "upstream", "--out", "built", "--json")
    ran = cli("compile", *SMALL, *asked)
    assert ran.code == 0, ran.err
    assert ran.json["blocks"] == "upstream"
    manifest = json.loads(Path("built/manifest.json").read_text())
    assert manifest["blocks"] == "upstream"
    ran = cli("denoise", "--run-dir", run, "--executables", "built")
    assert ran.code == 1
    assert re.search(r"denoise/step is not for .*: blocks upstream -> native;", ran.err)
    assert "denoise: " not in ran.err
    ran = cli(
        *("denoise", "--run-dir", run, "--executables", "built", "--json"),
        *("--blocks", "upstream", "--no-compile-cache"),
    )
    assert ran.code == 0, ran.err
    assert ran.json["report"]["warm"] is True
