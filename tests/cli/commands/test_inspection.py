"""Memory, a trace, ops one by one, and frames that are written as they are made."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import tpuport
from tests.cli.tools import SMALL, Cli
from tests.tolerances import TOLERANCES
from tpuport.core.files.frames import FrameChecks, to_uint8
from tpuport.core.run.frame_delivery import Delivery
from tpuport.errors import VideoError


def test_denoise_op_by_op_gives_the_same_latents(cli: Cli, run: Path) -> None:
    before = load_file(run / "latents.safetensors")["latents"]
    ran = cli("denoise", "--run-dir", run, "--no-jit", "--memory-report", "--json")
    assert ran.code == 0, ran.err
    again = load_file(run / "latents.safetensors")["latents"]
    assert (again - before).abs().max() <= TOLERANCES["video float32"]
    assert "denoise runs op by op (--no-jit): nothing is compiled" in ran.err
    assert "compiling" not in ran.err
    (stage,) = ran.json["report"]["stages"]
    assert stage["op_by_op"] is True
    assert stage["compiles"] == []
    # On a CPU nobody counts, and what is not compiled has no plan: that is told.
    assert [call["source"] for call in stage["memory"]] == ["unknown"] * 4
    assert "unknown: this backend keeps no count" in ran.err
    # `generate` does not take it for what a compiled run leaves.
    args = ("--prompt", "a panda", "--prompt", "a fox", "--seed", "7", *SMALL)
    ran = cli(
        *("generate", *args, "--negative-prompt", "blurry", "--run-dir", run),
        *("--out", "v.mp4", "--json"),
    )
    assert ran.code == 0, ran.err
    assert "denoise: was finished with no_jit True, now False" in ran.err
    assert ran.json["reused"] == ["encode"]


def test_what_was_gathered_is_told_where_a_stage_fails(
    cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stage gets as far as its first frames.
    def broken(*args: Any) -> int:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Delivery, "take", broken)
    ran = cli("decode", "--run-dir", run, "--memory-report")
    assert ran.code == 1
    lines = ran.err.splitlines()
    place = next(i for i, x in enumerate(lines) if "the disk is gone" in x)
    assert lines[place + 1] == "memory until then:"
    assert lines[place + 2].split()[:2] == ["stage", "call"]
    assert lines[place + 3].split()[:3] == ["decode", "chunk", "1"]
    assert lines[place + 4].lstrip().startswith("planned: ")


def test_decode_tells_its_memory_and_is_profiled(
    cli: Cli, run: Path, tmp_path: Path
) -> None:
    ran = cli(
        *("decode", "--run-dir", run, "--memory-report", "--profile", "trace"),
        *("--profile-calls", "1", "--json"),
    )
    assert ran.code == 0, ran.err
    (stage,) = ran.json["report"]["stages"]
    # Two videos of one chunk each: the second is steady.
    assert [call["call"] for call in stage["memory"]] == [0, 1]
    assert {call["source"] for call in stage["memory"]} == {"planned"}
    lines = ran.err.splitlines()
    rows = [line.split() for line in lines]
    (row,) = [row for row in rows if row[:2] == ["decode", "chunk"]]
    assert row[2] == "1-2"
    device = stage["memory"][0]["devices"][0]
    assert f"{device['peak'] / 2**20:.1f} MiB" in " ".join(row)
    assert row[-1] == "planned"
    assert any(line.startswith("  planned: the compiler's") for line in lines)
    assert stage["profile"] == {"folder": "trace/decode", "calls": 1}
    assert "decode: profiled 1 steady call in trace/decode" in ran.err
    (file,) = [
        path
        for path in Path("trace").rglob("*.trace.json.gz")
        if path.name != "perfetto_trace.json.gz"
    ]
    names = {
        str(event.get("name"))
        for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    }
    assert any(name.startswith("decode_") for name in names)
    assert not any("compile" in name.lower() for name in names)


def test_upstreams_code_is_not_said_to_be_looked_at(cli: Cli, run: Path) -> None:
    ran = cli(
        *("decode", "--run-dir", run, "--backend", "diffusers", "--memory-report"),
        *("--profile", "trace", "--no-jit"),
    )
    assert ran.code == 0, ran.err
    runs = "decode runs upstream's code"
    assert f"{runs}: --memory-report has nothing on it" in ran.err
    assert f"{runs}: it is not profiled" in ran.err
    assert f"{runs}, op by op as ever: --no-jit changes nothing" in ran.err
    assert not Path("trace").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--profile-calls", "2"), "--profile-calls goes with --profile only"),
        (("--profile", "file/deep"), "--profile file/deep: "),
        (("--profile", "."), "--profile .: holds file, which is no profile of a sta"),
        (("--no-jit-stage", "decod"), "--no-jit-stage: 'decod' is none of encode, "),
        (("--profile", "p", "--profile-calls", "0"), "--profile-calls: 0 is not posit"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    cli: Cli, args: tuple[str, ...], said: str
) -> None:
    Path("file").touch()
    ran = cli("generate", "--prompt", "a panda", *SMALL, *args)
    assert ran.code == 2
    assert said in ran.err
    assert "encode: " not in ran.err


# --- frames


def test_frames_are_written_as_they_are_made(
    cli: Cli, run: Path, cache: Path, tmp_path: Path
) -> None:
    """What is in the files are the bytes of the float video of the Python API."""
    import imageio.v3 as iio

    ran = cli("decode", "--run-dir", run, "--out", "frames/")
    assert ran.code == 0, ran.err
    assert [line for line in ran.err.splitlines() if " 18 frames in " in line]
    written = [
        np.stack([iio.imread(file) for file in sorted(folder.glob("*.png"))])
        for folder in sorted(p for p in Path("frames").iterdir() if p.is_dir())
    ]
    latents = load_file(run / "latents.safetensors")
    with tpuport.load("cogvideox", cache_dir=cache) as session:
        request = session.request(
            prompt=["a panda", "a fox"], seed=7, height=64, width=96, num_frames=9,
            batched=False,
        )  # fmt: skip
        made, _ = session.run_stage("decode", request, latents)
    assert made["frames"].dtype == np.float32
    assert np.array_equal(np.stack(written), to_uint8(made["frames"]))


@pytest.mark.parametrize("out", ["v.mp4", "v.gif", "frames/"])
def test_a_video_that_is_refused_gets_no_name(
    cli: Cli, run: Path, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(self: FrameChecks) -> None:
        # All frames of both videos have gone to the encoders by now.
        assert [self._videos[video].frames for video in (0, 1)] == [9, 9]
        raise VideoError("video 1: all 9 frames are black")

    monkeypatch.setattr(FrameChecks, "check", check)
    ran = cli("decode", "--run-dir", run, "--out", out)
    assert ran.code == 1
    assert "video 1: all 9 frames are black" in ran.err
    left = [path for path in Path().rglob("*") if run.name not in path.parts]
    assert left in ([], [Path("frames")])
    assert not [path for path in left if path.is_dir() and os.listdir(path)]


@pytest.mark.parametrize("command", ["generate", "encode", "denoise", "decode"])
def test_every_stage_can_be_looked_into(cli: Cli, command: str) -> None:
    said = cli(command, "--help").out
    flags = ["--memory-report", "--profile", "--profile-calls", "--no-jit"]
    assert [flag for flag in flags if flag not in said] == []
    # One stage of several is for the command that runs several.
    assert ("--no-jit-stage" in said) == (command == "generate")
