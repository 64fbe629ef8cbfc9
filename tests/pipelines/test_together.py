"""Videos of one call: each is the one made alone, with rows split over dp."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.pipelines.example import all_examples, difference, made
from tests.tolerances import TOLERANCES

#: Of different numbers of tokens.
PROMPTS = ("a fox", "a boat with red sails far out on a wide grey sea", "snow falls")


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(
    "name",
    ["CogVideoXPipeline", "WanPipeline"],  # HunyuanVideo 1.5 takes one prompt
)
def test_a_video_does_not_depend_on_its_companions(name: str, count: int) -> None:
    pipeline, call = made(all_examples()[name])

    def frames(*numbers: int) -> list[np.ndarray]:
        prompts = [PROMPTS[number] for number in numbers]
        own: dict[str, Any] = {
            "prompt": prompts if len(prompts) > 1 else prompts[0],
            "generator": [torch.Generator("cpu").manual_seed(n) for n in numbers],
        }
        return list(pipeline(**{**call, **own, "output_type": "np"}).frames)

    upstream = [frames(number)[0] for number in range(count)]
    with tpuport.ported(pipeline, mesh="dp=1"):
        alone = [frames(number)[0] for number in range(count)]
    with tpuport.ported(pipeline, mesh="dp=2"):
        together = frames(*range(count))
    assert len(together) == count
    assert difference(together, alone) < TOLERANCES["video float32"]
    assert difference(together, upstream) < TOLERANCES["video float32"]
    assert difference(alone[:1], alone[1:2]) > 0.01
