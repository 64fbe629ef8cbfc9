"""A pipeline whose plugin splits the autoencoder in space, compiled ahead and run."""

from __future__ import annotations

import shutil
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch

import tpuport
from tests.cli.tools import Cli
from tests.core.heard import Heard
from tests.pipelines.example import all_examples, made, run, saved
from tpuport import targets
from tpuport.plugin import ModelPlugin, Module

PLUGIN = ModelPlugin(
    "trial",
    "diffusers:CogVideoXPipeline",
    modules={"vae": Module(split="space")},
    patches="tpuport.models.cogvideox.patches:PATCHES",
)


def test_what_is_compiled_ahead_runs_and_is_upstreams(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 10 s: every program of a pipeline is compiled once, and the pipeline runs
    twice.
    """
    monkeypatch.setattr(targets, "plugin_for", lambda pipeline: PLUGIN)
    folder = saved(made(all_examples()["CogVideoXPipeline"])[0], tmp_path / "cog")
    bare = Path(shutil.copytree(folder, tmp_path / "bare"))
    for file in bare.rglob("*.safetensors"):
        file.unlink()
    asked = ("--prompt", "a fox", "--size", "32x16", "--frames", "17", "--steps", "1")
    compiled = cli.good(
        *("compile", "--weights", bare, *asked, "--mesh", "sp=2"),
        *("--option", "max_sequence_length=16", "--out", "built", "--json"),
    )
    pipe = diffusers.CogVideoXPipeline.from_pretrained(folder)
    call = {
        "prompt": "a fox",
        "height": 16,
        "width": 32,
        "num_frames": 17,
        "num_inference_steps": 1,
        "max_sequence_length": 16,
    }
    (expected,) = run(pipe, call)
    told = Heard()
    with tpuport.ported(pipe, mesh="sp=2", executables="built", reporter=told):
        (found,) = run(pipe, call)
    assert np.abs(found - expected).max() < 1e-4
    assert {(one.stage, one.program) for one in told.reports} >= {("vae", "decoder")}
    assert [one.loaded for one in told.reports] == [True] * len(
        compiled.json["programs"]
    )
    assert torch.is_tensor(pipe.vae.decoder.conv_in.conv.weight)
