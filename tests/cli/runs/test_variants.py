"""``--model`` and ``--variant``: which weights, and with which defaults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs import variants
from tpuport.core.spec.model_plugin import ModelPlugin, Published
from tpuport.errors import UnknownModelError, UsageError

PLUGIN = ModelPlugin(
    "toy",
    "diffusers:WanPipeline",
    variants={
        "small": Published("hub/small", title="a", defaults={"num_frames": 9}),
        "large": Published(
            "hub/large",
            defaults={"height": 480, "width": 720, "use_dynamic_cfg": True, "fps": 8},
        ),
    },
)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "get_model", lambda name: PLUGIN)
    monkeypatch.setattr(variants, "model_plugins", lambda: [PLUGIN])


def found(**how: Any) -> Settings:
    settings = variants.with_model(Settings(**how))
    assert (settings.model, settings.variant) == (None, None)
    return settings


def test_the_first_variant_is_the_default() -> None:
    for how in ({}, {"model": "toy"}, {"weights": "demo"}):
        settings = found(**how)
        assert (settings.weights, settings.num_frames) == ("hub/small", 9)


def test_what_a_variant_is_published_with_gives_way_to_flags() -> None:
    settings = found(variant="large", fps=16.0, options={"use_dynamic_cfg": False})
    assert (settings.height, settings.width, settings.fps) == (480, 720, 16.0)
    assert settings.options == {"use_dynamic_cfg": False}
    assert found(variant="large").options == {"use_dynamic_cfg": True}
    settings = found(variant="large", resolution="480p")
    assert (settings.height, settings.width) == (None, None)


def test_a_hub_id_that_is_published_has_the_defaults_of_its_variant() -> None:
    settings = found(weights="hub/large")
    assert (settings.weights, settings.height) == ("hub/large", 480)
    assert found(weights="hub/other") == Settings(weights="hub/other")


def test_a_variant_of_other_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "plugin_for", lambda pipeline: PLUGIN)
    settings = Settings(model="toy", variant="large", weights=str(folder))
    assert found(model="toy", variant="large", weights=str(folder)).fps == 8
    known = replace(settings, model=None)
    assert variants.with_model(known).weights == str(folder)


def test_what_there_is_not_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnknownModelError, match="it has small, large"):
        found(model="toy", variant="7b")
    assert found(model="toy", weights=str(folder)).weights == str(folder)
    other = replace(PLUGIN, claims="diffusers:LTXPipeline")
    with monkeypatch.context() as patched:
        patched.setattr(variants, "get_model", lambda name: other)
        with pytest.raises(UsageError, match="toy does not know the WanPipeline of /"):
            found(model="toy", weights=str(folder))
    monkeypatch.setattr(variants, "plugin_for", lambda pipeline: None)
    with pytest.raises(UsageError, match="no plugin knows WanPipeline of "):
        found(variant="large", weights=str(folder))
