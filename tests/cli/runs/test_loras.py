"""``--lora``: in the video, in the sidecar, and in the runs that go on."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.runs.test_video_run import CALL, drawn, pixels, upstreams
from tests.cli.tools import ASKED, UPSTREAM, Cli, example
from tests.core.pipelines.lora_files import lora_for, written
from tests.processes import Once
from tpuport.core.files.sealed_json import read_sidecar


@pytest.fixture
def lora(cli: Cli, folder: Path) -> Path:
    """A LoRA for all attention of the small pipeline."""
    return write_lora(folder, seed=1)


def write_lora(folder: Path, seed: int) -> Path:
    tensors = lora_for(upstreams(folder), seed=seed)
    return written(tensors, Path("fox.safetensors").absolute(), "transformer.")


def test_a_lora_makes_upstreams_video_and_no_new_program(
    cli: Cli, folder: Path, lora: Path
) -> None:
    """From YAML, of two files and scales: the programs are those without a LoRA."""
    hosts = ("--on-host", "text_encoder", "--on-host", "vae", "--guidance", "1")
    asked = ("generate", "--weights", folder, *ASKED, *hosts, "--json")
    cli.good(*asked, "--out", "plain/")
    Path("run.yaml").write_text(f"lora: ['{lora}:0.5', '{lora.parent}:0.25']\n")
    ran = cli.good(*asked, "--config", "run.yaml", "--out", "fused/").json
    made = [p for stage in ran["report"]["stages"] for p in stage["compiles"]]
    assert made
    assert all(program["cached"] for program in made)
    upstream = upstreams(folder)
    upstream.load_lora_weights(str(lora))
    upstream.fuse_lora(lora_scale=0.75)
    given = {**CALL, "guidance_scale": 1.0}
    frames = upstream(**given, generator=drawn(0)).frames[0]
    assert np.abs(pixels("fused") - np.rint(frames * 255)).max() <= 1
    assert np.abs(pixels("fused") - pixels("plain")).max() > 1


#: What LoRAs of few steps are for, and the scheduler that they need. Values differ from
#: those of the small pipelines.
FEW_STEPS = {
    "WanPipeline": (
        ("transformer",),
        "UniPCMultistepScheduler",
        {
            "use_flow_sigmas": True,
            "prediction_type": "flow_prediction",
            "flow_shift": 5.0,
        },
    ),
    "AnimateDiffPipeline": (
        ("unet", "text_encoder"),
        "LCMScheduler",
        {"beta_schedule": "scaled_linear"},
    ),
}


@pytest.mark.parametrize("name", FEW_STEPS)
def test_a_lora_of_few_steps_makes_upstreams_video(
    cli: Cli, once: Once, name: str
) -> None:
    """Four steps without guidance, from the prompt; over 10 s, of two pipelines.

    Also: a text encoder whose weights wait in their file has its LoRA.
    """
    folder = example(once, name)
    components, scheduler, values = FEW_STEPS[name]
    pipeline = upstreams(folder)
    tensors = {}
    torch.manual_seed(1)
    for component in components:
        for path, layer in getattr(pipeline, component).named_modules():
            if path.endswith(("to_q", "to_v", "q_proj", "fc1")):
                key, (rows, columns) = f"{component}.{path}", layer.weight.shape
                size = 3.0 if component == "text_encoder" else 0.3  # so that it shows
                tensors[f"{key}.lora_A.weight"] = torch.randn(2, columns) * size
                tensors[f"{key}.lora_B.weight"] = torch.randn(rows, 2) * size
    save_file(tensors, "few.safetensors")
    told = ",".join(f"{key}={value}" for key, value in values.items())
    asked = ("generate", "--weights", folder, "--prompt", "a fox runs", "--lora")
    cli.good(
        *(*asked, "few.safetensors:0.5", "--steps", "4", "--guidance", "1"),
        *("--size", "32x32", "--frames", "5", "-o", f"scheduler={scheduler}:{told}"),
        *("--seed", "7", "--out", "few/"),
    )

    def frames() -> np.ndarray:
        made = pipeline(
            prompt="a fox runs",
            height=32,
            width=32,
            num_frames=5,
            num_inference_steps=4,
            guidance_scale=1.0,
            generator=drawn(7),
            output_type="np",
        ).frames[0]
        return np.rint(made * 255)

    kind = getattr(diffusers, scheduler)
    pipeline.scheduler = kind.from_config(pipeline.scheduler.config, **values)
    plain = frames()
    pipeline.load_lora_weights("few.safetensors")
    pipeline.fuse_lora(components=[*components], lora_scale=0.5)
    assert np.abs(pixels("few") - frames()).max() <= 1
    assert np.abs(pixels("few") - plain).max() > 3


def test_a_replay_fuses_the_recorded_file(cli: Cli, folder: Path, lora: Path) -> None:
    asked = ("generate", "--weights", folder, *UPSTREAM, "--lora", f"{lora}:0.5")
    cli.good(*asked, "--out", "fox.gif")
    digest = hashlib.sha256(lora.read_bytes()).hexdigest()
    recorded: dict[str, Any] = read_sidecar(Path("fox.gif.json"))
    assert recorded["weights"]["loras"] == [
        {"source": str(lora), "scale": 0.5, "component": "", "sha256": digest}
    ]
    assert "the same frames as" in cli.good("replay", "fox.gif").last
    moved = lora.rename("elsewhere.safetensors")
    cli.refused(f"LoRA {lora} does not exist", "replay", "fox.gif")
    cli.good("replay", "fox.gif", "--lora", f"{moved}:0.5")
    told = "recorded scale 0.5, found 1.0"
    cli.refused(told, "replay", "fox.gif", "--lora", moved, code=1)
    write_lora(folder, seed=2)
    ran = cli.refused("is not what fox.gif.json was made", "replay", "fox.gif", code=1)
    assert "loading" not in ran.err


def test_a_replay_reads_what_peft_has_beside_the_file(
    cli: Cli, folder: Path, lora: Path
) -> None:
    """Alpha is there, so another one is another LoRA."""
    tensors = {
        key.replace("transformer.", "base_model.model.", 1): tensor
        for key, tensor in load_file(lora).items()
    }
    save_file(tensors, "adapter_model.safetensors")
    settings = Path("adapter_config.json")
    settings.write_text('{"peft_type": "LORA", "lora_alpha": 1}')  # of rank 2
    asked = ("generate", "--weights", folder, *UPSTREAM, "--lora")
    cli.good(*asked, f"{lora}:0.5", "--out", "one.gif")
    cli.good(*asked, "adapter_model.safetensors", "--out", "two.gif")
    assert Path("one.gif").read_bytes() == Path("two.gif").read_bytes()
    cli.good("encode", *asked[1:], "adapter_model.safetensors", "--run-dir", "run")
    assert "the same frames as" in cli.good("replay", "two.gif").last
    settings.write_text('{"peft_type": "LORA", "lora_alpha": 2}')
    cli.refused("(recorded settings_sha256", "replay", "two.gif", code=1)
    plain = ("--backend", "diffusers", "--run-dir", "run")
    cli.refused("weights.lora 1 is", "denoise", *plain, code=1)


def test_stages_fuse_the_same_lora(cli: Cli, folder: Path, lora: Path) -> None:
    asked = ("--weights", folder, *UPSTREAM, "--lora", f"{lora}:0.5")
    plain = ("--backend", "diffusers", "--run-dir", "run")
    cli.good("generate", *asked, "--out", "one.gif")
    cli.good("encode", *asked, "--run-dir", "run")
    good = lora.read_bytes()
    write_lora(folder, seed=2)
    cli.refused("weights.lora 1 is", "denoise", *plain, code=1)
    moved = Path("elsewhere.safetensors")
    moved.write_bytes(good)
    cli.good("denoise", *plain, "--lora", f"{moved}:0.5")
    lora.write_bytes(good)
    cli.good("decode", *plain, "--out", "two.gif")
    assert Path("one.gif").read_bytes() == Path("two.gif").read_bytes()


def test_what_cannot_be_is_refused_before_weights_are_read(
    cli: Cli, folder: Path, lora: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"nowhere.lora_A.weight": torch.ones(2, 2)}, "wrong.safetensors")
    asked = ("generate", "--weights", folder, *UPSTREAM, "--lora")
    for name, said in (
        (
            "wrong.safetensors",
            "of 1 key, 1 fit no weight of WanPipeline: nowhere.lora_A",
        ),
        ("none.safetensors", "LoRA none.safetensors does not exist"),
        (f"{lora}:much", "'much' is neither a scale nor a component"),
        ("a:b:c", "is no LoRA with a scale"),
        (f"{lora}:1e400", "is not a finite number"),
    ):
        assert "loading" not in cli.refused(said, *asked, name).err
    find = importlib.util.find_spec
    monkeypatch.setattr(
        *(importlib.util, "find_spec"),
        lambda name, *more: None if name == "peft" else find(name, *more),
    )
    cli.refused("pip install 'tpuport[lora]'", *asked, lora)
