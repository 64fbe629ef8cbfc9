"""Whole videos from the seed alone, against ``CogVideoXPipeline`` as recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuport
from tests.models.cogvideox.videos import PROMPT, SIZE, VIDEOS, check_video, expected
from tests.models.recorded import FOLDER
from tests.tolerances import TOLERANCES
from tpuport.core.run.session import Session
from tpuport.errors import UsageError

ATOL = TOLERANCES["video float32"]
SHAPE = {**SIZE, "num_frames": 9}


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


# Live: one whole video; ``-m sweep`` all of them.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.sweep] * (n != "cogvideox-5b"))
        for n in VIDEOS
    ],
)
def test_a_record_is_what_upstream_makes(
    name: str, checkpoints: Callable[[str], Path]
) -> None:
    folder = checkpoints(VIDEOS[name].checkpoint)
    expected(name, folder).check_live(VIDEOS[name].live(folder))


def test_there_is_a_record_of_each_video_and_no_other() -> None:
    assert {path.stem for path in FOLDER.glob("cogvideox*")} == set(VIDEOS)


@pytest.mark.parametrize("form", ["2b", "5b", "1.5-5b"])
def test_a_video_from_the_seed(form: str, load: Any) -> None:
    ours = check_video(form, load(form, variant=form))
    assert ours.frames.dtype == np.float32
    assert ours.frames.shape == (1, 17 if form == "1.5-5b" else 9, 48, 64, 3)


def test_a_size_other_than_the_trained_one(load: Any) -> None:
    check_video("2b-17-frames", load("2b"))


def test_other_samplers_and_guidance(load: Any) -> None:
    session = load("5b", variant="5b")
    check_video("5b-no-guidance", session)
    check_video("5b-constant-guidance", session, dynamic_cfg=False)


def test_another_number_of_text_tokens(load: Any) -> None:
    check_video("5b-30-tokens", load("5b"))
    with pytest.raises(UsageError, match="20 text tokens"):
        load("2b").generate(PROMPT, max_sequence_length=30, **SHAPE)


@pytest.mark.parametrize("steps", [1, pytest.param(7, marks=pytest.mark.sweep)])
def test_one_step_and_an_odd_number_of_steps(steps: int, load: Any) -> None:
    """Three are those of the videos above."""
    check_video(f"5b-{steps}-steps", load("5b"))


@pytest.mark.parametrize("seeds", ["one-seed", "two-seeds"])
def test_a_batch_of_prompts_with_one_seed_or_one_each(seeds: str, load: Any) -> None:
    check_video(f"5b-two-videos-{seeds}", load("5b"))


def test_embeddings_and_latents_in_place_of_prompts_and_seeds(load: Any) -> None:
    session = load("2b")
    ours = check_video("2b-embeddings", session)
    # DDIM draws no further noise, so with latents given the seed has no say.
    other = session.generate(
        **VIDEOS["cogvideox-2b-embeddings"].options() | {"seed": 2}
    )
    assert np.array_equal(ours.frames, other.frames)


def test_negative_embeddings_left_out_are_encoded_from_the_negative_prompt(
    load: Any,
) -> None:
    check_video("2b-prompt-embeds", load("2b"))


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
