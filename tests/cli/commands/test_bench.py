"""``tpuport bench``: what it reports, not how fast anything is."""

from __future__ import annotations

from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest

from tests.cli.conftest import Once, example
from tests.cli.tools import ASKED, Cli
from tests.tolerances import TOLERANCES
from tpuport.cli.commands import bench
from tpuport.core.run.progress import Display

SIZE = (*ASKED[2:6], "--steps", "3", *ASKED[-2:])


def test_both_backends_are_measured_in_turns(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 10 s: all programs of a pipeline are compiled, and measured again."""
    began: list[str] = []
    told = Display.began

    def listen(self: Display, what: str) -> None:
        began.append(what)
        told(self, what)

    monkeypatch.setattr(Display, "began", listen)
    asked = ("bench", "--weights", folder, *SIZE, "--repeat", "2", "--json")
    ran = cli.good(*asked, "--against", "diffusers")
    result = ran.json
    assert list(result["backends"]) == ["tpuport", "diffusers"]
    for backend in result["backends"].values():
        assert len(backend["steady"]["all_seconds"]) == 2
        stages = backend["steady"]["stages"]
        assert list(stages) == ["encode", "denoise", "decode"]
        assert backend["steady"]["seconds_per_step"] == pytest.approx(
            stages["denoise"] / 3
        )
    steady = {name: b["steady"] for name, b in result["backends"].items()}
    ratio = steady["diffusers"]["seconds"] / steady["tpuport"]["seconds"]
    assert result["ratio"]["total"] == pytest.approx(ratio)
    assert result["max_frame_difference"] < TOLERANCES["video float32"]
    turns = [what.partition(":")[0] for what in began if " run" in what]
    assert turns == ["tpuport", "diffusers"] * 3
    lines = ran.err.splitlines()
    assert len(lines) == len(set(lines)), "nothing is said twice"
    text = list(bench._text(result))
    assert text[0].startswith("WanPipeline, 32x16, 5 frames, 3 steps, float32")
    assert "ratio" in "\n".join(text)
    assert "per step" in "\n".join(text)


def test_the_call_of_an_upsampler_is_measured_as_a_step(cli: Cli, once: Once) -> None:
    folder = example(once, "LTXLatentUpsamplePipeline")
    frames = np.zeros((9, 32, 32, 3), np.uint8)
    video = folder.parent / "video.mp4"
    imageio.mimwrite(video, list(frames), fps=8, macro_block_size=1)
    asked = ("bench", "--weights", folder, "--video", video, "--size", "32x32")
    ran = cli.good(*asked, "--repeat", "1", "--against", "diffusers", "--json")
    steady = ran.json["backends"]["tpuport"]["steady"]
    assert steady["seconds_per_step"] == steady["stages"]["denoise"]
    text = list(bench._text(ran.json))
    assert text[0].startswith("LTXLatentUpsamplePipeline, 32x32, float32")


def test_only_diffusers_can_be_compared_with(cli: Cli) -> None:
    told = "--against 'other': only diffusers can be named"
    cli.refused(told, "bench", "--against", "other")
