"""Train the demo's autoencoder: ``python -m training.demo.vae --out runs/demo``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLCogVideoX
from diffusers.models.autoencoders import autoencoder_kl_cogvideox
from torch.nn import functional

from training.demo.loop import Drawn, Recipe, device, train
from training.demo.model import CHANNELS, new_vae
from training.demo.shapes import SIDE, Scene, scenes

#: Scenes that are kept in memory, and drawn from.
_SCENES = 2000
_BATCH = 8
_CROP, _FRAMES = 32, 9
#: Of all steps, those at the end that see whole videos.
_WHOLE = 0.05
_KL = 5e-3


def videos(of: Iterable[Scene]) -> torch.Tensor:
    """Bytes [count, 3, FRAMES, SIDE, SIDE] of scenes, drawn on all cores."""
    with ProcessPoolExecutor() as pool:
        frames = np.stack(list(pool.map(Scene.video, of, chunksize=16)))
    return torch.from_numpy(frames).permute(0, 4, 1, 2, 3)


def as_input(video: torch.Tensor) -> torch.Tensor:
    """Bytes as what the autoencoder takes: float32 of -1 to 1, on the device."""
    return video.to(device()).float() / 127.5 - 1


def train_vae(out: Path, steps: int) -> None:
    """Write ``out/vae``, trained on random scenes."""
    torch.manual_seed(0)
    seen = videos(islice(scenes(seed=1), _SCENES))
    vae = new_vae()
    with torch.no_grad():  # little noise at first
        vae.encoder.conv_out.conv.weight[CHANNELS:] = 0
        vae.encoder.conv_out.conv.bias[CHANNELS:] = -4
    vae.to(device())

    def draw(step: int, generator: torch.Generator) -> Drawn:
        whole = step >= (1 - _WHOLE) * steps
        count = 2 if whole else _BATCH
        chosen = torch.randint(len(seen), (count,), generator=generator)
        parts = [seen[n] if whole else _crop(seen[n], generator) for n in chosen]
        video = as_input(torch.stack(parts))
        frames, height, width = video.shape[2:]
        latents = (count, CHANNELS, 1 + frames // 4, height // 8, width // 8)
        return {
            "video": video,
            "noise": torch.randn(latents, generator=generator).to(device()),
        }

    def loss(video: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        spread = vae.encode(video).latent_dist
        made = vae.decode(spread.mean + spread.std * noise).sample
        difference = made - video
        exact = difference.abs().mean() + difference.square().mean()
        mean, log = spread.mean, spread.logvar
        normal = 0.5 * (mean.square() + log.exp() - 1 - log).mean()
        return exact + _KL * normal

    recipe = Recipe(steps, rate=3e-3)
    train([vae], draw, loss, recipe, out / "vae.pt")
    vae.eval()
    _scale(vae, seen[:64])
    vae.save_pretrained(out / "vae")
    print(
        f"PSNR {quality(vae, videos(islice(scenes(seed=2), 32))):.2f} dB on new scenes",
        flush=True,
    )


def _crop(video: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Some frames of a part [3, _FRAMES, _CROP, _CROP] in which a shape is."""

    def number(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    first = number(video.shape[1] - _FRAMES + 1)
    frame = video[:, first + number(_FRAMES)].int()
    rows, columns = ((frame - frame[:, :1, :1]).abs().amax(0) > 40).nonzero().unbind(1)
    one = number(len(rows))
    top, left = (
        min(max(int(at[one]) - number(_CROP), 0), SIDE - _CROP)
        for at in (rows, columns)
    )
    return video[:, first : first + _FRAMES, top : top + _CROP, left : left + _CROP]


@torch.no_grad()
def _scale(vae: AutoencoderKLCogVideoX, seen: torch.Tensor) -> None:
    """Have the config say by what latents are multiplied to vary by one."""
    latents = torch.cat(
        [vae.encode(as_input(one)).latent_dist.mean for one in seen.split(8)]
    )
    spread = latents.std((0, 2, 3, 4))
    print("latents vary by", [round(value, 2) for value in spread.tolist()])
    vae.register_to_config(scaling_factor=1 / float(latents.std()))


@torch.no_grad()
def quality(vae: AutoencoderKLCogVideoX, given: torch.Tensor) -> float:
    """PSNR in dB of videos that go through the autoencoder."""
    errors = []
    for one in given.split(8):
        video = as_input(one)
        made = vae.decode(vae.encode(video).latent_dist.mean).sample.clamp(-1, 1)
        errors.append((made - video).square().mean((1, 2, 3, 4)))
    return float(10 * torch.log10(4 / torch.cat(errors)).mean())


def fast_convolutions() -> None:
    """Sum three convolutions of frames where torch would convolve a video.

    On two cores torch's three-dimensional convolution takes six times as long.
    """

    def forward(self: torch.nn.Conv3d, video: torch.Tensor) -> torch.Tensor:
        batch, channels, frames, height, width = video.shape
        depth = self.kernel_size[0]
        count = frames - depth + 1
        by_frame = video.transpose(1, 2)
        total: torch.Tensor | None = None
        for n in range(depth):
            part = functional.conv2d(
                by_frame[:, n : n + count].reshape(-1, channels, height, width),
                self.weight[:, :, n],
                self.bias if n == 0 else None,
                self.stride[1:],
                self.padding[1:],
            )
            total = part if total is None else total + part
        assert total is not None
        return total.unflatten(0, (batch, count)).transpose(1, 2)

    autoencoder_kl_cogvideox.CogVideoXSafeConv3d.forward = forward


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8000)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if device().type == "cpu":
        fast_convolutions()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.benchmark_limit = 4
    train_vae(given.out, given.steps)


if __name__ == "__main__":
    main()
