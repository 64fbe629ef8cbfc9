"""Prints every comparison with upstream: ``python -m tests.measure.accuracy``.

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
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from torch.utils import _pytree as pytree

import tpuport
from tests.models import conftest as cogvideox
from tests.models.cogvideox import test_components as cogvideox_components
from tests.models.cogvideox import videos
from tests.models.hunyuanvideo import test_encoders as encoders
from tests.models.hunyuanvideo import upstream as hunyuanvideo
from tests.models.hunyuanvideo.blocks import test_transformer as form_15
from tests.models.hunyuanvideo.blocks import test_transformer_13b as form_13b
from tests.models.hunyuanvideo.vae import test_tiles, vaes
from tpuport.models.hunyuanvideo import demo
from tpuport.models.hunyuanvideo.vae import plan_decode

STEPS = {"num_inference_steps": 4}
SIZE = {"height": 64, "width": 96}
SHAPE = {**SIZE, "num_frames": 9, **STEPS}
#: (dp, sp, tp); dp = 2 splits the guidance pair.
MESHES = ((2, 1, 4), (1, 1, 8), (2, 2, 2), (1, 8, 1))
WITHOUT_PAIR = ((1, 1, 8), (1, 2, 4), (1, 8, 1))

Call = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """A component: ``call(module, inputs)`` is upstream's result.

    ``ours(inputs)`` is the port's: by default ``call`` with the ported module.
    """

    name: str
    module: Any
    inputs: Any
    call: Call
    ours: Callable[[Any], torch.Tensor] | None = None


@dataclass(frozen=True)
class Video:
    """A run from seed 7; ``theirs()`` gives upstream's frames and latents.

    Without it, they are those of upstream's own parts, called one by one.
    """

    name: str
    folder: Path
    asked: dict[str, Any]
    theirs: Callable[[], tuple[Any, Any]] | None = None
    variant: str | None = None
    meshes: tuple[tuple[int, int, int], ...] = MESHES


def output(name: str, index: int | None = None) -> Call:
    """Call a module by keywords, for one of its outputs."""

    def call(module: Any, inputs: Any) -> torch.Tensor:
        found = module(**inputs)[name]
        state: torch.Tensor = found if index is None else found[index]
        return state

    return call


# ------------------------------------------------------------------- CogVideoX


def cogvideox_parts() -> Iterator[Part]:
    draw = torch.Generator().manual_seed(2)
    for form in (*cogvideox.FORMS, *cogvideox.IMAGE_FORMS):
        module = cogvideox.make_transformer(form)
        for batch in (1, 2):
            inputs = cogvideox_components.transformer_inputs(form, batch)
            name = f"transformer, {form}, batch {batch}"
            yield Part(name, module, inputs, output("sample"))
    vae = cogvideox.make_vae()
    for frames in (1, 2, 5):
        z = torch.randn(1, 4, frames, 8, 12, generator=draw)
        name = f"VAE decode, {frames} latent frames"
        yield Part(name, vae, z, lambda vae, z: vae.decode(z).sample)
    pixels = {"sample": vaes.pixels(1, 9, 32, 48)}
    yield Part("VAE encode and decode, 9 frames", vae, pixels, output("sample"))
    text = cogvideox.make_text_encoder()
    ids = {"input_ids": torch.randint(0, 512, (2, 20), generator=draw)}
    yield Part("T5 encoder", text, ids, output("last_hidden_state"))


def cogvideox_upstream(pipeline: str, folder: Path, **asked: Any) -> tuple[Any, Any]:
    """Frames and latents that an upstream pipeline makes from seed 7."""
    pipe = getattr(diffusers, pipeline).from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return cogvideox.frames_and_latents(
        pipe,
        **{"guidance_scale": 6.0, "use_dynamic_cfg": True, **asked},
        generator=cogvideox.generators_of(7),
        max_sequence_length=videos.TOKENS,
    )


def cogvideox_videos(root: Path) -> Iterator[Video]:
    image, video = cogvideox.pictures(1), cogvideox.pictures(SHAPE["num_frames"])
    prompt = {"prompt": "a red fox"}
    asked: dict[str, Any] = {**prompt, **SHAPE}
    for form in (*cogvideox.PUBLISHED, *cogvideox.IMAGE_FORMS):
        scheduler = cogvideox.PUBLISHED.get(form, "CogVideoXDPMScheduler")
        folder = cogvideox.write_checkpoint(root / form, form, scheduler)
        if form in cogvideox.IMAGE_FORMS:
            cls, images = "CogVideoXImageToVideoPipeline", videos.images(image)
            theirs = partial(cogvideox_upstream, cls, folder, image=images, **asked)
            given = {**asked, "image": image[0]}
            yield Video(f"{form}, from an image", folder, given, theirs)
            continue
        yield Video(f"{form}, {scheduler[9:]}", folder, asked)
        edit: dict[str, Any] = {**prompt, **STEPS, "strength": 0.5}
        pipeline = partial(
            cogvideox_upstream,
            "CogVideoXVideoToVideoPipeline",
            folder,
            video=videos.images(video),
            use_dynamic_cfg=form == "5b",
            **SIZE,
            **edit,
        )
        yield Video(
            f"{form}, from a video",
            folder,
            {**asked, **edit, "video": video},
            # Upstream's pipeline refuses it.
            None if form == "1.5-5b" else pipeline,
            meshes=MESHES[:1],
        )


# ---------------------------------------------------------------- HunyuanVideo


def hunyuanvideo_parts() -> Iterator[Part]:
    module = form_15.make()
    for task in ("t2v zeros", "i2v"):
        for batch in (1, 2):
            inputs = form_15.inputs_of(batch, task)
            name = f"transformer, 1.5, {task[:3]}, batch {batch}"
            yield Part(name, module, inputs, output("sample"))
    module = form_13b.make()
    for batch in (1, 2):
        inputs = form_13b.inputs_of(batch)
        yield Part(f"transformer, 13b, batch {batch}", module, inputs, output("sample"))
    yield from autoencoder("15", "1.5")
    yield from autoencoder("13b", "13b")
    ids, mask = encoders.ragged("right", "left")
    padded = {"input_ids": ids, "attention_mask": mask}
    decoder = {**padded, "use_cache": False, "output_hidden_states": True}
    pixels = {"pixel_values": vaes.pixels(2, 1, 56, 56)[:, :, 0]}
    states, last = output("hidden_states", -3), output("last_hidden_state")
    for name, cls, config, inputs, call in (
        ("Qwen2.5-VL", "Qwen2_5_VLTextModel", encoders.QWEN, decoder, states),
        ("ByT5", "T5EncoderModel", encoders.BYT5, padded, last),
        ("SigLIP", "SiglipVisionModel", encoders.SIGLIP, pixels, last),
        ("Llama", "LlamaModel", encoders.LLAMA, decoder, states),
        (
            "CLIP",
            "CLIPTextModel",
            encoders.CLIP,
            {"input_ids": ids},
            output("pooler_output"),
        ),
    ):
        yield Part(f"{name} encoder", encoders.make(cls, config), inputs, call)


def autoencoder(name: str, label: str) -> Iterator[Part]:
    """By the programs that sessions run."""
    vae, run = vaes.frozen_vae(name), vaes.shared_run(name)
    decode, encode = vaes.decode_tile(name), vaes.encode_mode(name)
    for batch, frames in ((1, 1), (1, 3), (2, 3)):
        size = f"{frames} latent frames, batch {batch}"
        x = vaes.pixels(batch, 4 * frames - 3, 48, 32)
        z = vaes.latents(vae, batch, frames, 4, 3)
        for title, fn, given, call in (
            ("encode", encode, x, vaes.upstream_mode),
            ("decode", decode, z, vaes.upstream_decode),
        ):
            yield Part(
                f"VAE {title}, {label}, {size}", vae, given, call, partial(run, fn)
            )
    vae = vaes.make_vae(name)
    vae.enable_tiling(**vaes.tile_settings(name, 4, 4))
    z = vaes.latents(vae, 1, *dict(test_tiles.TILED)[name])
    ours = partial(
        test_tiles.through_tiles, name, decode, plan_decode(vae, z.shape, True)
    )
    yield Part(f"VAE decode, {label}, 4 tiles", vae, z, vaes.upstream_decode, ours)


def hunyuanvideo_videos(root: Path) -> Iterator[Video]:
    folders = {"1.5": root / "demo", "13b": root / "demo-13b"}
    for form, make in (("1.5", demo.make_demo), ("13b", demo.make_demo_13b)):
        folders[form].mkdir()
        make(folders[form])
    asked: dict[str, Any] = {"prompt": 'a fox reads "slow down" on a sign'}
    image = {"num_frames": 9, **STEPS, "image": hunyuanvideo.picture()}
    pair = {**asked, "negative_prompt": "blur", **SHAPE}
    from_image = partial(hunyuanvideo.pipeline_15, image=True)
    for form, name, settings, make_pipeline in (
        ("1.5", "1.5", pair, hunyuanvideo.pipeline_15),
        ("1.5", "1.5, from an image", {**asked, **image}, from_image),
        ("13b", "13b", {**asked, **SHAPE}, hunyuanvideo.pipeline_13b),
        (
            "13b",
            "13b, true guidance",
            {**pair, "true_cfg_scale": 3.0},
            hunyuanvideo.pipeline_13b,
        ),
    ):

        def theirs(
            make: Callable[[Path], Any] = make_pipeline,
            folder: Path = folders[form],
            settings: dict[str, Any] = settings,
        ) -> tuple[Any, Any]:
            made = hunyuanvideo.run(make(folder), 7, **settings)
            return made["frames"], made["latents"]

        meshes = WITHOUT_PAIR if name == "13b" else MESHES
        variant = folders[form].name
        yield Video(name, folders[form], settings, theirs, variant, meshes)


# ------------------------------------------------------------------------ rows


def row(name: str, ours: Any, upstream: Any, truth: Any = None) -> None:
    """One line; with ``truth``, also how far upstream itself is from float64."""
    ours, upstream = np.asarray(ours), np.asarray(upstream)
    difference = np.abs(ours - upstream).max()
    own = "" if truth is None else f"{np.abs(upstream - np.asarray(truth)).max():.1e}"
    scale = np.abs(upstream).max()
    print(f"| {name} | {difference:.1e} | {own} | {scale:.1f} |", flush=True)


def _double(leaf: Any) -> Any:
    floats = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.double() if floats else leaf


@torch.no_grad()
def measure_part(model: str, part: Part) -> None:
    ours = part.ours or partial(part.call, tpuport.port(part.module, model=model))
    exact = copy.deepcopy(part.module).double()
    truth = part.call(exact, pytree.tree_map(_double, part.inputs))
    upstream = part.call(part.module, part.inputs)
    row(part.name, ours(part.inputs), upstream, truth)


def measure_video(model: str, video: Video, cache: Path) -> None:
    settings: dict[str, Any] = {"variant": video.variant, "cache_dir": cache}
    with tpuport.load(model, weights=video.folder, **settings) as session:
        ours = session.generate(seed=7, **video.asked)
        if video.theirs is not None:
            frames, latents = video.theirs()
        else:
            made = session.generate(seed=7, backend="diffusers", **video.asked)
            frames, latents = made.frames, made.latents
    row(f"video, {video.name}", ours.frames, frames)
    row(f"latents, {video.name}", ours.latents, latents)
    for mesh in video.meshes:
        with tpuport.load(
            model, weights=video.folder, mesh=mesh, **settings
        ) as session:
            many = session.generate(seed=7, **video.asked)
        name = f"frames, {video.name}, mesh ({','.join(map(str, mesh))})"
        row(f"{name} against one device", many.frames, ours.frames)


HEADER = """\
| what | largest difference | upstream's own from float64 | largest value |
| --- | --- | --- | --- |"""

MODELS = {
    "cogvideox": (cogvideox_parts, cogvideox_videos),
    "hunyuanvideo": (hunyuanvideo_parts, hunyuanvideo_videos),
}


def main(models: list[str]) -> None:
    for model in models or MODELS:
        parts, videos = MODELS[model]
        print(f"\n{model}:\n")
        print(HEADER, flush=True)
        for part in parts():
            measure_part(model, part)
        with tempfile.TemporaryDirectory() as folder:
            for video in videos(Path(folder)):
                measure_video(model, video, Path(folder) / "cache")


if __name__ == "__main__":
    main(sys.argv[1:])
