"""Prints the table of ``docs/accuracy.md``: ``python -m tests.measure_accuracy``.

Run from the root of a checkout. Each row is the largest absolute difference from the
upstream code on the CPU in float32, on small checkpoints with random weights.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["HF_HUB_OFFLINE"] = "1"

import copy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tpuport
from tests.models.conftest import (
    FORMS,
    PUBLISHED,
    make_text_encoder,
    make_transformer,
    make_vae,
    write_checkpoint,
)
from tests.models.test_cogvideox_components import transformer_inputs

SHAPE = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 4}


def row(name: str, ours: Any, upstream: Any, truth: Any = None) -> None:
    """One line; with ``truth``, also how far upstream itself is from float64."""
    difference = np.abs(np.asarray(ours) - np.asarray(upstream)).max()
    own = "" if truth is None else f"{np.abs(upstream - truth).max():.1e}"
    scale = np.abs(np.asarray(upstream)).max()
    print(f"| {name} | {difference:.1e} | {own} | {scale:.1f} |", flush=True)


@torch.no_grad()
def components() -> None:
    """Transformer, VAE and text encoder by themselves."""
    for form in FORMS:
        for batch in (1, 2):
            module = make_transformer(form)
            inputs = transformer_inputs(form, batch)
            wide = {
                k: tuple(x.double() for x in v)
                if isinstance(v, tuple)
                else (v.double() if v.is_floating_point() else v)  # type: ignore[attr-defined]
                for k, v in inputs.items()
            }
            row(
                f"transformer, {form}, batch {batch}",
                tpuport.port(module)(**inputs).sample,
                module(**inputs).sample,
                copy.deepcopy(module).double()(**wide).sample,
            )
    draw = torch.Generator().manual_seed(2)
    vae = make_vae()
    for frames in (1, 2, 5):
        z = torch.randn(1, 4, frames, 8, 12, generator=draw)
        row(
            f"VAE decode, {frames} latent frames",
            tpuport.port(vae).decode(z).sample,
            vae.decode(z).sample,
            copy.deepcopy(vae).double().decode(z.double()).sample,
        )
    text = make_text_encoder()
    ids = torch.randint(0, 512, (2, 20), generator=draw)
    row(
        "T5 encoder",
        tpuport.port(text)(ids).last_hidden_state,
        text(ids).last_hidden_state,
        copy.deepcopy(text).double()(ids).last_hidden_state,
    )


def videos(root: Path) -> None:
    """Whole videos from the seed, and meshes against one device."""
    for form, scheduler in PUBLISHED.items():
        folder = write_checkpoint(root / form, form, scheduler)
        with tpuport.load(weights=folder, cache_dir=root) as session:
            ours = session.generate("a red fox", seed=7, **SHAPE)
            theirs = session.generate("a red fox", seed=7, backend="diffusers", **SHAPE)
        name = f"{form}, {scheduler.removeprefix('CogVideoX')}"
        row(f"video, {name}", ours.frames, theirs.frames)
        row(f"latents, {name}", ours.latents, theirs.latents)
        for mesh in ((2, 1, 4), (1, 1, 8), (2, 2, 2), (1, 8, 1)):
            with tpuport.load(weights=folder, mesh=mesh, cache_dir=root) as session:
                many = session.generate("a red fox", seed=7, **SHAPE)
            label = ",".join(map(str, mesh))
            row(
                f"frames, {form}, mesh ({label}) against one device",
                many.frames,
                ours.frames,
            )


if __name__ == "__main__":
    print("| what | largest difference | upstream's own from float64 | largest value |")
    print("| --- | --- | --- | --- |")
    components()
    with tempfile.TemporaryDirectory() as folder:
        videos(Path(folder))
