"""Whole videos from the seed alone, against upstream's pipelines on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.models.hunyuanvideo.upstream import picture, pipeline_13b, pipeline_15, run
from tests.tolerances import TOLERANCES
from tpuport.errors import UsageError

ATOL = TOLERANCES["video float32"]
SHAPE = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 3}
PROMPT = 'a fox reads "slow down" on a sign'
PLAIN = "two pandas play chess in the rain while a long train of cars goes by"
NEGATIVE = "blur"


@pytest.fixture(scope="module")
def folder(hunyuanvideo_folders: dict[str, Path]) -> Path:
    return hunyuanvideo_folders["1.5"]


@pytest.fixture(scope="module")
def load(
    hunyuanvideo_folders: dict[str, Path], cache_dir: Path
) -> Callable[..., tpuport.core.run.session.Session]:
    def open_session(form: str = "1.5", **options: Any) -> Any:
        return tpuport.load(
            "hunyuanvideo",
            weights=hunyuanvideo_folders[form],
            variant="demo" if form == "1.5" else "demo-13b",
            cache_dir=cache_dir,
            **options,
        )

    return open_session


def largest(ours: Any, theirs: dict[str, Any]) -> float:
    """The largest difference in frames and latents, which must have one shape."""
    assert ours.frames.shape == theirs["frames"].shape
    assert ours.latents.shape == theirs["latents"].shape
    frames = float(np.abs(ours.frames - theirs["frames"]).max())
    return max(frames, float((ours.latents - theirs["latents"]).abs().max()))


@pytest.mark.parametrize("prompt", [PROMPT, PLAIN], ids=["glyphs", "no glyphs"])
def test_text_to_video(prompt: str, load: Any, folder: Path) -> None:
    with load() as session:
        ours = session.generate(prompt, negative_prompt=NEGATIVE, seed=7, **SHAPE)
    theirs = run(
        pipeline_15(folder), 7, prompt=prompt, negative_prompt=NEGATIVE, **SHAPE
    )
    assert largest(ours, theirs) <= ATOL


@pytest.mark.parametrize("seed", [5, [5, 6]], ids=["one seed", "a seed each"])
def test_two_videos_with_texts_of_other_lengths(
    seed: int | list[int], load: Any, folder: Path
) -> None:
    prompts = [PROMPT, PLAIN]
    with load() as session:
        ours = session.generate(prompts, seed=seed, **SHAPE)
        if isinstance(seed, list):
            alone = session.generate(prompts[0], seed=seed[0], **SHAPE)
            assert np.abs(alone.frames[0] - ours.frames[0]).max() <= ATOL
    theirs = run(pipeline_15(folder), seed, prompt=prompts, **SHAPE)
    assert largest(ours, theirs) <= ATOL


def test_image_to_video_takes_its_size_from_the_image(load: Any, folder: Path) -> None:
    image = picture()
    asked = {k: v for k, v in SHAPE.items() if k not in ("height", "width")}
    with load() as session:
        ours = session.generate(PROMPT, image=image, seed=7, **asked)
    theirs = run(
        pipeline_15(folder, image=True), 7, prompt=PROMPT, image=image, **asked
    )
    # A size class of 128 x 128 pixels in the shape of 140 x 80.
    assert ours.frames.shape[2:4] == (96, 160)
    assert largest(ours, theirs) <= ATOL


def test_two_videos_from_one_image(load: Any, folder: Path) -> None:
    image = picture((64, 90), seed=1)
    asked = {"num_frames": 5, "num_inference_steps": 2}
    prompts = [PLAIN, PROMPT]
    with load() as session:
        ours = session.generate(prompts, image=image, seed=[3, 4], **asked)
    theirs = run(
        pipeline_15(folder, image=True), [3, 4], prompt=prompts, image=image, **asked
    )
    assert largest(ours, theirs) <= ATOL


def test_two_images_make_what_each_makes_alone(load: Any) -> None:
    images = [picture(seed=1), picture(seed=2)]
    asked = {"num_frames": 5, "num_inference_steps": 2}
    with load() as session:
        both = session.generate([PLAIN] * 2, image=images, seed=[3, 4], **asked)
        second = session.generate(PLAIN, image=images[1], seed=4, **asked)
    assert np.abs(both.frames[1] - second.frames[0]).max() <= ATOL
    assert np.abs(both.frames[0] - both.frames[1]).max() > 100 * ATOL


def test_without_guidance_the_negative_prompt_is_not_run(
    load: Any, folder: Path
) -> None:
    with load() as session:
        ours = session.generate(PROMPT, guidance_scale=1.0, seed=7, **SHAPE)
    theirs = run(pipeline_15(folder, guidance=1.0), 7, prompt=PROMPT, **SHAPE)
    assert largest(ours, theirs) <= ATOL
    (step,) = [r for r in ours.report.stages[1].attention if r["query"][2] > 60][:1]
    assert step["query"][0] == 1


def test_flow_shift_steps_and_frames_off_the_defaults(load: Any, folder: Path) -> None:
    asked = {"height": 48, "width": 64, "num_frames": 13, "num_inference_steps": 5}
    with load() as session:
        ours = session.generate(PROMPT, flow_shift=2.5, seed=1, **asked)
    pipe = pipeline_15(folder)
    pipe.scheduler.set_shift(2.5)
    assert largest(ours, run(pipe, 1, prompt=PROMPT, **asked)) <= ATOL


def test_embeddings_and_latents_in_place_of_prompts_and_a_seed(
    load: Any, folder: Path
) -> None:
    pipe = pipeline_15(folder, guidance=1.0)
    names = ("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2")
    embeds = dict(
        zip(
            (*names, "prompt_embeds_mask_2"),
            pipe.encode_prompt(PROMPT, device="cpu"),
            strict=True,
        )
    )
    latents = torch.randn(1, 32, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    with load() as session:
        ours = session.generate(
            **embeds, latents=latents, guidance_scale=1.0, seed=9, **SHAPE
        )
        with pytest.raises(UsageError, match="without prompt_embeds_mask_2"):
            session.generate(**{n: embeds[n] for n in names}, **SHAPE)
    theirs = run(pipe, 9, **embeds, latents=latents, **SHAPE)
    assert largest(ours, theirs) <= ATOL


def test_13b_with_its_guidance_as_an_input(
    load: Any, hunyuanvideo_folders: dict[str, Path]
) -> None:
    pipe = pipeline_13b(hunyuanvideo_folders["13b"])
    with load("13b") as session:
        for scale in (6.0, 2.0):
            ours = session.generate(PROMPT, guidance_scale=scale, seed=7, **SHAPE)
            theirs = run(pipe, 7, prompt=PROMPT, guidance_scale=scale, **SHAPE)
            assert largest(ours, theirs) <= ATOL


def test_13b_with_true_guidance_and_two_videos(
    load: Any, hunyuanvideo_folders: dict[str, Path]
) -> None:
    pipe = pipeline_13b(hunyuanvideo_folders["13b"])
    prompts, negative = [PROMPT, PLAIN], [NEGATIVE, NEGATIVE]
    with load("13b") as session:
        ours = session.generate(
            prompts, negative_prompt=negative, true_cfg_scale=3.0, seed=[7, 8], **SHAPE
        )
    theirs = run(
        pipe,
        [7, 8],
        prompt=prompts,
        negative_prompt=negative,
        true_cfg_scale=3.0,
        **SHAPE,
    )
    assert largest(ours, theirs) <= ATOL


def test_meanflow_takes_the_next_time_as_well(
    folder: Path, cache_dir: Path, tmp_path: Path
) -> None:
    """The step-distilled form: two times, no guidance, from an image."""
    import json
    import shutil

    from diffusers import HunyuanVideo15Transformer3DModel

    distilled = tmp_path / "distilled"
    shutil.copytree(folder, distilled)
    config = json.loads((folder / "transformer" / "config.json").read_text())
    torch.manual_seed(0)
    HunyuanVideo15Transformer3DModel.from_config(
        {**config, "use_meanflow": True}
    ).save_pretrained(distilled / "transformer")
    guider = distilled / "guider" / "guider_config.json"
    values = json.loads(guider.read_text())
    guider.write_text(json.dumps({**values, "guidance_scale": 1.0}))
    asked = {"num_frames": 5, "num_inference_steps": 4}
    image = picture()
    with tpuport.load(
        "hunyuanvideo", weights=distilled, cache_dir=cache_dir
    ) as session:
        ours = session.generate(PROMPT, image=image, seed=2, **asked)
        with pytest.raises(UsageError, match="distilled to 4, 8, 12 steps"):
            session.generate(PROMPT, image=image, num_inference_steps=5)
        with pytest.raises(UsageError, match="takes no other than 1"):
            session.generate(PROMPT, image=image, guidance_scale=6.0, **asked)
    pipe = pipeline_15(distilled, guidance=1.0, image=True)
    assert largest(ours, run(pipe, 2, prompt=PROMPT, image=image, **asked)) <= ATOL


def test_tiled_decode_is_upstreams(load: Any, folder: Path) -> None:
    asked = {"height": 272, "width": 320, "num_frames": 5, "num_inference_steps": 1}
    with load() as session:
        ours = session.generate(PLAIN, vae_tiling="on", seed=1, **asked)
        whole = session.generate(PLAIN, vae_tiling="off", seed=1, **asked)
    pipe = pipeline_15(folder)
    pipe.vae.enable_tiling()
    theirs = run(pipe, 1, prompt=PLAIN, **asked)
    assert largest(ours, theirs) <= ATOL
    # 17 x 20 latents in four tiles of as many sizes; whole, in one.
    assert len(ours.report.stages[2].compiles) == 4
    assert len(whole.report.stages[2].compiles) == 1
    assert np.abs(ours.frames - whole.frames).max() > ATOL
