"""Train the demo's transformer and text encoder, after the autoencoder.

``python -m training.demo.transformer --out runs/demo``
"""

from __future__ import annotations

import argparse
import random
from itertools import islice
from pathlib import Path

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline

from training.demo.loop import Drawn, Recipe, device, train
from training.demo.model import TOKENS, new_pipeline, tokens
from training.demo.shapes import SIDE, Scene, scenes
from training.demo.vae import as_input, fast_convolutions, videos

#: Scenes whose latents are made once and drawn from; their captions vary.
_SCENES = 4000
_BATCH = 16
#: Of all captions, those that training leaves out, for guidance.
_EMPTY = 0.1
#: More than the longest caption has.
_FEW = 32
_PRODUCTS = r".*\.(attn1|ff|SelfAttention|DenseReluDense)\..*[^s]\.weight"


def train_transformer(out: Path, steps: int) -> CogVideoXPipeline:
    """Write the whole pipeline to ``out/pipeline``, trained on random scenes."""
    torch.manual_seed(0)
    vae = AutoencoderKLCogVideoX.from_pretrained(out / "vae").to(device())
    pipe = new_pipeline(vae)
    pipe.text_encoder.to(device()).train()
    pipe.transformer.to(device()).train()
    known = list(islice(scenes(seed=3), _SCENES))
    latents = _latents(out / "latents.pt", vae, known).to(device())
    rotary = pipe._prepare_rotary_positional_embeddings(
        SIDE, SIDE, latents.shape[1], device()
    )

    def draw(step: int, generator: torch.Generator) -> Drawn:
        chosen = torch.randint(len(known), (_BATCH,), generator=generator)
        words = random.Random(int(torch.randint(2**31, (), generator=generator)))
        texts = [
            "" if words.random() < _EMPTY else known[n].caption(words) for n in chosen
        ]
        wanted = latents[chosen.to(latents.device)].float()
        times = torch.randint(1000, (_BATCH,), generator=generator).to(device())
        noise = torch.randn(wanted.shape, generator=generator).to(device())
        return {
            "noisy": pipe.scheduler.add_noise(wanted, noise, times),
            "target": pipe.scheduler.get_velocity(wanted, noise, times),
            "times": times,
            "ids": tokens(pipe, texts)[:, : _tokens(step)].to(device()),
        }

    def loss(
        noisy: torch.Tensor,
        target: torch.Tensor,
        times: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:
        made = pipe.transformer(
            hidden_states=noisy,
            encoder_hidden_states=pipe.text_encoder(ids)[0],
            timestep=times,
            image_rotary_emb=rotary,
            return_dict=False,
        )[0]
        return (made.float() - target).square().mean()

    recipe = Recipe(steps, rate=8e-4, half=True, products=_PRODUCTS)
    trained = [pipe.transformer, pipe.text_encoder]
    train(trained, draw, loss, recipe, out / "transformer.pt")
    pipe.transformer.eval()
    pipe.text_encoder.eval()
    for module in (*trained, vae):
        module.half()
    vae.register_to_config(_name_or_path="")  # which is of this machine
    pipe.save_pretrained(out / "pipeline")
    return pipe


def _tokens(step: int) -> int:
    """Text tokens of a step: mostly few, which take less time, at times all."""
    return TOKENS if step % 8 == 0 else _FEW


@torch.no_grad()
def _latents(
    file: Path, vae: AutoencoderKLCogVideoX, known: list[Scene]
) -> torch.Tensor:
    """Latents [scenes, frames, channels, height, width], made once and kept."""
    if file.exists():
        return torch.load(file, weights_only=True)
    parts = []
    for start in range(0, len(known), 1000):
        for some in videos(known[start : start + 1000]).split(20):
            mean = vae.encode(as_input(some)).latent_dist.mean
            parts.append(
                (mean * vae.config.scaling_factor).transpose(1, 2).half().cpu()
            )
    made = torch.cat(parts)
    torch.save(made, file)
    return made


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5000)
    given = parser.parse_args()
    if device().type == "cpu":
        fast_convolutions()
    else:
        torch.set_float32_matmul_precision("high")
    train_transformer(given.out, given.steps)


if __name__ == "__main__":
    main()
