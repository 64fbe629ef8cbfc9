"""A request is checked when it is made and is the same after JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tpuport.core.spec.request import MAX_SEED, Request
from tpuport.core.spec.rules import what_fits
from tpuport.core.spec.run_settings import RunSettings, python_words
from tpuport.core.spec.variant import FrameRule, SizeRule
from tpuport.errors import ArtifactError, UsageError
from tpuport.plugins import get_port


def request(**changes: Any) -> Request:
    values: dict[str, Any] = {
        "prompts": ("a cat", "a dog"),
        "negative_prompts": ("", "blurry"),
        "seeds": ((7, 8),),
        "batch_size": 2,
        "height": 480,
        "width": 720,
        "num_frames": 49,
        "fps": 8,
        "num_inference_steps": 50,
        "guidance_scale": 6.0,
        "options": {"scheduler": "ddim"},
    }
    return Request(**{**values, **changes})


def test_a_request_survives_json() -> None:
    asked = request()
    data = json.loads(json.dumps(asked.as_dict()))
    assert Request.from_dict(data, "run.json") == asked


def test_settings_of_another_version_are_refused_by_name() -> None:
    data = request().as_dict()
    data["sizes"] = data.pop("height")
    with pytest.raises(ArtifactError, match=r"no usable settings.height \(it is miss"):
        Request.from_dict(data, "run.json")
    with pytest.raises(ArtifactError, match=r"no usable settings.sizes \(Unexpected"):
        Request.from_dict({**data, "height": 64}, "run.json")


def test_batches_are_slices_of_the_videos() -> None:
    four = request(
        prompts=("a", "b", "c", "d"),
        negative_prompts=("",) * 4,
        seeds=((1,), (2, 3)),
    )
    assert four.batches == 2
    assert [four.prompts[four.slice(i)] for i in range(2)] == [("a", "b"), ("c", "d")]


@pytest.mark.parametrize(
    ("scale", "guided"), [(6.0, True), (1.0, False), (1.0001, True), (0.0, False)]
)
def test_guidance_is_on_above_one(scale: float, guided: bool) -> None:
    assert request(guidance_scale=scale).guided is guided


REFUSED = [
    ({"prompts": (), "negative_prompts": ()}, "no prompt was given"),
    ({"negative_prompts": ("",)}, "1 negative prompts for 2 prompts"),
    ({"batch_size": 0}, "batch size 0 does not divide 2 videos"),
    ({"batch_size": 3}, "batch size 3 does not divide 2 videos"),
    ({"seeds": ((1,), (2,))}, "2 seeds for 1 batches"),
    ({"seeds": ((1, 2, 3),)}, "3 seeds for a batch of 2"),
    ({"seeds": ((),)}, "0 seeds for a batch of 2"),
    ({"seeds": ((-1,),)}, "seed -1 is not in"),
    ({"seeds": ((MAX_SEED + 1,),)}, f"seed {MAX_SEED + 1} is not in"),
    ({"num_inference_steps": 0}, "0 denoising steps"),
    ({"height": 0}, "height 0 must be positive"),
    ({"width": -16}, "width -16 must be positive"),
    ({"num_frames": 0}, "num_frames 0 must be positive"),
    ({"fps": 0}, "fps 0 must be from 0.000001"),
    ({"fps": float("nan")}, "fps nan must be from 0.000001"),
    ({"guidance_scale": float("inf")}, "guidance scale inf is not finite"),
    ({"guidance_scale": float("nan")}, "guidance scale nan is not finite"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_cannot_be_right_is_refused_with_its_value(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        request(**change)


def test_the_largest_seed_is_one_that_torch_takes() -> None:
    import torch

    request(seeds=((MAX_SEED,),))
    assert torch.Generator().manual_seed(MAX_SEED).initial_seed() == MAX_SEED


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (1 / 2, "at this size about 21 frames fit"),
        (1 / 49, "at this size about 1 frames fit"),
        (1 / 98, "1 frame of about 496x336 fits"),
        (1e-9, "fewer prompts"),
    ],
)
def test_the_largest_video_that_fits(share: float, said: str) -> None:
    variant = replace(
        get_port("cogvideox").variants[0],
        frames=FrameRule(step=4),
        sizes=SizeRule(multiple=16),
    )
    assert said in what_fits(request(), variant, share)


@pytest.mark.parametrize(
    ("flags", "keywords"),
    [
        ("ask for --fps 2.3 or fewer --frames", "ask for fps 2.3 or fewer num_frames"),
        ("try --dtype float32, --cache none", "try dtype float32, step_cache none"),
        ("--overwrite replaces it", "overwrite replaces it"),
        ("run `tpuport encode --run-dir f`", "run `tpuport encode --run-dir f`"),
    ],
)
def test_python_reads_keywords_and_no_flags(flags: str, keywords: str) -> None:
    with pytest.raises(UsageError) as caught, python_words():
        raise UsageError(flags)
    assert str(caught.value) == keywords


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("weight", "did you mean weights?"),
        # The flags' words are known too, and what goes to generate.
        ("frames", "did you mean num_frames?"),
        ("guidance", "did you mean guidance_scale?"),
        ("num_frames", "num_frames is an argument of generate"),
        ("xyzzy", "there are model, variant, weights"),
    ],
)
def test_a_keyword_that_there_is_not_gets_the_nearest(given: str, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        RunSettings.read({given: 1}, named=str)
    assert said in str(caught.value)
