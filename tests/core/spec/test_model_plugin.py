"""What a plugin declares of upstream's classes is so, or one line says what is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.pipelines.example import all_examples, made
from tpuport import api, plugins
from tpuport.core.spec.model_plugin import Layout, ModelPlugin, Module, Published
from tpuport.errors import PluginError, ShardingError
from tpuport.plugin import NativeForm, Patch

GONE = Patch(
    name="gone",
    target="diffusers.models.normalization:RMSNorm.forwards",
    replacement=lambda self, x: x,
    reason="none",
    upstream="",
)
TYPO: Layout = {r"to_x\.weight": ("tp", None)}
PLUGIN = ModelPlugin("mine", claims="diffusers:LTXPipeline")


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return made(all_examples()["LTXPipeline"])[0]


def install(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    model = replace(PLUGIN, **changed)
    known = plugins.Plugin(name="mine", package="mine 1", module="mine", model=model)
    monkeypatch.setattr(plugins, "installed_plugins", lambda: {"mine": known})


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        (
            {"claims": ("diffusers:LTXPipeline", "diffusers:LTXPipelin")},
            PluginError,
            "plugin mine: claims 'diffusers:LTXPipelin', which does not exist; did you "
            "mean LTXPipeline?",
        ),
        (
            {"modules": {"transfomer": Module()}},
            PluginError,
            "plugin mine: modules['transfomer'] is no component of LTXPipeline; did "
            "you mean transformer?",
        ),
        (
            {"modules": {"transformer": Module(layout=TYPO)}},
            ShardingError,
            r"plugin mine: module transformer: layout pattern 'to_x\\.weight' matches "
            "no weight; did you mean to_v.weight? Else remove it",
        ),
        (
            {"modules": {"transformer": Module(native=NativeForm(patches=(GONE,)))}},
            PluginError,
            "plugin mine: module transformer's native form: patch 'gone': target "
            "diffusers.models.normalization:RMSNorm.forwards does not exist",
        ),
    ],
    ids=["claim", "module", "pattern", "patch"],
)
def test_what_upstream_has_not_is_refused_when_a_pipeline_is_ported(
    pipeline: Any,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    kind: type[Exception],
    said: str,
) -> None:
    install(monkeypatch, **changed)
    with pytest.raises(kind) as caught:
        api.port(pipeline, progress=False)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_native_form_may_be_a_function_that_makes_it() -> None:
    form = NativeForm(patches=(GONE,))
    assert Module(native=lambda: form).native is form
    with pytest.raises(PluginError, match=r"<lambda>', which .* fails: ZeroDivision"):
        _ = Module(native=lambda: 1 / 0).native


def test_configs_are_beside_the_plugins_module(tmp_path: Any) -> None:
    (tmp_path / "small.json").write_text('{"model_index": {}}')
    assert Published(configs="small.json").read(tmp_path) == {"model_index": {}}
    with pytest.raises(PluginError, match=r"other\.json"):
        Published(configs="other.json").read(tmp_path)
