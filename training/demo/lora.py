"""Teach the demo a new colour by a LoRA of its transformer.

``python -m training.demo.lora tpuport/models/cogvideox/demo --out runs/olive``
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
from diffusers import CogVideoXPipeline
from peft import LoraConfig, get_peft_model_state_dict
from torch import nn

from training.demo.loop import Recipe, device, train
from training.demo.model import loaded
from training.demo.shapes import COLOURS, NEW_COLOURS, scenes
from training.demo.transformer import Denoising, latents_of
from training.demo.vae import fast_convolutions

_SCENES = 400
_LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]


def train_lora(folder: Path, out: Path, steps: int) -> None:
    """Write ``out/pytorch_lora_weights.safetensors`` for the pipeline of a folder."""
    torch.manual_seed(0)
    pipe = loaded(folder).to(device())
    for module in (pipe.vae, pipe.text_encoder, pipe.transformer):
        module.requires_grad_(False)
    pipe.transformer.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=_LAYERS))
    factors = [p for p in pipe.transformer.parameters() if p.requires_grad]
    # A quarter of the scenes have colours that the model knows, which stay.
    colours = [*COLOURS, *[*NEW_COLOURS] * (3 * len(COLOURS))]
    known = list(islice(scenes(seed=4, two=0, colours=colours), _SCENES))
    latents = latents_of(pipe.vae, known, out / "latents.pt")
    made = Denoising(pipe, known, latents, batch=32)
    recipe = Recipe(steps, rate=5e-3, warmup=20, mean=0.98, half=True)
    trained = [nn.ParameterList(factors)]
    train(trained, made.draw, made.loss, recipe, out / "lora.pt")
    found = get_peft_model_state_dict(pipe.transformer)
    CogVideoXPipeline.save_lora_weights(
        out, {name: factor.half() for name, factor in found.items()}
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1800)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if device().type == "cpu":
        fast_convolutions()
    train_lora(given.folder, given.out, given.steps)


if __name__ == "__main__":
    main()
