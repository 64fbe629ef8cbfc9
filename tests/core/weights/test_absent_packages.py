"""A package that upstream's code needs is named before the code runs."""

from __future__ import annotations

import importlib.util
from typing import Any

import diffusers
import pytest
from diffusers.pipelines.wan import pipeline_wan_i2v

from tpuport.core.weights import absent_packages as absent
from tpuport.core.weights.absent_packages import absent_of, absent_packages, needs_of
from tpuport.core.weights.configs import building
from tpuport.errors import WeightsError


@pytest.fixture(autouse=True)
def without_ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ``ftfy``, whether or not this machine has it or a test has put one there."""
    monkeypatch.delitem(vars(pipeline_wan_i2v), "ftfy", raising=False)
    found = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name in ("ftfy", "cosmos_guardrail") else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_a_name_that_is_used_and_not_bound_names_its_package() -> None:
    assert absent_packages([diffusers.WanImageToVideoPipeline]) == ["ftfy"]


def test_code_that_asks_for_a_package_needs_none() -> None:
    """Such as torch_xla, which all pipelines ask for."""
    assert absent_packages([diffusers.LTXPipeline]) == []


def test_a_class_that_stands_in_and_is_made_names_its_package() -> None:
    """The safety checker of Cosmos, which ``__init__`` makes."""
    cosmos = diffusers.Cosmos2TextToImagePipeline
    assert "cosmos_guardrail" in absent_packages([cosmos])
    with (
        pytest.raises(WeightsError, match=r"pip install cosmos_guardrail$"),
        building("pipeline", "model_index.json"),
    ):
        cosmos.__init__.__globals__["CosmosSafetyChecker"]()


def test_the_error_of_upstreams_code_names_the_package() -> None:
    with pytest.raises(NameError) as caught:
        pipeline_wan_i2v.prompt_clean("a fox")
    assert absent_of(caught.value) == "ftfy"


def test_the_error_of_an_import_names_the_package() -> None:
    with pytest.raises(ImportError) as caught:
        import no_such_package.inside  # noqa: F401
    assert absent_of(caught.value) == "no_such_package"
    told = "X requires a library. You can install it with pip: `pip\ninstall opencv-py`"
    assert absent_of(ImportError(told)) == "opencv-py"
    assert absent_of(ValueError(told)) is None


def test_a_class_that_stands_in_names_what_is_missing_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Dummy:
        _backends = ("torch", "bs4")

    told = {**absent.BACKENDS_MAPPING, "bs4": (lambda: False, "pip install soup4")}
    monkeypatch.setattr(absent, "BACKENDS_MAPPING", told)
    assert needs_of(Dummy) == ["soup4"]
    assert needs_of(diffusers.WanPipeline) == []
