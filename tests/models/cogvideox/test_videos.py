"""Whole videos from the seed alone, against ``CogVideoXPipeline`` on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import CogVideoXPipeline

import tpuport
from tests.models.conftest import frames_and_latents, generators_of
from tests.tolerances import TOLERANCES
from tpuport.core.run.session import Session
from tpuport.errors import UsageError

ATOL = TOLERANCES["video float32"]
SHAPE = {"height": 48, "width": 64, "num_frames": 9}
PROMPT = "a fox runs through snow"
TOKENS = 20


def upstream(
    folder: Path,
    seeds: int | list[int] = 7,
    dynamic: bool = False,
    tokens: int = TOKENS,
    **kwargs: Any,
) -> tuple[np.ndarray, torch.Tensor]:
    """Frames and latents of the upstream pipeline."""
    pipe = CogVideoXPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return frames_and_latents(
        pipe,
        **{**SHAPE, "num_inference_steps": 3, "guidance_scale": 6.0, **kwargs},
        use_dynamic_cfg=dynamic,
        generator=generators_of(seeds),
        max_sequence_length=tokens,
    )


@pytest.fixture(scope="module")
def load(
    checkpoints: Callable[[str], Path], cache: Path
) -> Iterator[Callable[..., Session]]:
    """The session of a form, and of the variant whose defaults it has."""
    opened: dict[tuple[str, str | None], Session] = {}
    with ExitStack() as stack:

        def get(form: str, variant: str | None = None) -> Session:
            if (form, variant) not in opened:
                session = tpuport.load(
                    "cogvideox",
                    weights=checkpoints(form),
                    cache_dir=cache,
                    variant=variant,
                )
                opened[form, variant] = stack.enter_context(session)
            return opened[form, variant]

        yield get


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
    asked = {**SHAPE, "num_frames": frames, "num_inference_steps": 3}
    session = load(form, variant=form)
    ours = session.generate(prompt=PROMPT, negative_prompt="blur", seed=7, **asked)
    frames_, latents = upstream(
        checkpoints(form),
        prompt=PROMPT,
        negative_prompt="blur",
        dynamic=dynamic,
        num_frames=frames,
    )
    assert ours.frames.dtype == np.float32
    assert ours.frames.shape == (1, frames, 48, 64, 3)
    assert np.abs(ours.frames - frames_).max() <= ATOL
    assert float((ours.latents - latents).abs().max()) <= ATOL


def test_a_size_other_than_the_trained_one(
    load: Any, checkpoints: Callable[[str], Path]
) -> None:
    shape = {**SHAPE, "num_frames": 17}
    ours = load("2b").generate(PROMPT, seed=3, num_inference_steps=2, **shape)
    frames, _ = upstream(
        checkpoints("2b"), 3, prompt=PROMPT, num_inference_steps=2, **shape
    )
    assert np.abs(ours.frames - frames).max() <= ATOL


def test_other_samplers_and_guidance(
    load: Any, checkpoints: Callable[[str], Path]
) -> None:
    session = load("5b", variant="5b")
    unguided = session.generate(
        PROMPT, seed=7, num_inference_steps=2, guidance_scale=1.0, **SHAPE
    )
    plain = session.generate(
        PROMPT, seed=7, num_inference_steps=3, dynamic_cfg=False, **SHAPE
    )
    frames, _ = upstream(
        checkpoints("5b"), prompt=PROMPT, guidance_scale=1.0, num_inference_steps=2
    )
    assert np.abs(unguided.frames - frames).max() <= ATOL
    frames, _ = upstream(checkpoints("5b"), prompt=PROMPT, dynamic=False)
    assert np.abs(plain.frames - frames).max() <= ATOL


def test_another_number_of_text_tokens(
    load: Any, checkpoints: Callable[[str], Path]
) -> None:
    asked = {"num_inference_steps": 2, **SHAPE}
    ours = load("5b").generate(PROMPT, seed=7, max_sequence_length=30, **asked)
    frames, _ = upstream(
        checkpoints("5b"), prompt=PROMPT, dynamic=True, tokens=30, **asked
    )
    assert np.abs(ours.frames - frames).max() <= ATOL
    with pytest.raises(UsageError, match="20 text tokens"):
        load("2b").generate(PROMPT, max_sequence_length=30, **SHAPE)


@pytest.mark.parametrize("steps", [1, pytest.param(7, marks=pytest.mark.sweep)])
def test_one_step_and_an_odd_number_of_steps(
    steps: int, load: Any, checkpoints: Callable[[str], Path]
) -> None:
    """Three are those of the videos above."""
    asked = {"num_inference_steps": steps, **SHAPE}
    ours = load("5b").generate(PROMPT, seed=7, **asked)
    frames, _ = upstream(checkpoints("5b"), prompt=PROMPT, dynamic=True, **asked)
    assert np.abs(ours.frames - frames).max() <= ATOL


def test_a_batch_of_prompts_with_one_seed_or_one_each(
    load: Any, checkpoints: Callable[[str], Path]
) -> None:
    prompts = [PROMPT, "a boat on a river at night"]
    session = load("5b")
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
        "latents": torch.randn(1, 3, 4, 6, 8, generator=draw),
    }
    session = load("2b")
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
    session = load("2b")
    ours = session.generate(
        prompt_embeds=embeds, num_inference_steps=2, seed=7, **SHAPE
    )
    frames, _ = upstream(checkpoints("2b"), prompt_embeds=embeds, num_inference_steps=2)
    assert np.abs(ours.frames - frames).max() <= ATOL


def test_several_seeds_one_by_one_equal_each_alone_and_compile_once(
    checkpoints: Callable[[str], Path], cache: Path
) -> None:
    with tpuport.load(weights=checkpoints("5b"), cache_dir=cache) as session:
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
    session = load("1.5-5b")
    request = session.request(prompt=PROMPT, seed=7, num_inference_steps=2, **SHAPE)
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for stage in ("encode", "denoise", "decode"):
        before = theirs
        ours, _ = session.run_stage(stage, request, before)
        theirs, report = session.run_stage(stage, request, before, backend="diffusers")
        assert report.backend == "diffusers"
        assert ours.keys() == theirs.keys()
        for name in ours:
            difference = np.asarray(ours[name]) - np.asarray(theirs[name])
            assert np.abs(difference).max() <= ATOL, (stage, name)
