"""Classes of other packages: which one a name means, and what is imported for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import diffusers
import pytest

from tpuport import plugins
from tpuport.core.spec import outside
from tpuport.core.spec.model_plugin import ModelPlugin

FILES = {
    "__init__": "",
    "models": "",
    "pipeline": "from mypkg import models\nclass WanPipeline: ...\nclass Mine: ...",
    "again": "from mypkg.pipeline import Mine",
    "tool": "raise SystemExit('ran')",
}
CLAIMS = ("mypkg.pipeline:WanPipeline", "mypkg.again:Mine")


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package whose plugin claims two classes."""
    (tmp_path / "mypkg").mkdir()
    for name, text in FILES.items():
        (tmp_path / f"mypkg/{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = [*plugins.model_plugins(), ModelPlugin("mine", claims=CLAIMS)]
    monkeypatch.setattr(plugins, "model_plugins", lambda: known)
    monkeypatch.setattr(outside, "_named", set())
    yield
    for name in [n for n in sys.modules if outside.package_of(n) == "mypkg"]:
        del sys.modules[name]


def plugin_of(claim: str) -> str | None:
    found = plugins.plugin_for(claim)
    return None if found is None else found.name


def test_a_class_is_that_of_its_module() -> None:
    """``WanPipeline`` alone is diffusers' own, whoever else has the name."""
    assert plugin_of("WanPipeline") == "wan"
    assert outside.claim_of("WanPipeline") == "diffusers:WanPipeline"
    assert plugin_of(outside.claim_of("WanPipeline")) == "wan"
    own = outside.claim_of(["mypkg.pipeline", "WanPipeline"])
    assert outside.claimed(own)
    assert plugin_of(own) == "mine"
    other = outside.claim_of(["mypkg.tool", "WanPipeline"])
    assert not outside.claimed(other)
    assert plugin_of(other) is None
    assert outside.claim_of("Mine") == "mypkg.again:Mine"
    assert "mypkg" not in sys.modules


def test_a_claim_is_found_by_the_class() -> None:
    mine = importlib.import_module("mypkg.pipeline")
    assert outside.claim_on(mine.WanPipeline) == "mypkg.pipeline:WanPipeline"
    assert outside.claim_on(mine.Mine) == "mypkg.again:Mine"
    assert outside.claim_on(diffusers.WanPipeline) == "diffusers:WanPipeline"
    named = "diffusers.pipelines.wan.pipeline_wan:WanPipeline"
    for claim in (diffusers.WanPipeline, named):
        plugin = ModelPlugin("other", claims=claim)
        assert (plugin.outside, plugin.claimed) == ((), ("diffusers:WanPipeline",))


def test_modules_are_those_that_come_with_claimed_classes() -> None:
    for name in ("mypkg.tool", "mypkg.nosuch", "os"):
        assert outside.module_named(name) is None
    assert "mypkg.tool" not in sys.modules
    found = outside.module_named("mypkg.models")
    assert found is sys.modules["mypkg.models"]
