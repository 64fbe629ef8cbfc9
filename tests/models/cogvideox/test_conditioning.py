"""What a video is made from: pixels, the VAE's encoder, draws, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from diffusers import CogVideoXImageToVideoPipeline
from diffusers.pipelines.cogvideo.pipeline_cogvideox_image2video import (
    retrieve_latents,
)
from diffusers.video_processor import VideoProcessor
from PIL import Image

import tpuport
from tests.models.conftest import IMAGE_FORMS, make_vae, pictures
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy
from tpuport.core.files.sources import read_image, read_video
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.core.run.session import Session
from tpuport.core.spec.stage_work import StageContext
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.errors import UsageError
from tpuport.models.cogvideox import conditioning, config
from tpuport.models.cogvideox.inputs import chunk_lengths
from tpuport.models.cogvideox.plugin import PORT

SHAPE: dict[str, Any] = {
    "height": 64,
    "width": 96,
    "num_frames": 9,
    "num_inference_steps": 2,
}


@pytest.fixture(scope="module")
def load(checkpoints: Callable[[str], Path], cache: Path) -> Callable[..., Session]:
    opened: dict[tuple[str, str | None], Session] = {}

    def get(form: str, variant: str | None = None) -> Session:
        if (form, variant) not in opened:
            opened[form, variant] = tpuport.load(
                weights=checkpoints(form), variant=variant, cache_dir=cache
            )
        return opened[form, variant]

    return get


def context(
    session: Session, source: Any, count: int = 1, **asked: Any
) -> StageContext:
    request = session.request(
        prompt=["a fox"] * count, source=source, **{**SHAPE, **asked}
    )
    pixels = {source.kind: source.for_videos(count)}
    return session.executor.context(request, 0, pixels)


# ---------------------------------------------------------------------- pixels


@pytest.mark.parametrize(("rows", "columns"), [(70, 110), (64, 96), (33, 200)])
def test_images_are_preprocessed_as_upstream(
    rows: int, columns: int, load: Callable[..., Session]
) -> None:
    images = pictures(2, rows, columns)
    ctx = context(load("5b-i2v"), read_image([*images]), count=2)
    ours = conditioning.preprocess(ctx, conditioning.pixels(ctx))
    upstream = VideoProcessor(vae_scale_factor=8).preprocess(
        [Image.fromarray(image) for image in images], height=64, width=96
    )
    assert ours.shape == (2, 3, 1, 64, 96)
    assert torch.equal(ours[:, :, 0], upstream)
    assert float(ours.min()) < -0.5
    assert float(ours.max()) > 0.5


def test_videos_are_preprocessed_as_upstream(load: Callable[..., Session]) -> None:
    video = pictures(9)
    ctx = context(load("5b"), read_video(video))
    chunks = [call.inputs["pixels"] for call in conditioning.encode_calls(ctx)]
    upstream = VideoProcessor(vae_scale_factor=8).preprocess_video(
        [Image.fromarray(frame) for frame in video], height=64, width=96
    )
    assert torch.equal(torch.cat(chunks, dim=2), upstream)


@pytest.mark.parametrize(
    ("frames", "lengths"),
    [(1, [1]), (9, [9]), (17, [9, 8]), (49, [9, 8, 8, 8, 8, 8]), (8, [8]), (5, [5])],
)
def test_frames_are_encoded_in_eights(frames: int, lengths: list[int]) -> None:
    assert chunk_lengths(frames, 8) == lengths


# --------------------------------------------------------------------- encoder


@torch.no_grad()
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.sweep), 2])
@pytest.mark.parametrize(
    ("frames", "changes"),
    [(1, {}), (17, {}), (9, {"latent_channels": 3, "use_quant_conv": True})],
    ids=["image", "video", "quant_conv"],
)
def test_the_moments_are_upstreams(
    frames: int, changes: dict[str, Any], batch: int
) -> None:
    module = make_vae(**changes)
    runtime = model_runtime(
        mesh=None, platform="cpu", patches=PORT.patches, overrides=PORT.overrides
    )
    ported = PortedModule(module, runtime)
    weights = {name: to_numpy(t) for name, t in module.state_dict().items()}

    @jax.jit
    def run(weights: Any, carry: Any, inputs: Any) -> Any:
        return conditioning.encode_chunk(ported.bind(weights), carry, None, inputs)

    x = torch.rand(batch, 3, frames, 32, 48, generator=torch.Generator().manual_seed(0))
    x = x * 2 - 1
    carry, start, found = None, 0, []
    for length in chunk_lengths(frames, 8):
        chunk = to_numpy(x[:, :, start : start + length])
        carry, moments = run(weights, carry, {"pixels": chunk})
        found.append(np.asarray(moments))
        start += length
    upstream = module._encode(x).numpy()
    ours = np.concatenate(found, axis=2)
    assert ours.shape == upstream.shape
    assert upstream.std() > 0.1
    assert np.abs(ours - upstream).max() <= TOLERANCES["component float32"]


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", [3, [3, 4]], ids=["one seed", "a seed each"])
@pytest.mark.parametrize("task", ["i2v", "v2v"])
def test_the_draws_are_those_of_upstreams_sampling(
    task: str, seed: Any, dtype: torch.dtype, load: Callable[..., Session]
) -> None:
    if task == "i2v":
        ctx = context(load("1.5-5b-i2v"), read_image(pictures(1)[0]), 2, seed=seed)
    else:
        ctx = context(load("1.5-5b"), read_video(pictures(9)), 2, seed=seed)
    ours = ctx.generators()
    noise = conditioning.posterior_draws(ctx, ours, dtype)
    upstream = ctx.generators()
    vae = make_vae().to(dtype)
    pixels = conditioning.preprocess(ctx, conditioning.pixels(ctx)).to(dtype)
    for index, video in enumerate(pixels):
        encoded = vae.encode(video[None])
        generator = upstream[index % len(upstream)]
        sampled = retrieve_latents(encoded, generator)
        mean, std = encoded.latent_dist.mean, encoded.latent_dist.std
        assert torch.equal(sampled, mean + std * noise[index : index + 1])
    for mine, theirs in zip(ours, upstream, strict=True):
        assert torch.equal(mine.get_state(), theirs.get_state())


def test_only_an_image_or_a_video_loads_the_autoencoder(
    checkpoints: Callable[[str], Path], cache: Path
) -> None:
    with tpuport.load(weights=checkpoints("2b"), cache_dir=cache) as session:
        request = session.request(prompt="a fox", **SHAPE)
        session.run_stage("encode", request, {})
        assert session.components.loaded == ("text_encoder",)
        source = read_video(pictures(9))
        request = session.request(prompt="a fox", source=source, **SHAPE)
        pixels = {"video": source.for_videos(1)}
        made, report = session.run_stage("encode", request, pixels)
        assert set(session.components.loaded) == {"text_encoder", "vae"}
    assert made["video_latents"].shape == (1, 3, 4, 8, 12)
    assert [c.program for c in report.compiles] == ["first"]


# -------------------------------------------------------------------- detection


@pytest.mark.parametrize("variant", [v.name for v in config.PUBLISHED])
def test_a_published_checkpoint_is_known_by_its_transformer(
    variant: str, tmp_path: Path
) -> None:
    known = PORT.variant(variant)
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(
        json.dumps(known.configs["transformer"])
    )
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "x"}))
    assert config.detect(Checkpoint(tmp_path, "somewhere")) is known


def test_what_each_variant_can_do() -> None:
    tasks = {v.name: v.tasks for v in config.VARIANTS}
    assert tasks.pop("demo-i2v") == ("i2v",)
    assert tasks.pop("5b-i2v") == ("i2v",)
    assert tasks.pop("1.5-5b-i2v") == ("i2v",)
    assert set(tasks) == {"demo", "2b", "5b", "1.5-5b"}
    assert set(tasks.values()) == {("t2v", "v2v")}


def test_the_demo_for_images_is_a_checkpoint_that_upstream_loads(cache: Path) -> None:
    with tpuport.load(variant="demo-i2v", cache_dir=cache) as session:
        assert session.variant.name == "demo-i2v"
        pipe = CogVideoXImageToVideoPipeline.from_pretrained(session.checkpoint.folder)
        source = read_image(pictures(1)[0])
        request = session.request(prompt="a fox", source=source)
        made, _ = session.run_stage("encode", request, {"image": source.for_videos(1)})
    assert pipe.transformer.config.in_channels == 32
    assert pipe.transformer.config.ofs_embed_dim == 64
    assert pipe.vae.config.invert_scale_latents
    # 17 frames are 5 latent frames, padded to 6; the image is the first.
    assert made["image_latents"].shape == (1, 6, 16, 16, 24)
    assert made["image_latents"][:, 0].abs().min() > 0
    assert not made["image_latents"][:, 1:].any()


# ----------------------------------------------------------------- what is refused


IMAGE = pictures(1)[0]
VIDEO = pictures(9)


@pytest.mark.parametrize(
    ("form", "variant", "given", "message"),
    [
        ("5b-i2v", "5b-i2v", {}, r"5b-i2v makes videos from an image"),
        ("5b-i2v", None, {}, r"makes videos from an image \(image\), not from text"),
        ("5b", "5b", {"image": IMAGE}, r"not from an image.*5b-i2v, 1.5-5b-i2v can"),
        ("5b", None, {"image": IMAGE}, r"not from an image"),
        ("5b-i2v", None, {"video": VIDEO}, r"not from a video.*2b, 5b, 1.5-5b can"),
        ("2b", None, {"video": VIDEO, "strength": 1.5}, r"above 0 and at most 1"),
        ("2b", None, {"video": VIDEO, "strength": 0.0}, r"above 0 and at most 1"),
        ("2b", None, {"video": VIDEO, "strength": 0.4}, r"no step .* at least 1/2"),
        ("2b", None, {"strength": 0.5}, r"strength 0.5 was given without a video"),
        ("2b", None, {"video": VIDEO[:8]}, r"has 8 frames and 9 are asked for"),
        ("2b", None, {"video": VIDEO, "image": IMAGE}, r"exclude each other"),
        (
            "5b-i2v",
            None,
            {"image": IMAGE, "width": 112},
            r"size 112x64 .* learned for 96x64",
        ),
        (
            "5b-i2v",
            None,
            {"image": IMAGE, "max_sequence_length": 30},
            r"positions are for 20 text tokens",
        ),
        (
            "1.5-5b-i2v",
            None,
            {"image": IMAGE, "height": 112},
            r"nearest valid height is 96",
        ),
        (
            "5b",
            "5b-i2v",
            {"image": IMAGE, "height": 480},
            r"not a 5b-i2v checkpoint: .*rotary positions, .*no image channels",
        ),
        ("5b", "demo-i2v", {"image": IMAGE}, r"transformer takes no image"),
        ("1.5-5b-i2v", "demo", {}, r"transformer takes an image, and task t2v"),
    ],
)
def test_what_a_checkpoint_cannot_be_made_to_do(
    form: str,
    variant: str | None,
    given: dict[str, Any],
    message: str,
    load: Callable[..., Session],
) -> None:
    with pytest.raises(UsageError, match=message):
        load(form, variant).generate("a fox", **{**SHAPE, **given})


@pytest.mark.parametrize("form", IMAGE_FORMS)
def test_a_stage_without_its_image_says_so(
    form: str, load: Callable[..., Session]
) -> None:
    ctx = context(load(form), read_image(IMAGE))
    with pytest.raises(UsageError, match="give encode the pixels"):
        conditioning.pixels(replace(ctx, inputs={}))
    with pytest.raises(UsageError, match="denoise needs image_latents"):
        conditioning.given_latents(replace(ctx, inputs={}))
    wrong = {"image_latents": torch.zeros(1, 1, 4, 8, 12)}
    with pytest.raises(UsageError, match=r"\(1, 1, 4, 8, 12\); needed is \(1, [34], 4"):
        conditioning.given_latents(replace(ctx, inputs=wrong))
