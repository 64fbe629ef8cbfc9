"""Whole videos from the seed alone, against ``CogVideoXPipeline`` on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import CogVideoXPipeline

import tpuport
from tests.models.conftest import frames_and_latents, generators_of
from tests.tolerances import TOLERANCES
from tpuport.errors import UsageError

ATOL = TOLERANCES["video float32"]
SHAPE = {"height": 64, "width": 96, "num_frames": 9}
PROMPT = "a fox runs through snow"
TOKENS = 20


def upstream(
    folder: Path, seeds: int | list[int] = 7, dynamic: bool = False, **kwargs: Any
) -> tuple[np.ndarray, torch.Tensor]:
    """Frames and latents of the upstream pipeline."""
    pipe = CogVideoXPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return frames_and_latents(
        pipe,
        **{**SHAPE, "num_inference_steps": 4, "guidance_scale": 6.0, **kwargs},
        use_dynamic_cfg=dynamic,
        generator=generators_of(seeds),
        max_sequence_length=TOKENS,
    )


@pytest.fixture
def load(
    checkpoints: Callable[[str], Path], cache: Path
) -> Callable[..., tpuport.core.run.session.Session]:
    def open_session(form: str, **kwargs: Any) -> Any:
        return tpuport.load(
            "cogvideox", weights=checkpoints(form), cache_dir=cache, **kwargs
        )

    return open_session


@pytest.mark.parametrize(
    ("form", "dynamic", "frames"),
    [("2b", False, 9), ("5b", True, 9), ("1.5-5b", True, 17)],
)
def test_a_video_from_the_seed(
    form: str,
    dynamic: bool,
    frames: int,
    load: Any,
    checkpoints: Callable[[str], Path],
) -> None:
    asked = {**SHAPE, "num_frames": frames, "num_inference_steps": 4}
    with load(form, variant=form) as session:
        ours = session.generate(prompt=PROMPT, negative_prompt="blur", seed=7, **asked)
    frames_, latents = upstream(
        checkpoints(form),
        prompt=PROMPT,
        negative_prompt="blur",
        dynamic=dynamic,
        num_frames=frames,
    )
    assert ours.frames.dtype == np.float32
    assert ours.frames.shape == (1, frames, 64, 96, 3)
    assert np.abs(ours.frames - frames_).max() <= ATOL
    assert float((ours.latents - latents).abs().max()) <= ATOL


def test_a_size_other_than_the_trained_one(
    load: Any, checkpoints: Callable[[str], Path]
) -> None:
    shape = {"height": 48, "width": 64, "num_frames": 17}
    with load("2b") as session:
        ours = session.generate(PROMPT, seed=3, num_inference_steps=2, **shape)
    frames, _ = upstream(
        checkpoints("2b"), 3, prompt=PROMPT, num_inference_steps=2, **shape
    )
    assert np.abs(ours.frames - frames).max() <= ATOL


def test_other_samplers_and_guidance(
    load: Any, checkpoints: Callable[[str], Path]
) -> None:
    with load("5b", variant="5b") as session:
        unguided = session.generate(
            PROMPT, seed=7, num_inference_steps=4, guidance_scale=1.0, **SHAPE
        )
        plain = session.generate(
            PROMPT, seed=7, num_inference_steps=4, dynamic_cfg=False, **SHAPE
        )
    frames, _ = upstream(checkpoints("5b"), prompt=PROMPT, guidance_scale=1.0)
    assert np.abs(unguided.frames - frames).max() <= ATOL
    frames, _ = upstream(checkpoints("5b"), prompt=PROMPT, dynamic=False)
    assert np.abs(plain.frames - frames).max() <= ATOL


def test_another_number_of_text_tokens(
    load: Any, checkpoints: Callable[[str], Path]
) -> None:
    with load("5b") as session:
        ours = session.generate(
            PROMPT, seed=7, num_inference_steps=2, max_sequence_length=30, **SHAPE
        )
    pipe = CogVideoXPipeline.from_pretrained(checkpoints("5b"))
    pipe.set_progress_bar_config(disable=True)
    frames = pipe(
        PROMPT,
        **SHAPE,
        num_inference_steps=2,
        guidance_scale=6.0,
        use_dynamic_cfg=True,
        generator=torch.Generator().manual_seed(7),
        max_sequence_length=30,
        output_type="np",
    ).frames
    assert np.abs(ours.frames - frames).max() <= ATOL
    with load("2b") as session, pytest.raises(UsageError, match="20 text tokens"):
        session.generate(PROMPT, max_sequence_length=30, **SHAPE)


def test_one_step_and_an_odd_number_of_steps(
    load: Any, checkpoints: Callable[[str], Path]
) -> None:
    with load("5b") as session:
        for steps in (1, 3, 7):
            ours = session.generate(PROMPT, seed=7, num_inference_steps=steps, **SHAPE)
            frames, _ = upstream(
                checkpoints("5b"),
                prompt=PROMPT,
                dynamic=True,
                num_inference_steps=steps,
            )
            assert np.abs(ours.frames - frames).max() <= ATOL, steps


def test_a_batch_of_prompts_with_one_seed_or_one_each(
    load: Any, checkpoints: Callable[[str], Path]
) -> None:
    prompts = [PROMPT, "a boat on a river at night"]
    with load("5b") as session:
        for seed in (5, [5, 6]):
            ours = session.generate(prompts, seed=seed, num_inference_steps=2, **SHAPE)
            frames, _ = upstream(
                checkpoints("5b"),
                seed,
                prompt=prompts,
                dynamic=True,
                num_inference_steps=2,
            )
            assert ours.frames.shape[0] == 2
            assert np.abs(ours.frames - frames).max() <= ATOL, seed


def test_embeddings_and_latents_in_place_of_prompts_and_seeds(
    load: Any, checkpoints: Callable[[str], Path]
) -> None:
    draw = torch.Generator().manual_seed(0)
    given = {
        "prompt_embeds": torch.randn(1, TOKENS, 32, generator=draw),
        "negative_prompt_embeds": torch.randn(1, TOKENS, 32, generator=draw),
        "latents": torch.randn(1, 3, 4, 8, 12, generator=draw),
    }
    with load("2b") as session:
        ours = session.generate(**given, num_inference_steps=3, seed=1, **SHAPE)
        other = session.generate(**given, num_inference_steps=3, seed=2, **SHAPE)
    frames, _ = upstream(checkpoints("2b"), 1, **given, num_inference_steps=3)
    assert np.abs(ours.frames - frames).max() <= ATOL
    # DDIM draws no further noise, so with latents given the seed has no say.
    assert np.array_equal(ours.frames, other.frames)


def test_negative_embeddings_left_out_are_encoded_from_the_negative_prompt(
    load: Any, checkpoints: Callable[[str], Path]
) -> None:
    embeds = torch.randn(1, TOKENS, 32, generator=torch.Generator().manual_seed(0))
    with load("2b") as session:
        ours = session.generate(
            prompt_embeds=embeds, num_inference_steps=2, seed=7, **SHAPE
        )
    frames, _ = upstream(checkpoints("2b"), prompt_embeds=embeds, num_inference_steps=2)
    assert np.abs(ours.frames - frames).max() <= ATOL


def test_several_seeds_one_by_one_equal_each_alone_and_compile_once(load: Any) -> None:
    with load("5b") as session:
        asked = {"num_inference_steps": 2, **SHAPE}
        alone = [session.generate(PROMPT, seed=s, **asked) for s in (1, 2)]
        assert alone[0].report.stages[1].compiles
        assert not alone[1].report.stages[1].compiles
        request = session.request(
            prompt=[PROMPT, PROMPT], seed=[1, 2], batched=False, **asked
        )
        tensors: dict[str, Any] = {}
        for stage in ("encode", "denoise", "decode"):
            tensors, report = session.run_stage(stage, request, tensors)
            assert not report.compiles
    both = np.concatenate([r.frames for r in alone])
    assert np.array_equal(tensors["frames"], both)


def test_upstreams_own_code_as_a_backend_of_any_stage(load: Any) -> None:
    with load("1.5-5b") as session:
        request = session.request(prompt=PROMPT, seed=7, num_inference_steps=2, **SHAPE)
        ours: dict[str, Any] = {}
        theirs: dict[str, Any] = {}
        for stage in ("encode", "denoise", "decode"):
            before = theirs
            ours, _ = session.run_stage(stage, request, before)
            theirs, report = session.run_stage(
                stage, request, before, backend="diffusers"
            )
            assert report.backend == "diffusers"
            assert ours.keys() == theirs.keys()
            for name in ours:
                difference = np.asarray(ours[name]) - np.asarray(theirs[name])
                assert np.abs(difference).max() <= ATOL, (stage, name)
