"""Videos from a video, against ``CogVideoXVideoToVideoPipeline`` as recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import CogVideoXVideoToVideoPipeline

import tpuport
from tests.models.cogvideox.videos import (
    ALL,
    PROMPT,
    SIZE,
    TOKENS,
    asked_of,
    check_video,
    images,
)
from tests.models.conftest import pictures
from tests.tolerances import TOLERANCES
from tpuport.core.files.sources import read_video
from tpuport.core.run.session import Session
from tpuport.errors import UsageError

ATOL = TOLERANCES["video float32"]
SHAPE: dict[str, Any] = {**SIZE, "num_frames": 9}


def pipeline(folder: Path) -> Any:
    # Also from a checkpoint that was saved for text to video.
    pipe = CogVideoXVideoToVideoPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def load(checkpoints: Callable[[str], Path], cache: Path) -> Callable[[str], Session]:
    opened: dict[str, Session] = {}

    def get(form: str) -> Session:
        if form not in opened:
            opened[form] = tpuport.load(weights=checkpoints(form), cache_dir=cache)
        return opened[form]

    return get


@pytest.mark.parametrize("name", asked_of("-of-"))
def test_a_video_from_a_video(name: str, load: Callable[[str], Session]) -> None:
    """Of which only the first frames are used."""
    ours = check_video(name, load(name.partition("-")[0]))
    assert ours.request.task == "v2v"


def test_more_than_one_chunk_and_no_guidance(load: Callable[[str], Session]) -> None:
    name = "5b-v2v-two-chunks"
    frames = images(ALL[f"cogvideox-{name}"].options()["video"])
    check_video(name, load("5b"), video=frames)


@pytest.mark.parametrize("name", asked_of("v2v-two-videos"))
def test_a_batch_of_prompts_for_one_video(
    name: str, load: Callable[[str], Session]
) -> None:
    check_video(name, load("5b"))


@torch.no_grad()
def test_patches_in_time_pad_the_video_in_front(
    load: Callable[[str], Session],
) -> None:
    # Upstream's pipeline refuses an odd number of latent frames for 1.5, and every
    # legal frame count has one. It is asked to denoise the latents that it would have
    # made, with their first frame repeated where text to video has its padding.
    session = load("1.5-5b")
    folder = session.checkpoint.folder
    video = pictures(17, 48, 64)
    pipe = pipeline(folder)
    with pytest.raises(ValueError, match="must be divisible by"):
        pipe(images(video), PROMPT, **SIZE)
    steps, strength = 5, 0.5
    ours = session.generate(
        PROMPT,
        video=video,
        seed=7,
        num_frames=17,
        num_inference_steps=steps,
        strength=strength,
        **SIZE,
    )
    generator = torch.Generator().manual_seed(7)
    pixels = pipe.video_processor.preprocess_video(images(video), **SIZE)
    clean = 0.7 * pipe.vae.encode(pixels).latent_dist.sample(generator)
    clean = clean.permute(0, 2, 1, 3, 4)
    clean = torch.cat([clean[:, :1], clean], dim=1)
    noise = torch.randn(clean.shape, generator=generator)
    pipe.scheduler.set_timesteps(steps)
    first = pipe.scheduler.timesteps[steps - 2 :][:1]
    latents = pipe(
        latents=pipe.scheduler.add_noise(clean, noise, first),
        prompt=PROMPT,
        num_inference_steps=steps,
        strength=strength,
        use_dynamic_cfg=True,
        generator=generator,
        max_sequence_length=TOKENS,
        output_type="latent",
        **SIZE,
    ).frames
    assert float((ours.latents - latents).abs().max()) <= ATOL
    decoded = pipe.decode_latents(latents[:, 1:])
    frames = pipe.video_processor.postprocess_video(decoded, output_type="np")
    assert ours.frames.shape == frames.shape == (1, 17, 48, 64, 3)
    assert np.abs(ours.frames - frames).max() <= ATOL


@pytest.mark.parametrize(
    "form", [pytest.param("2b", marks=pytest.mark.sweep), "1.5-5b"]
)
def test_upstreams_own_code_as_a_backend_of_any_stage(
    form: str, load: Callable[[str], Session]
) -> None:
    session = load(form)
    source = read_video(pictures(9)).first(9)
    request = session.request(
        prompt=[PROMPT, "a boat"],
        seed=[7, 8],
        num_inference_steps=5,
        strength=0.5,
        source=source,
        **SHAPE,
    )
    theirs: dict[str, Any] = {"video": source.for_videos(2)}
    for stage in ("encode", "denoise", "decode"):
        before = theirs
        ours, _ = session.run_stage(stage, request, before)
        theirs, report = session.run_stage(stage, request, before, backend="diffusers")
        assert report.backend == "diffusers"
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert ours[name].shape == theirs[name].shape
            difference = np.asarray(ours[name]) - np.asarray(theirs[name])
            assert np.abs(difference).max() <= ATOL, (stage, name)


def test_a_video_and_initial_latents_exclude_each_other(
    load: Callable[[str], Session],
) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        load("2b").generate(
            PROMPT,
            video=pictures(9),
            latents=torch.zeros(1, 3, 4, 6, 8),
            num_inference_steps=2,
            **SHAPE,
        )
