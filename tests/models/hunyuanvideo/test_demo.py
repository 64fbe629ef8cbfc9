"""The demo checkpoints of HunyuanVideo: upstream's own pipelines load and run them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.processes import run_python
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.models.hunyuanvideo import demo, encoders, inputs, published

MAKERS = {"1.5": demo.make_demo, "13b": demo.make_demo_13b}
CONFIGS = {"1.5": published.CONFIGS["demo-1.5"], "13b": published.CONFIGS["demo-13b"]}


@pytest.fixture(scope="module")
def folders(hunyuanvideo_folders: dict[str, Path]) -> dict[str, Path]:
    """The folder of each demo checkpoint."""
    return hunyuanvideo_folders


def assert_a_video(frames: np.ndarray, size: tuple[int, int]) -> None:
    assert frames.shape == (1, 5, *size, 3)
    assert np.isfinite(frames).all()
    assert frames.std() > 0.02  # neither black nor one colour


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_both_upstream_pipelines_of_15_run_it(
    folders: dict[str, Path], task: str
) -> None:
    from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
    from PIL import Image

    given: dict[str, Any] = {
        "prompt": 'a red fox holds a sign "HELLO"',
        "num_frames": 5,
        "num_inference_steps": 2,
        "generator": torch.Generator().manual_seed(0),
    }
    if task == "t2v":
        pipe = HunyuanVideo15Pipeline.from_pretrained(folders["1.5"])
        given |= {"height": 64, "width": 96}
        size = (64, 96)
    else:
        pipe = HunyuanVideo15ImageToVideoPipeline.from_pretrained(folders["1.5"])
        pixels = np.random.RandomState(0).randint(0, 255, (64, 160, 3), dtype=np.uint8)
        given |= {"image": Image.fromarray(pixels)}
        # The bucket of the area 128 x 128 that is closest to the image's proportions.
        size = (80, 192)
    assert pipe.guider.guidance_scale == 6.0
    assert pipe.scheduler.config.shift == 5.0
    pipe.set_progress_bar_config(disable=True)
    assert_a_video(pipe(**given).frames, size)


def test_the_upstream_pipeline_of_13b_runs_it(folders: dict[str, Path]) -> None:
    from diffusers import HunyuanVideoPipeline

    checkpoint = Checkpoint(folders["13b"], "demo")
    pipe = HunyuanVideoPipeline.from_pretrained(
        folders["13b"],
        tokenizer=inputs.load_tokenizer(checkpoint, "tokenizer", "LlamaTokenizerFast"),
    )
    assert pipe.scheduler.config.shift == 7.0
    pipe.set_progress_bar_config(disable=True)
    frames = pipe(
        prompt="a red fox runs in the forest",
        height=64,
        width=96,
        num_frames=5,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).frames
    assert_a_video(frames, (64, 96))


def test_upstreams_crop_ends_where_the_prompt_starts(folders: dict[str, Path]) -> None:
    prompt = "a red fox runs"
    qwen = inputs.load_tokenizer(
        Checkpoint(folders["1.5"], "demo"), "tokenizer", "Qwen2Tokenizer"
    )
    ids, mask = inputs.chat_ids(qwen, [prompt])
    start = inputs.chat_template().crop_start
    assert qwen.decode(ids[0, :start]).endswith("<|im_end|>\n<|im_start|>user\n")
    assert qwen.decode(ids[0, start:][mask[0, start:].bool()]) == (
        f"{prompt}<|im_end|>\n<|im_start|>assistant\n"
    )
    llama = inputs.load_tokenizer(
        Checkpoint(folders["13b"], "demo"), "tokenizer", "LlamaTokenizerFast"
    )
    ids, mask = inputs.llama_ids(llama, [prompt])
    start = inputs.llama_crop()
    assert llama.decode(ids[0, :start]).endswith("user<|end_header_id|>\n\n")
    valid = ids[0, start:][mask[0, start:].bool()]
    assert llama.decode(valid) == f"{prompt}<|eot_id|>"


def test_llamas_own_class_still_drops_the_spaces(folders: dict[str, Path]) -> None:
    # Why load_tokenizer takes another class. When this fails, transformers has mended
    # it, and the exception in load_tokenizer can go.
    from transformers import LlamaTokenizerFast

    wrong = LlamaTokenizerFast.from_pretrained(folders["13b"] / "tokenizer")
    assert wrong.decode(wrong("a red fox").input_ids[1:]) == "aredfox"


@pytest.mark.parametrize("name", MAKERS)
def test_configs_are_those_on_disk(folders: dict[str, Path], name: str) -> None:
    index = json.loads((folders[name] / "model_index.json").read_text())
    for component, config in CONFIGS[name].items():
        stored = json.loads((folders[name] / component / "config.json").read_text())
        for key, value in config.items():
            if key == "rope_parameters":
                assert value.items() <= stored[key].items()
            else:
                assert stored[key] == value, (component, key)
        assert index[component][1] in (
            stored.get("_class_name"),
            *stored.get("architectures", ()),
        )


@pytest.mark.parametrize("name", MAKERS)
def test_widths_fit_together(name: str) -> None:
    configs = CONFIGS[name]
    transformer, text = configs["transformer"], configs["text_encoder"]
    assert transformer["text_embed_dim"] == text["hidden_size"]
    assert sum(transformer["rope_axes_dim"]) == transformer["attention_head_dim"]
    assert transformer["num_attention_heads"] % 8 == 0
    latents = configs["vae"]["latent_channels"]
    second = configs["text_encoder_2"]
    if name == "1.5":
        assert transformer["in_channels"] == 2 * latents + 1
        assert transformer["text_embed_2_dim"] == second["d_model"]
        image = configs["image_encoder"]["hidden_size"]
        assert transformer["image_embed_dim"] == image
    else:
        assert transformer["in_channels"] == latents
        assert transformer["pooled_projection_dim"] == second["hidden_size"]


@pytest.mark.parametrize(
    ("name", "component", "class_name"),
    [
        ("1.5", "image_encoder", "SiglipVisionModel"),
        ("13b", "text_encoder_2", "CLIPTextModel"),
    ],
    ids=["siglip", "clip"],
)
def test_weights_have_their_published_names(
    folders: dict[str, Path], name: str, component: str, class_name: str
) -> None:
    path = folders[name] / component / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
    prefix = encoders.STORED_PREFIXES[class_name]
    assert names
    assert all(n.startswith(prefix) for n in names)


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_another_process_makes_the_same_files(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    # Training a vocabulary walks hash tables, which another process orders otherwise.
    code = (
        "import sys, pathlib, torch; torch.rand(3);"
        "from tpuport.models.hunyuanvideo import demo;"
        "demo.make_demo(pathlib.Path(sys.argv[1]) / '1.5');"
        "demo.make_demo_13b(pathlib.Path(sys.argv[1]) / '13b')"
    )
    done = run_python(["-c", code, str(tmp_path)], environment=os.environ)
    assert done.returncode == 0, done.stderr
    for name in MAKERS:
        assert _digests(tmp_path / name) == _digests(folders[name])


def test_making_it_leaves_the_generator_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    demo.make_demo_13b(tmp_path)
    assert torch.equal(before, torch.get_rng_state())
