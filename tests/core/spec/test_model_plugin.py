"""What a plugin declares of upstream's classes is so, or one line says what is not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch

from tests.pipelines.example import all_examples, made
from tpuport import api, plugins
from tpuport.cli.shown.errors import explain
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
TYPO: Layout = {r"(to_[qk]|net\.0\.porj)\.wieght": ("tp", None)}
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
            {"modules": {"text_encoder": Module(split="space")}},
            PluginError,
            "plugin mine: modules['text_encoder']: split='space' is for an autoencoder",
        ),
        (
            {"modules": {"transformer": Module(layout=TYPO)}},
            ShardingError,
            r"plugin mine: module transformer: layout pattern "
            r"'(to_[qk]|net\\.0\\.porj)\\.wieght' matches no weight; did you mean "
            "net.0.proj.weight? Else remove it",
        ),
    ],
    ids=["claim", "module", "split", "pattern"],
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


def test_every_patch_that_cannot_be_applied_is_told(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first by its whole target in the error's own text, all in lines below."""
    module = "diffusers.models.transformers.transformer_hunyuan_video15"
    target = f"{module}:HunyuanVideo15Transformer3DModel.fordward"
    first = replace(GONE, name="hunyuanvideo15-joint-attention", target=target)
    long = replace(GONE, name="long", target=f"diffusers:{'Long' * 90}.forward")
    form = NativeForm(patches=(long,))
    install(monkeypatch, patches=(first,), modules={"transformer": Module(native=form)})
    with pytest.raises(PluginError) as caught:
        api.port(pipeline, progress=False)
    explain(caught.value, debug=False)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == (
        "error: plugin mine: 2 patches cannot be applied: "
        f"'hunyuanvideo15-joint-attention' of {target} is gone; adapt what is named, "
        "or remove it"
    )
    assert told[1].startswith(f"  patch {first.name!r}: target {target} does not exist")
    assert told[2].startswith(
        f"  module transformer's native form: patch 'long': target {long.target} does "
    )
    assert len(told) == 3
    assert all(line.endswith("installed version or removed") for line in told[1:])


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        (r"to_x\.weight", "to_q.weight or to_k.weight or to_v.weight"),
        (r"to_out\.0\.wieght", "to_out.0.weight"),
        (r"attn1\.to_out\.weight", "attn1.to_out.0.weight"),
        (r"norm_[qk]\.weigth", "norm_q.weight or norm_k.weight"),
        (r"(to_q|net\.0\.porj)\.bais", "to_q.bias"),
        (r"blocks\.0\.attn1\.to_q\.weight", "transformer_blocks.0.attn1.to_q.weight"),
    ],
)
def test_a_pattern_without_weights_is_told_the_nearest_ends_of_names(
    pipeline: Any, pattern: str, near: str
) -> None:
    weights = dict(pipeline.transformer.named_parameters())
    with pytest.raises(ShardingError) as caught:
        Module(layout={pattern: ("tp",)}).plan("x", "default", weights, {"tp": 1})
    assert f"did you mean {near}? Else remove it" in str(caught.value)


def test_a_pattern_that_is_like_no_name_is_told_without_one(pipeline: Any) -> None:
    weights = dict(pipeline.transformer.named_parameters())
    with pytest.raises(ShardingError, match="matches no weight; remove it"):
        Module(layout={"zz": ("tp",)}).plan("x", "default", weights, {"tp": 1})


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        (r"time_embed\.2\.wieght", "time_embed.2.weight"),
        (r"blocks\.39\.attn2\.to_q\.wieght", "blocks.39.attn2.to_q.weight"),
        (r"blocks\.\d+\.attn2\.to_q\.wieght", "blocks.0.attn2.to_q.weight"),
        (r"(?:\w+\.)*(?:\w+\.)*porj\.wieght", "proj.weight"),
        (r"(?:[a-z0-9_]+\.)+qkv\.weight", "to_q.weight or to_k.weight or to_v.weight"),
        (r"(to_query|to_key|to_val|to_out\.2|net\.0\.porj)\.wieght", "to_out.0.weight"),
        (r"((a*)*)*\.wieght", ""),
        ("(a|b)" * 40 + r"\.wieght", ""),
    ],
)
def test_no_pattern_takes_long_or_mixes_up_numbers(pattern: str, near: str) -> None:
    """The names are those of a transformer of 40 blocks."""
    ends = [f"attn{n}.{part}" for n in (1, 2) for part in ("to_q", "to_k", "to_v")]
    ends += ["attn1.to_out.0", "attn2.to_out.0", "ff.net.0.proj", "ff.net.2"]
    names = [f"blocks.{n}.{end}" for n in range(40) for end in ends]
    names = ["time_embed.0", "time_embed.2", *names]
    weights = [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]
    begun = time.monotonic()
    with pytest.raises(ShardingError) as caught:
        Module(layout={pattern: ("tp",)}).plan(
            "x", "default", dict.fromkeys(weights), {"tp": 1}
        )
    took = time.monotonic() - begun
    assert took < 3
    assert (f"did you mean {near}? Else" if near else "") in str(caught.value)


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda: replace(PLUGIN, claims=()), "claims no pipeline class"),
        (lambda: replace(PLUGIN, claims=5), 'claim 5 is not "package:Class"'),
        (lambda: replace(PLUGIN, patches=5), "patches=5 is not a tuple of Patch"),
        (lambda: replace(PLUGIN, patches=("a",)), "is not a tuple of Patch"),
        (lambda: replace(PLUGIN, overrides=("a",)), "is not a tuple of OpOverride"),
        (lambda: replace(PLUGIN, variants={"a": "hub/id"}), "is no Published"),
        (lambda: replace(PLUGIN, variants=["a"]), "variants is no dict by name"),
        (lambda: replace(PLUGIN, modules={"vae": 5}), "is no Module"),
        (lambda: Published(configs=5), "configs=5 is not the name of a file"),  # type: ignore[arg-type]
        (lambda: replace(PLUGIN, suits=5), "suits is no function"),
        (
            lambda: replace(PLUGIN, suits=lambda pipeline: True),
            r"plugin mine: suits takes \(pipeline\), and is called with a pipeline's",
        ),
        (
            lambda: ModelPlugin("mine", "diffusers:LTXPipeline", patchs=()),  # type: ignore[call-arg]
            "ModelPlugin has no field 'patchs'; did you mean patches?",
        ),
        (
            lambda: Module(splits="space"),  # type: ignore[call-arg]
            "Module has no field 'splits'; did you mean split?",
        ),
        (
            lambda: Published("hub/id", config="a.json"),  # type: ignore[call-arg]
            "Published has no field 'config'; did you mean configs?",
        ),
        (lambda: Module(native=5), "native=5 is not a NativeForm"),  # type: ignore[arg-type]
        (lambda: Module(forms={"a": 5}), "and no NativeForm"),  # type: ignore[dict-item]
        (lambda: Module(layout={"a": ("zz",)}), "a mesh has no axis 'zz'"),
    ],
)
def test_a_field_of_another_type_is_refused_when_it_is_declared(
    declare: Callable[[], Any], said: str
) -> None:
    with pytest.raises((PluginError, ShardingError), match=said):
        declare()


def test_claims_may_be_classes() -> None:
    claimed = replace(PLUGIN, claims=(diffusers.LTXPipeline, "diffusers:WanPipeline"))
    claimed.check()
    assert claimed.pipelines == ("LTXPipeline", "WanPipeline")
    assert replace(PLUGIN, claims=diffusers.LTXPipeline).pipelines == ("LTXPipeline",)
    with pytest.raises(PluginError, match="AutoencoderKL', which is no pipeline"):
        replace(PLUGIN, claims="diffusers:AutoencoderKL").check()


def test_a_component_is_of_upstreams_class_or_one_below() -> None:
    plugin = replace(PLUGIN, modules={"transformer": Module()})
    upstreams = diffusers.LTXVideoTransformer3DModel
    below = type("Mine", (upstreams,), {})
    other = type(upstreams.__name__, (torch.nn.Module,), {})
    found = [plugin.component_of(one) for one in (upstreams, below, other)]
    assert found == ["transformer", "transformer", None]


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
