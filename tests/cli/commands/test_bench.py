"""``tpuport bench``: what it reports, not how fast anything is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.tools import SMALL, Cli
from tests.tolerances import TOLERANCES
from tpuport.cli.commands import bench
from tpuport.core.run.progress import Display


def test_both_backends_are_measured_in_turns(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    told = Display.began

    def listen(self: Display, what: str) -> None:
        began.append(what)
        told(self, what)

    monkeypatch.setattr(Display, "began", listen)
    ran = cli("bench", *SMALL, "--repeat", "2", "--against", "diffusers", "--json")
    assert ran.code == 0, ran.err
    result = ran.json
    assert list(result["backends"]) == ["tpuport", "diffusers"]
    for backend in result["backends"].values():
        assert len(backend["steady"]["all_seconds"]) == 2
        assert list(backend["steady"]["stages"]) == ["encode", "denoise", "decode"]
    firsts = {name: b["first"] for name, b in result["backends"].items()}
    assert firsts["tpuport"]["programs"] == 3
    assert all(first["load_seconds"] > 0 for first in firsts.values())
    steady = {name: b["steady"] for name, b in result["backends"].items()}
    ratio = steady["diffusers"]["seconds"] / steady["tpuport"]["seconds"]
    assert result["ratio"]["total"] == pytest.approx(ratio)
    assert result["max_frame_difference"] < TOLERANCES["video float32"]
    turns = [what.partition(":")[0] for what in began if " run" in what]
    assert turns == ["tpuport", "diffusers"] * 3
    lines = ran.err.splitlines()
    assert len(lines) == len(set(lines)), "nothing is said twice"
    text = "\n".join(bench._text(result))
    assert "ratio" in text
    assert "per step" in text


def test_what_compile_built_can_be_measured(cli: Cli, tmp_path: Path) -> None:
    built = cli("compile", *SMALL, "--out", str(tmp_path / "built"))
    assert built.code == 0, built.err
    ran = cli(
        *("bench", *SMALL, "--repeat", "1", "--against", "diffusers", "--json"),
        *("--executables", str(tmp_path / "built"), "--no-compile-cache"),
    )
    assert ran.code == 0, ran.err
    result = ran.json
    first = result["backends"]["tpuport"]["first"]
    assert (first["programs"], first["loaded"]) == (3, 3)
    # Of bytes: none, or one step of them.
    assert result["max_frame_difference"] < 1.01 / 255
    assert any("bytes" in note for note in result["notes"])


def test_only_diffusers_can_be_compared_with(cli: Cli) -> None:
    ran = cli("bench", "--against", "other")
    assert ran.code == 2
    assert "diffusers" in ran.last


def test_any_pipeline_is_measured_beside_upstream(cli: Cli, folder: Path) -> None:
    asked = ("--size", "32x16", "--frames", "5", "--steps", "3", "--repeat", "2")
    more = ("--option", "max_sequence_length=16")
    ran = cli("bench", "--weights", folder, *asked, *more, "--against", "diffusers")
    assert ran.code == 0, ran.err
    first, *_ = ran.out.splitlines()
    assert first.startswith("WanPipeline, 32x16, 5 frames, 3 steps, float32")
    assert "largest difference of the frames: " in ran.out
    ran = cli("bench", "--weights", folder, *asked, *more, "--json")
    steady = ran.json["backends"]["tpuport"]["steady"]
    assert list(steady["stages"]) == ["encode", "denoise", "decode"]
    assert steady["seconds_per_step"] == pytest.approx(steady["stages"]["denoise"] / 3)
