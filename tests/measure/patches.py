"""Prints what the CPU overrides are worth: ``python -m tests.measure.patches``.

Run from the root of a checkout. Decoding two latent frames of the demo of CogVideoX at
256x384, by diffusers and by tpuport with and without each of them, in turns in one
process.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import diffusers
import torch

from tpuport import targets
from tpuport.core.reports import Reporter
from tpuport.core.seam.ported import port_module
from tpuport.core.spec.run_settings import RunSettings
from tpuport.models.cogvideox import plugin

CONVOLUTION, RESIZE = "convolution", "upsample_nearest1d"
NORM = "cogvideox-norm-at-latent-size"
VARIANTS_OF = {
    "tpuport": (),
    "without the convolution override": (CONVOLUTION,),
    "without norms at latent size": (NORM,),
    "without the resize override": (RESIZE,),
    "without all three": (CONVOLUTION, RESIZE, NORM),
}


def without(vae: Any, names: tuple[str, ...]) -> Any:
    """The ported autoencoder without some overrides and patches."""
    settings, quiet = RunSettings(), Reporter()
    placed = targets.place_for_port(None)
    target = targets.module_target(vae, None, placed, settings, quiet)
    known = {one.name for one in (*target.overrides, *target.patches)}
    assert known.issuperset(names), known
    fewer = dataclasses.replace(
        target,
        overrides=tuple(one for one in target.overrides if one.name not in names),
        patches=tuple(one for one in target.patches if one.name not in names),
    )
    return port_module(vae, fewer, quiet)


@torch.no_grad()
def main() -> None:
    """Time the variants in turns; medians of five, ratios to diffusers."""
    folder = Path(plugin.__file__).with_name(str(plugin.VARIANTS["demo"].configs))
    vae = diffusers.AutoencoderKLCogVideoX.from_pretrained(folder / "vae").eval()
    run = {"diffusers": vae} | {w: without(vae, n) for w, n in VARIANTS_OF.items()}
    z = torch.randn(1, 16, 2, 32, 48, generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {name: [] for name in run}
    for turn in range(6):
        for name, one in run.items():
            started = time.perf_counter()
            one.decode(z)
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
