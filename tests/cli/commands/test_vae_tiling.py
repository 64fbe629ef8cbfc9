"""``--vae-tiling``: a flag, a key of the file, and what is said of the decision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.asked.test_settings import parse, refused
from tests.cli.tools import Cli
from tests.core.plan.test_search import measured, plan_of
from tpuport.cli.shown.plan_text import text
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.spec.tiling import TilingDecision


@pytest.mark.parametrize(
    ("written", "meant"),
    [("on", "on"), ("off", "off"), ("auto", "auto"), ("'on'", "on"), ("false", "off")],
)
def test_the_key_of_a_file(written: str, meant: str, tmp_path: Path) -> None:
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
