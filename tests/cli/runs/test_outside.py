"""A pipeline class of another package: from its name, or from what a plugin claims."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.cli.tools import Cli, call
from tests.pipelines.example import all_examples, made, saved
from tpuport import hookspecs, plugins
from tpuport.core.spec import outside

#: LTX-Video under another name, with a transformer of its own.
MODELS = """
import diffusers

class MyTransformer(diffusers.LTXVideoTransformer3DModel):
    pass
"""
PIPELINE = """
import diffusers, transformers
from mypkg.models import MyTransformer

class MyPipeline(diffusers.LTXPipeline):
    def __init__(
        self,
        scheduler: diffusers.FlowMatchEulerDiscreteScheduler,
        vae: diffusers.AutoencoderKLLTXVideo,
        text_encoder: transformers.T5EncoderModel,
        tokenizer: transformers.T5Tokenizer,
        transformer: MyTransformer,
    ):
        super().__init__(scheduler, vae, text_encoder, tokenizer, transformer)
"""
PLUGIN = """
from tpuport.plugin import ModelPlugin, hookimpl

@hookimpl
def tpuport_model():
    return ModelPlugin("mine", claims="mypkg.pipeline:MyPipeline")
"""
ASKED = ("--prompt", "a fox", "--size", "64x32", "--frames", "9", "--steps", "1")


@pytest.fixture
def cli(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """``tpuport`` in an empty folder, with the package installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUPORT_CACHE_DIR", str(cache_dir))
    monkeypatch.setattr(outside, "_named", set())
    return call


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which ``mypkg`` is."""
    place = tmp_path / "site"
    (place / "mypkg").mkdir(parents=True)
    files = {"__init__": "", "models": MODELS, "pipeline": PIPELINE, "plugin": PLUGIN}
    for name, text in files.items():
        (place / f"mypkg/{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(place))
    yield place
    for name in [n for n in sys.modules if n.partition(".")[0] == "mypkg"]:
        del sys.modules[name]


@pytest.fixture
def folder(package: Path, tmp_path: Path) -> Path:
    """A small pipeline of the class, as ``save_pretrained`` writes it."""
    mine = importlib.import_module("mypkg.pipeline")
    upstreams = made(all_examples()["LTXPipeline"])[0]
    net = mine.MyTransformer(**upstreams.transformer.config)
    net.load_state_dict(upstreams.transformer.state_dict())
    parts = {**upstreams.components, "transformer": net}
    return saved(mine.MyPipeline(**parts), tmp_path / "weights")


def claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the plugin of ``mypkg``."""
    entry = metadata.EntryPoint("mine", "mypkg.plugin", hookspecs.GROUP)
    found = {**plugins.installed_plugins(), **plugins.load_plugins([entry])}
    monkeypatch.setattr(plugins, "installed_plugins", lambda: found)


@pytest.mark.parametrize("listed", [False, True])
def test_a_claimed_class_runs_from_the_command_line(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    """Over 10 s: programs are compiled. The index may name the module too."""
    file = folder / "model_index.json"
    index = json.loads(file.read_text())
    assert index["_class_name"] == "MyPipeline"
    assert index["transformer"] == ["mypkg.models", "MyTransformer"]
    if listed:
        index["_class_name"] = ["mypkg.pipeline", "MyPipeline"]
        file.write_text(json.dumps(index))
    asked = ("generate", "--weights", folder, *ASKED, "--out", "fox.gif")
    refused = "is code of its own" if listed else "and no plugin claims"
    assert refused in cli(*asked).last
    claim(monkeypatch)
    if listed:
        ran = cli.good("compile", "--weights", folder, *ASKED, "--out", "built")
        assert "wrote" in ran.err + ran.out
        code = folder / "mypkg.pipeline.py"
        code.write_text("raise SystemExit('ran')")
        assert "is code of its own" in cli(*asked).last
        return
    assert "with the plugin of mine" in cli.good(*asked).err


def test_a_component_of_a_package_that_nobody_claims_is_not_imported(
    cli: Cli, folder: Path, package: Path
) -> None:
    file = folder / "model_index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps({**index, "_class_name": "LTXPipeline"}))
    for name in [n for n in sys.modules if n.partition(".")[0] == "mypkg"]:
        del sys.modules[name]
    last = cli("generate", "--weights", folder, *ASKED, "--out", "fox.gif").last
    assert "names transformer as mypkg.models.MyTransformer; tpuport runs" in last
    assert "mypkg" not in sys.modules


@pytest.mark.parametrize("module", ["nosuch", "other"])
def test_a_component_of_another_module_of_the_package_is_not_imported(
    cli: Cli, folder: Path, package: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    claim(monkeypatch)
    (package / "mypkg/other.py").write_text("raise SystemExit('ran')")
    file = folder / "model_index.json"
    index = json.loads(file.read_text())
    index["transformer"][0] = f"mypkg.{module}"
    file.write_text(json.dumps(index))
    last = cli("generate", "--weights", folder, *ASKED, "--out", "fox.gif").last
    assert f"names transformer as mypkg.{module}.MyTransformer; tpuport runs" in last


def test_a_package_is_written_for_the_class_and_checked(
    cli: Cli, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the comparison, which is that of any class."""
    from tpuport.cli.runs import checked

    named = "mypkg.pipeline:MyPipelin"
    assert "cannot be imported" in cli("new-model", "mine", "--class", named).last
    cli.good("new-model", "mine", "--class", f"{named}e")
    text = (tmp_path / "mine/tpuport_mine/plugin.py").read_text()
    assert f'claims="{named}e"' in text
    monkeypatch.setattr(outside, "_named", set())  # a process of its own
    monkeypatch.setattr(checked, "compare", lambda *_: [])
    assert "MyPipeline" in cli.good("check", "mine", "--no-plan").out
