"""Prints the tables of ``docs/accuracy.md``: ``python -m tests.measure_accuracy``.

Run from the root of a checkout; name models to measure these alone. Each row is the
largest absolute difference from the upstream code on the CPU in float32, on small
checkpoints with random weights.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["HF_HUB_OFFLINE"] = "1"

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

import tpuport
from tests.models import conftest as cogvideox
from tests.models import hunyuanvideo_upstream as hunyuanvideo
from tests.models import test_cogvideox_components as cogvideox_components
from tests.models import test_cogvideox_image_to_video as cogvideox_i2v
from tests.models import test_cogvideox_video_to_video as cogvideox_v2v
from tests.models import test_hunyuanvideo_encoders as encoders
from tests.models import test_hunyuanvideo_transformer as form_15
from tests.models import test_hunyuanvideo_transformer_13b as form_13b
from tests.models import test_hunyuanvideo_vae as vaes
from tpuport.models.hunyuanvideo import demo
from tpuport.models.hunyuanvideo.vae import plan_decode

SHAPE = {"height": 64, "width": 96, "num_frames": 9}
STEPS = {"num_inference_steps": 4}
#: (dp, sp, tp); dp = 2 splits the guidance pair.
MESHES = ((2, 1, 4), (1, 1, 8), (2, 2, 2), (1, 8, 1))
UNGUIDED = ((1, 1, 8), (1, 2, 4), (1, 8, 1))


@dataclass(frozen=True, kw_only=True)
class Part:
    """A component: ``call(module, inputs)`` is upstream's result.

    ``ours`` of the inputs is the port's; by default ``call`` with the ported module.
    """

    name: str
    module: Any
    inputs: Any
    call: Callable[[Any, Any], torch.Tensor]
    ours: Callable[[Any], torch.Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Video:
    """A run from the seed; ``theirs()`` gives upstream's frames and latents."""

    name: str
    folder: Path
    asked: dict[str, Any]
    theirs: Callable[[], tuple[Any, Any]] | None = None
    variant: str | None = None
    meshes: tuple[tuple[int, int, int], ...] = MESHES


# ------------------------------------------------------------------- CogVideoX


def cogvideox_parts() -> Iterator[Part]:
    for form in (*cogvideox.FORMS, *cogvideox.IMAGE_FORMS):
        for batch in (1, 2):
            yield Part(
                name=f"transformer, {form}, batch {batch}",
                module=cogvideox.make_transformer(form),
                inputs=cogvideox_components.transformer_inputs(form, batch),
                call=lambda module, x: module(**x).sample,
            )
    draw = torch.Generator().manual_seed(2)
    for frames in (1, 2, 5):
        yield Part(
            name=f"VAE decode, {frames} latent frames",
            module=cogvideox.make_vae(),
            inputs=torch.randn(1, 4, frames, 8, 12, generator=draw),
            call=lambda module, z: module.decode(z).sample,
        )
    yield Part(
        name="VAE encode and decode, 9 frames",
        module=cogvideox.make_vae(),
        inputs=torch.randn(1, 3, 9, 32, 48, generator=draw).clamp(-1, 1),
        call=lambda module, x: module(x).sample,
    )
    yield Part(
        name="T5 encoder",
        module=cogvideox.make_text_encoder(),
        inputs=torch.randint(0, 512, (2, 20), generator=draw),
        call=lambda module, ids: module(ids).last_hidden_state,
    )


def cogvideox_videos(root: Path) -> Iterator[Video]:
    prompt = {"prompt": "a red fox"}

    def folder(form: str) -> Path:
        path = root / form
        if not path.exists():
            scheduler = cogvideox.PUBLISHED.get(form, "CogVideoXDPMScheduler")
            cogvideox.write_checkpoint(path, form, scheduler)
        return path

    for form, scheduler in cogvideox.PUBLISHED.items():
        yield Video(
            name=f"{form}, {scheduler.removeprefix('CogVideoX')}",
            folder=folder(form),
            asked={**prompt, **SHAPE, **STEPS},
        )
    image = cogvideox.pictures(1)
    for form in cogvideox.IMAGE_FORMS:
        asked = {**prompt, **SHAPE, **STEPS}
        yield Video(
            name=f"{form}, from an image",
            folder=folder(form),
            asked={**asked, "image": image[0]},
            theirs=lambda form=form, asked=asked: cogvideox_i2v.upstream(
                folder(form), image, **asked
            ),
            meshes=MESHES[:1],
        )
    frames = cogvideox.pictures(SHAPE["num_frames"])
    for form in cogvideox.PUBLISHED:
        asked = {**prompt, **STEPS, "strength": 0.5}
        if form == "1.5-5b":
            # Upstream's pipeline refuses it: its own parts, called one by one.
            theirs = None
        else:
            theirs = lambda form=form, asked=asked: cogvideox_v2v.upstream(  # noqa: E731
                folder(form),
                video=cogvideox_v2v.images(frames),
                use_dynamic_cfg=form == "5b",
                **asked,
            )
        yield Video(
            name=f"{form}, from a video",
            folder=folder(form),
            asked={**asked, **SHAPE, "video": frames},
            theirs=theirs,
            meshes=MESHES[:1],
        )


# ---------------------------------------------------------------- HunyuanVideo


def hunyuanvideo_parts() -> Iterator[Part]:
    for batch in (1, 2):
        for task in ("t2v zeros", "i2v"):
            yield Part(
                name=f"transformer, 1.5, {task.split()[0]}, batch {batch}",
                module=form_15.make(),
                inputs=form_15.inputs_of(batch, task),
                call=lambda module, x: module(**x).sample,
            )
    for batch in (1, 2):
        yield Part(
            name=f"transformer, 13b, batch {batch}",
            module=form_13b.make(),
            inputs=form_13b.inputs_of(batch),
            call=lambda module, x: module(**x).sample,
        )
    for name in ("15", "13b"):
        yield from _autoencoder(name)
    ids, mask = encoders.ragged("right", "left")
    draw = torch.Generator().manual_seed(2)
    pixels = torch.randn(2, 3, 56, 56, generator=draw).clamp(-1, 1)
    padded = {"input_ids": ids, "attention_mask": mask}
    decoder = {**padded, "use_cache": False, "output_hidden_states": True}
    for label, cls, config, inputs, read in (
        ("Qwen2.5-VL", "Qwen2_5_VLTextModel", encoders.QWEN, decoder, _third_last),
        ("ByT5", "T5EncoderModel", encoders.BYT5, padded, _last),
        ("SigLIP", "SiglipVisionModel", encoders.SIGLIP, {"x": pixels}, _last),
        ("Llama", "LlamaModel", encoders.LLAMA, decoder, _third_last),
        ("CLIP", "CLIPTextModel", encoders.CLIP, {"x": ids}, _pooled),
    ):
        yield Part(
            name=f"{label} encoder",
            module=encoders.make(cls, config),
            inputs=inputs,
            call=lambda module, x, read=read: read(
                module(**x) if "x" not in x else module(x["x"])
            ),
        )


def _third_last(out: Any) -> torch.Tensor:
    state: torch.Tensor = out.hidden_states[-3]
    return state


def _last(out: Any) -> torch.Tensor:
    state: torch.Tensor = out.last_hidden_state
    return state


def _pooled(out: Any) -> torch.Tensor:
    state: torch.Tensor = out.pooler_output
    return state


def _autoencoder(name: str) -> Iterator[Part]:
    """Encode and decode by the programs that sessions run."""
    label = {"15": "1.5"}.get(name, name)
    module = vaes.frozen_vae(name)
    run = vaes.shared_run(name)
    for batch, frames in ((1, 1), (1, 3), (2, 3)):
        videos = f"batch {batch}, {frames} latent frames"
        yield Part(
            name=f"VAE encode, {label}, {videos}",
            module=module,
            inputs=vaes.pixels(batch, 4 * frames - 3, 48, 32),
            call=vaes.upstream_moments,
            ours=lambda x: run(vaes.encode_moments(name), x),
        )
        yield Part(
            name=f"VAE decode, {label}, {videos}",
            module=module,
            inputs=vaes.latents(module, batch, frames, 4, 3),
            call=vaes.upstream_decode,
            ours=lambda z: run(vaes.decode_tile(name), z),
        )
    tiled = vaes.make_vae(name)
    tiled.enable_tiling(**vaes.tile_settings(name, 4, 4))
    size = dict(vaes.TILED)[name]
    yield Part(
        name=f"VAE decode, {label}, 4 tiles",
        module=tiled,
        inputs=vaes.latents(tiled, 1, *size),
        call=vaes.upstream_decode,
        ours=lambda z: vaes.through_tiles(
            name, vaes.decode_tile(name), plan_decode(tiled, z.shape, True), z
        ),
    )


def hunyuanvideo_videos(root: Path) -> Iterator[Video]:
    folders = {"1.5": root / "1.5", "13b": root / "13b"}
    for form, make in (("1.5", demo.make_demo), ("13b", demo.make_demo_13b)):
        folders[form].mkdir()
        make(folders[form])
    prompt = {"prompt": 'a fox reads "slow down" on a sign'}
    negative = {"negative_prompt": "blur"}
    image = hunyuanvideo.picture()
    pipelines: dict[str, Callable[[], Any]] = {
        "1.5": lambda: hunyuanvideo.pipeline_15(folders["1.5"]),
        "1.5, from an image": lambda: hunyuanvideo.pipeline_15(
            folders["1.5"], image=True
        ),
        "13b": lambda: hunyuanvideo.pipeline_13b(folders["13b"]),
        "13b, with a second prediction": lambda: hunyuanvideo.pipeline_13b(
            folders["13b"]
        ),
    }
    for name, asked in (
        ("1.5", {**prompt, **negative, **SHAPE}),
        ("1.5, from an image", {**prompt, "num_frames": 9, "image": image}),
        ("13b", {**prompt, **SHAPE}),
        (
            "13b, with a second prediction",
            {**prompt, **negative, **SHAPE, "true_cfg_scale": 3.0},
        ),
    ):
        asked = {**asked, **STEPS}

        def theirs(name: str = name, asked: dict[str, Any] = asked) -> Any:
            made = hunyuanvideo.run(pipelines[name](), 7, **asked)
            return made["frames"], made["latents"]

        form = name.split(",")[0]
        yield Video(
            name=name,
            folder=folders[form],
            variant="demo" if form == "1.5" else "demo-13b",
            asked=asked,
            theirs=theirs,
            meshes=UNGUIDED if name == "13b" else MESHES,
        )


# ----------------------------------------------------------------------- rows


def row(name: str, ours: Any, upstream: Any, truth: Any = None) -> None:
    """One line; with ``truth``, also how far upstream itself is from float64."""
    difference = np.abs(np.asarray(ours) - np.asarray(upstream)).max()
    own = "" if truth is None else f"{np.abs(upstream - truth).max():.1e}"
    scale = np.abs(np.asarray(upstream)).max()
    print(f"| {name} | {difference:.1e} | {own} | {scale:.1f} |", flush=True)


def _double(leaf: Any) -> Any:
    floats = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.double() if floats else leaf


@torch.no_grad()
def measure_part(model: str, part: Part) -> None:
    if part.ours is None:
        ours = part.call(tpuport.port(part.module, model=model), part.inputs)
    else:
        ours = part.ours(part.inputs)
    exact = copy.deepcopy(part.module).double()
    truth = part.call(exact, pytree.tree_map(_double, part.inputs))
    row(part.name, ours, part.call(part.module, part.inputs), truth)


def measure_video(model: str, video: Video, cache: Path) -> None:
    def load(**options: Any) -> Any:
        options = {"variant": video.variant, "cache_dir": cache, **options}
        return tpuport.load(model, weights=video.folder, **options)

    with load() as session:
        ours = session.generate(seed=7, **video.asked)
        if video.theirs is None:
            made = session.generate(seed=7, backend="diffusers", **video.asked)
            frames, latents = made.frames, made.latents
        else:
            frames, latents = video.theirs()
    row(f"video, {video.name}", ours.frames, frames)
    row(f"latents, {video.name}", ours.latents, latents)
    for mesh in video.meshes:
        with load(mesh=mesh) as session:
            many = session.generate(seed=7, **video.asked)
        label = ",".join(map(str, mesh))
        name = f"frames, {video.name}, mesh ({label}) against one device"
        row(name, many.frames, ours.frames)


MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "cogvideox": (cogvideox_parts, cogvideox_videos),
    "hunyuanvideo": (hunyuanvideo_parts, hunyuanvideo_videos),
}


def main(models: list[str]) -> None:
    for model in models or MODELS:
        parts, videos = MODELS[model]
        print(
            f"\n{model}\n\n| what | largest difference | upstream's own from float64 |"
            " largest value |\n| --- | --- | --- | --- |",
            flush=True,
        )
        for part in parts():
            measure_part(model, part)
        with tempfile.TemporaryDirectory() as folder:
            for video in videos(Path(folder)):
                measure_video(model, video, Path(folder) / "cache")


if __name__ == "__main__":
    main(sys.argv[1:])
