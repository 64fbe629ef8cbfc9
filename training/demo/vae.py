"""Train the demo's autoencoder: ``python -m training.demo.vae --out runs/demo``."""

from __future__ import annotations

import argparse
import re
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
from training.demo.model import CHANNELS, WIDE, new_vae
from training.demo.shapes import SIDE, Scene, scenes

#: Scenes that are kept in memory, and drawn from.
_SCENES = 2000
_BATCH = 8
_CROP, _FRAMES = 32, 9
#: Of all steps, those at the end that see whole videos.
_WHOLE = 0.05
_KL = 1e-4
#: Scenes whose latents tell the main components.
_MEASURED = 400
#: Of a component's deviation, the power that is divided away.
_EVENED = 0.7
#: The logarithm of the variance that latents of an encoder have.
_LITTLE = -6.0


def videos(of: Iterable[Scene]) -> torch.Tensor:
    """Bytes [count, 3, FRAMES, SIDE, SIDE] of scenes, drawn on all cores."""
    with ProcessPoolExecutor() as pool:
        frames = np.stack(list(pool.map(Scene.video, of, chunksize=16)))
    return torch.from_numpy(frames).permute(0, 4, 1, 2, 3)


def as_input(video: torch.Tensor) -> torch.Tensor:
    """Bytes as what the autoencoder takes: float32 of -1 to 1, on the device."""
    return video.to(device()).float() / 127.5 - 1


def train_vae(out: Path, steps: int) -> None:
    """Write ``out/wide``, trained on random scenes, and ``out/vae``: its main channels.

    The decoder of the main channels is trained for a quarter of the steps more.
    """
    torch.manual_seed(0)
    seen = videos(islice(scenes(seed=1), _SCENES))
    wide = new_vae(WIDE)
    with torch.no_grad():  # little noise at first
        wide.encoder.conv_out.conv.weight[WIDE:] = 0
        wide.encoder.conv_out.conv.bias[WIDE:] = -4
    _train(wide.to(device()), wide, seen, steps, out / "wide.pt")
    wide.eval().save_pretrained(out / "wide")
    latents = [encoded(wide, some) for some in seen[:_MEASURED].split(_BATCH)]
    vae = main_channels(wide, torch.cat(latents).float()).to(device())
    _train(vae, vae.decoder, seen, steps // 4, out / "decoder.pt")
    vae.save_pretrained(out / "vae")
    new = videos(islice(scenes(seed=2), 32))
    qualities = [f"{quality(one, new):.2f} dB" for one in (wide, vae)]
    print("PSNR on new scenes", ", in main channels ".join(qualities), flush=True)


def _train(
    vae: AutoencoderKLCogVideoX,
    trained: torch.nn.Module,
    seen: torch.Tensor,
    steps: int,
    checkpoint: Path,
) -> None:
    channels = vae.config.latent_channels

    def draw(step: int, generator: torch.Generator) -> Drawn:
        whole = step >= (1 - _WHOLE) * steps
        count = 2 if whole else _BATCH
        chosen = torch.randint(len(seen), (count,), generator=generator)
        parts = [seen[n] if whole else _crop(seen[n], generator) for n in chosen]
        video = as_input(torch.stack(parts))
        frames, height, width = video.shape[2:]
        latents = (count, channels, 1 + frames // 4, height // 8, width // 8)
        return {
            "video": video,
            "noise": torch.randn(latents, generator=generator).to(device()),
        }

    def loss(video: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        spread = vae.encode(video).latent_dist
        made = vae.decode(spread.mean + spread.std * noise).sample
        mean, log = spread.mean, spread.logvar
        normal = 0.5 * (mean.square() + log.exp() - 1 - log).mean()
        return _apart(made, video) + _KL * normal

    vae.requires_grad_(False)
    trained.requires_grad_(True)
    train([trained], draw, loss, Recipe(steps, rate=3e-3), checkpoint)
    vae.eval()


def _apart(made: torch.Tensor, video: torch.Tensor) -> torch.Tensor:
    difference = made - video
    return difference.abs().mean() + difference.square().mean()


@torch.no_grad()
def encoded(vae: AutoencoderKLCogVideoX, video: torch.Tensor) -> torch.Tensor:
    """Latents [count, frames, channels, height, width] of bytes, in float16."""
    with torch.autocast("cuda", torch.bfloat16, enabled=device().type == "cuda"):
        mean = vae.encode(as_input(video)).latent_dist.mean
    return mean.transpose(1, 2).half().cpu()


@torch.no_grad()
def main_channels(
    vae: AutoencoderKLCogVideoX, latents: torch.Tensor
) -> AutoencoderKLCogVideoX:
    """An autoencoder whose latents are the main components of another's.

    A transformer learns from few scenes only where noise hides all channels alike. The
    channels of a trained autoencoder vary by 0.1 to 3; most of their variance is the
    background's brightness, and little of it is colour. The change of coordinates goes
    into the weights: nothing but what the components left out said is lost.

    Args:
        vae: with ``WIDE`` channels.
        latents: of it, [count, frames, WIDE, height, width].
    """
    pixels = latents.transpose(1, 2).flatten(2).transpose(1, 2).flatten(0, 1).double()
    middle = pixels.mean(0)
    variances, directions = torch.linalg.eigh(torch.cov(pixels.T))
    kept = variances.flip(0)[:CHANNELS].sqrt()
    directions = directions.flip(1)[:, :CHANNELS]
    spread = kept**_EVENED
    out = directions / spread  # [WIDE, CHANNELS]
    scale = (kept / spread).square().mean().sqrt()
    out, back = out / scale, directions * spread * scale
    made = new_vae(CHANNELS)
    weights = dict(vae.state_dict())
    for name in list(weights):
        layer, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        bias = f"{layer}.bias"
        if name == "encoder.conv_out.conv.weight":
            mean = weights[name][:WIDE].double()
            mean = torch.einsum("oixyz,ok->kixyz", mean, out)
            weights[name] = torch.cat([mean, torch.zeros_like(mean)]).float()
            mean = (weights[bias][:WIDE].double() - middle) @ out
            weights[bias] = torch.cat([mean, torch.full_like(mean, _LITTLE)]).float()
        elif re.fullmatch(
            r"decoder.*\.(conv_y|conv_b)\.conv|decoder\.conv_in\.conv", layer
        ):
            old = weights[name].double()
            weights[name] = torch.einsum("oixyz,ik->okxyz", old, back).float()
            weights[bias] = (weights[bias] + old.sum((2, 3, 4)) @ middle).float()
    made.load_state_dict(weights)
    return made.eval()


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
