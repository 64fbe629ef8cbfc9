"""Videos of one call: each is the one made alone, with rows split over dp."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.pipelines.example import all_examples, difference, made
from tests.tolerances import TOLERANCES
from tpuport.cli.runs.checks import MIXING
from tpuport.core.pipelines.call_arguments import made_of

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


#: Pipelines beside the two above whose videos of one call are those made alone.
APART = (
    *("AnimateDiffPipeline", "AnimateDiffPAGPipeline", "AnimateDiffSDXLPipeline"),
    *("AnimateDiffSparseControlNetPipeline", "AnyFlowPipeline", "AnyFlowFARPipeline"),
    *("CosmosTextToWorldPipeline", "EasyAnimatePipeline", "HeliosPipeline"),
    *("HunyuanVideoPipeline", "MochiPipeline", "MotifVideoPipeline"),
    *("SanaVideoPipeline", "SkyReelsV2Pipeline", "TextToVideoSDPipeline"),
    *("SkyReelsV2DiffusionForcingPipeline", "WanPipeline-2.2", "WanPipeline-2.2-5B"),
)


@pytest.mark.parametrize(
    ("name", "mixes"),
    [
        *((name, True) for name in sorted(MIXING)),
        *(pytest.param(name, False, marks=pytest.mark.sweep) for name in APART),
    ],
)
def test_pipelines_that_mix_videos_are_known(name: str, mixes: bool) -> None:
    """Upstream's own code. Some round frames to a level of 255."""
    pipeline, call = made(all_examples()[name])

    def frames(*numbers: int) -> list[np.ndarray]:
        own: dict[str, Any] = {
            "prompt": [PROMPTS[number] for number in numbers],
            "generator": [torch.Generator("cpu").manual_seed(n) for n in numbers],
        }
        if "negative_prompt" in inspect.signature(type(pipeline).__call__).parameters:
            own["negative_prompt"] = [PROMPTS[number - 1] for number in numbers]
        if len(numbers) == 1:
            own = {key: value[0] for key, value in own.items()}
        torch.manual_seed(numbers[0])  # of pipelines that draw so
        output = pipeline(**{**call, **own, "output_type": "np"})
        return list(made_of(output, pipeline).frames)

    alone = [frames(number)[0] for number in range(3)]
    found = frames(0, 1, 2)
    same = len(found) == 3 and difference(found, alone) <= 1.01 / 255
    assert same is not mixes
