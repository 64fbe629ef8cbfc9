"""Prints what the CPU overrides are worth: ``python -m tests.measure.patches``.

Run from the root of a checkout. Decoding two latent frames of the demo VAE at 256x384,
by diffusers and by tpuport with and without each of them, in turns in one process.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import tpuport
from tests.models.ported import ported_by
from tpuport.models.cogvideox.plugin import PORT
from tpuport.patches.conv import CONVOLUTION
from tpuport.patches.resize import NEAREST_RESIZE

NORM = "cogvideox-norm-at-latent-size"


@torch.no_grad()
def main() -> None:
    """Time the variants in turns; medians of five, ratios to diffusers."""
    with tpuport.load() as session:
        folder = session.checkpoint.folder
    from diffusers import AutoencoderKLCogVideoX

    vae = AutoencoderKLCogVideoX.from_pretrained(folder / "vae").eval()

    def program(overrides: Any = (), patch: str = "") -> Callable[[Any], Any]:
        port = dataclasses.replace(
            PORT,
            overrides=tuple(o for o in PORT.overrides if o not in overrides),
            patches=tuple(p for p in PORT.patches if p.name != patch),
        )
        made = ported_by(port, "vae", vae)
        return lambda z: made.decode(z).sample

    variants: dict[str, Callable[[Any], Any]] = {
        "diffusers": lambda z: vae.decode(z).sample,
        "tpuport": program(),
        "without the convolution override": program([CONVOLUTION]),
        "without norms at latent size": program(patch=NORM),
        "without the resize override": program([NEAREST_RESIZE]),
        "without all three": program([CONVOLUTION, NEAREST_RESIZE], NORM),
    }
    z = torch.randn(1, 16, 2, 32, 48, generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(6):
        for name, run in variants.items():
            started = time.perf_counter()
            run(z)
            if turn:
                times[name].append(time.perf_counter() - started)
    base = statistics.median(times["diffusers"])
    print("| decode of 2 latent frames, 256x384 | median of 5 | diffusers / this |")
    print("| --- | --- | --- |")
    for name, found in times.items():
        median = statistics.median(found)
        print(f"| {name} | {median:.2f} s | {base / median:.2f} |")


if __name__ == "__main__":
    main()
