"""Every pipeline that runs makes upstream's video: same weights, prompt and seed.

An example compiles all modules of a pipeline, so some take more than 10 s.
"""

from __future__ import annotations

import pytest

import tpuport
from tests.pipelines.example import Example, all_examples, difference, made, run
from tests.tolerances import TOLERANCES

RUNNING = [
    pytest.param(one, id=name, marks=() if one.gate else pytest.mark.slow)
    for name, one in all_examples().items()
    if not one.refused
]


@pytest.mark.parametrize("one", RUNNING)
def test_a_pipeline_makes_upstreams_video(one: Example) -> None:
    pipeline, call = made(one)
    expected = run(pipeline, call)
    with tpuport.ported(pipeline, mesh="dp=2,sp=2"):
        found = run(pipeline, call)
    assert difference(found, expected) < TOLERANCES["video float32"]
    # The call must matter: another prompt or noise would be another video.
    assert all(array.std() > 0 for array in expected)
