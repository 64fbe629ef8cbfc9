"""Videos from an image and a seed, against ``CogVideoXImageToVideoPipeline``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import CogVideoXImageToVideoPipeline
from PIL import Image

import tpuport
from tests.models.conftest import (
    IMAGE_FORMS,
    frames_and_latents,
    generators_of,
    pictures,
)
from tests.tolerances import TOLERANCES
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.sources import read_image
from tpuport.core.run.session import Session

ATOL = TOLERANCES["video float32"]
PROMPT = "a fox runs through snow"
SHAPE: dict[str, Any] = {"height": 64, "width": 96}
TOKENS = 20


def upstream(
    folder: Path,
    images: np.ndarray,
    seeds: int | list[int] = 7,
    dtype: torch.dtype = torch.float32,
    **asked: Any,
) -> tuple[np.ndarray, torch.Tensor]:
    """Frames and latents of the upstream pipeline; one image per prompt."""
    pipe = CogVideoXImageToVideoPipeline.from_pretrained(folder, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    settings: dict[str, Any] = {
        "prompt": PROMPT,
        "num_inference_steps": 3,
        "guidance_scale": 6.0,
        "use_dynamic_cfg": True,
        **SHAPE,
        **asked,
    }
    return frames_and_latents(
        pipe,
        image=[Image.fromarray(image) for image in images],
        **settings,
        generator=generators_of(seeds),
        max_sequence_length=TOKENS,
    )


@pytest.fixture(scope="module", params=IMAGE_FORMS)
def session(
    request: Any, checkpoints: Callable[[str], Path], cache: Path
) -> Iterator[Session]:
    with tpuport.load(weights=checkpoints(request.param), cache_dir=cache) as opened:
        yield opened


#: The form with ``ofs`` and padded frames by default, the other one in a sweep.
one_form = pytest.mark.parametrize(
    "session",
    [pytest.param("5b-i2v", marks=pytest.mark.sweep), "1.5-5b-i2v"],
    indirect=True,
)


def assert_same(ours: Any, frames: np.ndarray, latents: torch.Tensor) -> None:
    assert ours.frames.shape == frames.shape
    assert np.abs(ours.frames - frames).max() <= ATOL
    assert float((ours.latents - latents).abs().max()) <= ATOL


# The second frame count of the first form is one that its learned positions are not
# for; the second form pads 5 latent frames to 6, and 3 to 4.
@pytest.mark.parametrize("num_frames", [9, 17])
def test_a_video_from_an_image(session: Session, num_frames: int) -> None:
    asked: dict[str, Any] = {"num_frames": num_frames, "negative_prompt": "blur"}
    image = pictures(1)
    ours = session.generate(
        PROMPT, image=image[0], seed=7, num_inference_steps=3, **SHAPE, **asked
    )
    assert ours.request.task == "i2v"
    assert_same(ours, *upstream(session.checkpoint.folder, image, **asked))


@one_form
def test_another_image_another_seed_and_no_guidance(session: Session) -> None:
    asked: dict[str, Any] = {"num_frames": 9, "guidance_scale": 1.0}
    image = pictures(1, 64, 96, seed=5)
    ours = session.generate(
        PROMPT,
        image=Image.fromarray(image[0]),
        seed=3,
        num_inference_steps=3,
        **SHAPE,
        **asked,
    )
    assert_same(ours, *upstream(session.checkpoint.folder, image, 3, **asked))


@one_form
@pytest.mark.parametrize(
    "seed",
    [
        # One seed's draws for two videos are in ``test_conditioning.py`` too.
        pytest.param(5, id="one seed", marks=pytest.mark.sweep),
        pytest.param([5, 6], id="a seed each"),
    ],
)
def test_a_batch_of_images(session: Session, seed: int | list[int]) -> None:
    prompts = [PROMPT, "a boat on a river at night"]
    images = pictures(2)
    ours = session.generate(
        prompts,
        image=list(images),
        seed=seed,
        num_frames=9,
        num_inference_steps=2,
        **SHAPE,
    )
    frames, latents = upstream(
        session.checkpoint.folder,
        images,
        seed,
        prompt=prompts,
        num_frames=9,
        num_inference_steps=2,
    )
    assert_same(ours, frames, latents)
    # One image for both is that image twice.
    one = session.generate(
        prompts,
        image=images[0],
        seed=seed,
        num_frames=9,
        num_inference_steps=2,
        **SHAPE,
    )
    assert np.abs(one.frames[0] - ours.frames[0]).max() <= ATOL
    assert np.abs(one.frames[1] - ours.frames[1]).max() > ATOL


def test_initial_latents_in_place_of_the_seeds_noise(session: Session) -> None:
    # The image is sampled and the sampler draws from the seed all the same.
    channels, frames = (
        4,
        4 if session.checkpoint.config("transformer").get("patch_size_t") else 3,
    )
    noise = torch.randn(
        1, frames, channels, 8, 12, generator=torch.Generator().manual_seed(0)
    )
    image = pictures(1)
    ours = session.generate(
        PROMPT,
        image=image[0],
        latents=noise,
        seed=2,
        num_frames=9,
        num_inference_steps=3,
        **SHAPE,
    )
    frames_, latents = upstream(
        session.checkpoint.folder, image, 2, latents=noise, num_frames=9
    )
    assert_same(ours, frames_, latents)


def test_upstreams_own_code_as_a_backend_of_any_stage(session: Session) -> None:
    source = read_image([*pictures(2)])
    request = session.request(
        prompt=[PROMPT, "a boat"],
        seed=7,
        num_frames=9,
        num_inference_steps=2,
        source=source,
        **SHAPE,
    )
    theirs: dict[str, Any] = {"image": source.for_videos(2)}
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


def test_three_stages_on_files_are_one_run_in_memory(
    checkpoints: Callable[[str], Path], cache: Path, tmp_path: Path
) -> None:
    folder = checkpoints("1.5-5b-i2v")
    image = pictures(1)[0]
    asked: dict[str, Any] = {"num_frames": 9, "num_inference_steps": 2, **SHAPE}
    with tpuport.load(weights=folder, cache_dir=cache) as session:
        whole = session.generate(PROMPT, image=image, seed=4, **asked)
        source = read_image(image)
        request = session.request(prompt=PROMPT, seed=4, source=source, **asked)
        session.open_run(tmp_path / "run", request)
    made: dict[str, Any] = {}
    for stage in ("encode", "denoise", "decode"):
        # Nothing but the files goes from one stage to the next.
        with tpuport.load(weights=folder, cache_dir=cache) as another:
            given = source if stage == "encode" else None
            run = RunDirectory.open(tmp_path / "run")
            made, _ = another.run_stage_in(run, stage, source=given)
    assert np.array_equal(made["frames"], whole.frames)


def test_bfloat16_draws_are_upstreams(
    checkpoints: Callable[[str], Path], cache: Path
) -> None:
    # Draws out of step, in number or in size, would leave no noise in common.
    folder = checkpoints("5b-i2v")
    source = read_image(pictures(1)[0])
    with tpuport.load(weights=folder, dtype="bfloat16", cache_dir=cache) as session:
        request = session.request(
            prompt=PROMPT,
            seed=7,
            num_frames=9,
            num_inference_steps=2,
            source=source,
            **SHAPE,
        )
        pixels = {"image": source.for_videos(1)}
        ours, _ = session.run_stage("encode", request, pixels)
        theirs, _ = session.run_stage("encode", request, pixels, backend="diffusers")
        assert_noise_in_common(ours["image_latents"], theirs["image_latents"])
        latents, _ = session.run_stage("denoise", request, ours)
    _, whole = upstream(
        folder,
        pictures(1),
        dtype=torch.bfloat16,
        num_frames=9,
        num_inference_steps=2,
    )
    assert_noise_in_common(latents["latents"], whole)


def assert_noise_in_common(ours: torch.Tensor, upstream: torch.Tensor) -> None:
    """Two runs in bfloat16 differ by rounding, two noises by as much as they are."""
    error = float((ours.float() - upstream.float()).std())
    assert error <= 0.05 * float(upstream.float().std())


def test_a_mesh_gives_what_one_device_gives(
    checkpoints: Callable[[str], Path], cache: Path
) -> None:
    """Up to the latents; decoding them knows nothing of the image."""
    source = read_image(pictures(1)[0])
    made = []
    for mesh in ((1, 1, 1), (2, 2, 2)):
        with tpuport.load(
            weights=checkpoints("1.5-5b-i2v"), mesh=mesh, cache_dir=cache
        ) as session:
            request = session.request(
                prompt=PROMPT,
                seed=1,
                num_frames=9,
                num_inference_steps=2,
                source=source,
                **SHAPE,
            )
            pixels = {"image": source.for_videos(1)}
            encoded, _ = session.run_stage("encode", request, pixels)
            latents, _ = session.run_stage("denoise", request, encoded)
        made.append({**encoded, **latents})
    one, many = made
    for name in ("image_latents", "latents"):
        difference = np.asarray(many[name]) - np.asarray(one[name])
        assert np.abs(difference).max() <= TOLERANCES["mesh float32"], name
