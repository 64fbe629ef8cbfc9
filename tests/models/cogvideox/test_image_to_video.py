"""Videos from an image, against ``CogVideoXImageToVideoPipeline`` as recorded."""

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
from tests.models.cogvideox.videos import ALL, PROMPT, TOKENS, check_video, images
from tests.models.cogvideox.videos import IMAGE_SIZE as SHAPE
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


def form_of(session: Session) -> str:
    return session.checkpoint.folder.name.removeprefix("cogvideox-")


@pytest.mark.parametrize("num_frames", [9, 17])
def test_a_video_from_an_image(session: Session, num_frames: int) -> None:
    ours = check_video(f"{form_of(session)}-{num_frames}-frames", session)
    assert ours.request.task == "i2v"


@one_form
def test_another_image_another_seed_and_no_guidance(session: Session) -> None:
    name = f"{form_of(session)}-no-guidance"
    image = ALL[f"cogvideox-{name}"].options()["image"]
    check_video(name, session, image=Image.fromarray(image))


@one_form
@pytest.mark.parametrize(
    "seeds", [pytest.param("one-seed", marks=pytest.mark.sweep), "two-seeds"]
)
def test_a_batch_of_images(session: Session, seeds: str) -> None:
    name = f"{form_of(session)}-two-videos-{seeds}"
    ours = check_video(name, session)
    # One image for both is that image twice.
    asked = ALL[f"cogvideox-{name}"].options()
    one = session.generate(**asked | {"image": asked["image"][0]})
    assert np.abs(one.frames[0] - ours.frames[0]).max() <= ATOL
    assert np.abs(one.frames[1] - ours.frames[1]).max() > ATOL


def test_initial_latents_in_place_of_the_seeds_noise(session: Session) -> None:
    check_video(f"{form_of(session)}-latents", session)


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
    pipe = CogVideoXImageToVideoPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    _, whole = frames_and_latents(
        pipe,
        prompt=PROMPT,
        image=images(pictures(1)),
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=6.0,
        use_dynamic_cfg=True,
        generator=generators_of(7),
        max_sequence_length=TOKENS,
        **SHAPE,
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
