"""Every module that runs gives upstream's result, called as upstream calls it."""

from __future__ import annotations

import pytest

from tests.modules.small import CONFIGS, called, configured
from tests.pipelines.example import Example, all_examples
from tests.tolerances import TOLERANCES

#: With a pipeline around each; the pipelines themselves are tested in test_examples.
EXAMPLES = [
    pytest.param(one, id=name, marks=pytest.mark.slow)
    for name, one in all_examples().items()
    if not one.refused
]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_module_gives_upstreams_result(name: str) -> None:
    for call in configured(name):
        assert call.difference("dp=1") < TOLERANCES["module float32"], call.name


@pytest.mark.parametrize("one", EXAMPLES)
def test_the_modules_of_a_pipeline_give_upstreams_results(one: Example) -> None:
    calls = called(one)
    assert calls
    for call in calls:
        assert call.difference("dp=1") < TOLERANCES["module float32"], call.name
