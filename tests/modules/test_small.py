"""Every module that runs gives upstream's result, called as upstream calls it."""

from __future__ import annotations

import pytest

import tpuport
from tests.modules.small import CONFIGS, called, configured
from tests.pipelines.example import Example, all_examples
from tests.tolerances import TOLERANCES

#: With a pipeline around each; the pipelines themselves are tested in test_examples.
EXAMPLES = [
    pytest.param(one, id=name, marks=pytest.mark.slow)
    for name, one in all_examples().items()
    if not one.refused
]


#: Calls that upstream rounds by about the tolerance, more or less with the threads of a
#: machine: float64 is the oracle.
ROUNDED = {("WanImageToVideoPipeline-2.2-5B", "AutoencoderKLWan.decode")}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_module_gives_upstreams_result(name: str) -> None:
    for call in configured(name):
        assert call.difference("dp=1") < TOLERANCES["module float32"], call.name


@pytest.mark.parametrize("one", EXAMPLES)
def test_the_modules_of_a_pipeline_give_upstreams_results(one: Example) -> None:
    calls = called(one)
    assert calls
    for call in calls:
        if (one.name, call.name) in ROUNDED:
            ported = tpuport.port(call.module, progress=False)
            assert call.from_float64(call.on(ported)) < TOLERANCES["module float32"]
            continue
        assert call.difference("dp=1") < TOLERANCES["module float32"], call.name
