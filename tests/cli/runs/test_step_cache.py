"""``--cache`` for a pipeline without stages of its own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.tools import Cli, example
from tests.processes import Once
from tpuport.cli.commands import bench

SIZE = ("--size", "32x16", "--frames", "5", "--option", "max_sequence_length=16")
ASKED = ("--prompt", "a fox runs", *SIZE, "--steps", "6")
CACHE = ("--cache", "taylorseer:start=1,interval=3")


def test_a_step_cache_is_recorded_replayed_and_that_of_stages(
    cli: Cli, folder: Path
) -> None:
    asked = ("--weights", folder, *ASKED, *CACHE)
    ran = cli.good("generate", *asked, "--out", "one.gif", "--json")
    assert ran.json["calls"]["transformer"] == 2
    flags = json.loads(Path("one.gif.json").read_text())["request"]["flags"]
    assert flags["step_cache"] == "taylorseer:start=1,interval=3,order=1"
    cli.good("replay", "one.gif")
    for command in (("encode", *asked), ("denoise",), ("decode", "--out", "two.gif")):
        ran = cli.good(*command, "--run-dir", "run")
    assert Path("one.gif").read_bytes() == Path("two.gif").read_bytes()
    other = cli("generate", *asked[:-1], "taylorseer", "--run-dir", "run")
    assert (other.code, "step_cache" in other.last) == (1, True)


def test_a_step_cache_is_measured(cli: Cli, folder: Path) -> None:
    asked = ("--weights", folder, *SIZE, "--steps", "6", "--repeat", "1", "--quality")
    ran = cli.good("bench", *asked, "--against", "diffusers", "--json")
    prices = ran.json["step_caches"]
    assert [name.partition(":")[0] for name in prices] == ["deepcache", "taylorseer"]
    assert all(5 < price["psnr"] < 100 for price in prices.values())
    assert ran.json["max_frame_difference"] < 1e-4
    assert "none (exact)" in "\n".join(bench._text(ran.json))


def test_a_step_cache_is_refused_before_weights_are_read(
    cli: Cli, folder: Path, once: Once
) -> None:
    latte = example(once, "LattePipeline")
    size = ("--size", "16x16", "--frames", "5", "--steps", "6")
    asked = ("generate", "--weights", latte, "--prompt", "a", *CACHE, *size)
    cli.refused("transformer (LatteTransformer3DModel) has no place", *asked)
    few = ("generate", "--weights", folder, *ASKED[:-1], "2", "--cache", "deepcache")
    ran = cli.refused("would cache none of 2 steps", *few)
    assert "loading" not in ran.err


def test_both_programs_are_compiled_ahead(cli: Cli, folder: Path) -> None:
    asked = ("--weights", folder, *ASKED, *CACHE)
    built = cli.good(
        "compile", *asked, "--stage", "denoise", "--out", "built", "--json"
    )
    assert len(built.json["programs"]) == 2
    more = ("--executables", "built", "--no-compile-cache", "--out", "v.gif")
    ran = cli.good("generate", *asked, *more, "--json")
    denoise = ran.json["report"]["stages"][1]
    assert [compiled["loaded"] for compiled in denoise["compiles"]] == [True, True]
