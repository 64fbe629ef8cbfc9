"""Train the demo's transformer and text encoder, after the autoencoder.

``python -m training.demo.transformer --out runs/demo``
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline
from torch.nn import functional

from training.demo.loop import Drawn, Recipe, device, train
from training.demo.model import TOKENS, loaded, new_pipeline, tokens
from training.demo.shapes import SIDE, Scene, scenes
from training.demo.vae import encoded, fast_convolutions, videos

#: Scenes whose latents are made once and drawn from; their captions vary.
_SCENES = 6000
#: Motions that are learned last; their scenes are drawn twice as often.
_HARD = ("grow", "spin")
#: Of all captions, those that training leaves out, for guidance.
_EMPTY = 0.1
#: More than the longest caption has.
_FEW = 32
#: Videos that are encoded together.
_ENCODED = 20 if device().type == "cuda" else 1
#: How much more a shape counts than the background.
_SHAPES = 4
_PRODUCTS = r".*\.(attn1|ff|SelfAttention|DenseReluDense)\..*[^s]\.weight"


def train_transformer(
    out: Path, steps: int, begin: Path | None = None, seed: int = 3
) -> None:
    """Write the whole pipeline to ``out/pipeline``, trained on random scenes.

    Args:
        out: has the autoencoder in ``vae``, unless ``begin`` is given.
        steps: all of them, those of a run that is resumed too.
        begin: a pipeline to train on from, such as the one in the package.
        seed: of the scenes.
    """
    torch.manual_seed(0)
    if begin is None:
        vae = AutoencoderKLCogVideoX.from_pretrained(out / "vae")
        pipe = new_pipeline(vae)
    else:
        pipe = loaded(begin)
        vae = pipe.vae
    vae.to(device())
    pipe.text_encoder.to(device()).train()
    pipe.transformer.to(device()).train()
    known = list(islice(scenes(seed), _SCENES))
    latents = latents_of(vae, known, out / "latents.pt")
    hard = [n for n, scene in enumerate(known) if scene.moves_as(_HARD)]
    known += [known[n] for n in hard]
    made = Denoising(pipe, known, torch.cat([latents, latents[hard]]))
    recipe = Recipe(steps, rate=8e-4, mean=0.9995, half=True, products=_PRODUCTS)
    trained = [pipe.transformer, pipe.text_encoder]
    train(trained, made.draw, made.loss, recipe, out / "transformer.pt")
    for module in (*trained, vae):
        module.eval().half()
    vae.register_to_config(_name_or_path="")  # which is of this machine
    pipe.save_pretrained(out / "pipeline")


class Denoising:
    """What a step of training is given, and its loss.

    Attributes:
        pipe: its text encoder, transformer and scheduler are used.
        known: scenes.
        latents: of the scenes, [scenes, frames, channels, height, width].
        batch: videos of a step.
    """

    def __init__(
        self,
        pipe: CogVideoXPipeline,
        known: Sequence[Scene],
        latents: torch.Tensor,
        batch: int = 64,
    ) -> None:
        self.pipe, self.known, self.batch = pipe, known, batch
        self.latents = latents.to(device())
        self._rotary = pipe._prepare_rotary_positional_embeddings(
            SIDE, SIDE, latents.shape[1], device()
        )
        self._transformer = pipe.transformer
        if device().type == "cpu":
            self._transformer = torch.compile(pipe.transformer, dynamic=False)
            functional.scaled_dot_product_attention = plain_attention  # type: ignore[assignment]

    def draw(self, step: int, generator: torch.Generator) -> Drawn:
        """Noisy latents, and the ids of captions, some of them empty for guidance.

        Most steps have few text tokens; every eighth has all that a pipeline takes,
        and fewer videos.
        """
        whole = step % 8 == 0
        count = self.batch * 3 // 8 if whole else self.batch
        chosen = torch.randint(len(self.known), (count,), generator=generator)
        words = random.Random(int(torch.randint(2**31, (), generator=generator)))
        texts = [
            "" if words.random() < _EMPTY else self.known[n].caption(words)
            for n in chosen
        ]
        wanted = self.latents[chosen.to(self.latents.device)].float()
        times = torch.randint(1000, (count,), generator=generator).to(device())
        noise = torch.randn(wanted.shape, generator=generator).to(device())
        scheduler = self.pipe.scheduler
        ids = tokens(self.pipe, texts)[:, : TOKENS if whole else _FEW]
        return {
            "noisy": scheduler.add_noise(wanted, noise, times),
            "target": scheduler.get_velocity(wanted, noise, times),
            "times": times,
            "ids": ids.to(device()),
            "weights": _of_shapes(wanted),
        }

    def loss(
        self,
        noisy: torch.Tensor,
        target: torch.Tensor,
        times: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """The mean squared error of the velocity, by weights of places."""
        made = self._transformer(
            hidden_states=noisy,
            encoder_hidden_states=self.pipe.text_encoder(ids)[0],
            timestep=times,
            image_rotary_emb=self._rotary,
            return_dict=False,
        )[0]
        return ((made.float() - target).square() * weights).mean()


def _of_shapes(latents: torch.Tensor) -> torch.Tensor:
    """What places count in the loss [videos, frames, 1, height, width], 1 on average.

    Nine tenths of a video are its background, which is learned soon. A place counts up
    to ``1 + _SHAPES`` times, by how far it is from its frame's median.
    """
    middle = latents.flatten(3).median(-1).values[..., None, None]
    far = (latents - middle).square().sum(2, keepdim=True)
    counts = 1 + _SHAPES * far / (far + far.mean((1, 3, 4), keepdim=True))
    return counts / counts.mean()


def latents_of(
    vae: AutoencoderKLCogVideoX, known: Sequence[Scene], file: Path
) -> torch.Tensor:
    """Latents [scenes, frames, channels, height, width], made once and kept."""
    if file.exists():
        return torch.load(file, weights_only=True)
    parts = []
    for start in range(0, len(known), 1000):
        some = videos(known[start : start + 1000])
        # A CPU is twice as fast where a video fits into its caches.
        parts += [encoded(vae, few) for few in some.split(_ENCODED)]
    made = torch.cat(parts)
    torch.save(made, file)
    return made


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Torch's attention by two products; backwards, torch's own takes twice the time.

    Raises:
        ValueError: dropout, or a mask that is causal or of booleans, is asked for.
    """
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    if dropout_p or is_causal or boolean:
        raise ValueError("no dropout, no causal mask and no mask of booleans")
    given = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query * given @ key.transpose(-1, -2)
    if attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1).to(value.dtype) @ value


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--begin", type=Path, help="a pipeline to train on from")
    parser.add_argument("--seed", type=int, default=3, help="of the scenes")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if device().type == "cpu":
        fast_convolutions()
    else:
        torch.set_float32_matmul_precision("high")
    train_transformer(given.out, given.steps, given.begin, given.seed)


if __name__ == "__main__":
    main()
