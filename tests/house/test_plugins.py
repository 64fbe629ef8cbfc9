"""Plugins: all through one door, and every failure names the package to blame."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tpuport import hookspecs, plugins
from tpuport.core.plan.source_scan import behind_the_door
from tpuport.errors import PluginError, UnknownModelError
from tpuport.plugins import (
    get_model,
    installed_plugins,
    load_plugins,
    plugin_of_folder,
)

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/example"

PLUGIN = """
from tpuport.plugin import ModelPlugin, hookimpl

@hookimpl
def tpuport_model():
    return ModelPlugin("{name}", claims="diffusers:LTXPipeline")
"""

RETURN = """
from tpuport.hookspecs import hookimpl

@hookimpl
def tpuport_model():
    {}
"""


class Site:
    """A folder of installed packages, each with one plugin module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, package: str, module: str, code: str) -> None:
        """Install ``package`` 1.5, whose entry point ``module`` is a module of code."""
        (self.folder / f"{module}.py").write_text(code)
        info = self.folder / f"{package}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {package}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[tpuport]\n{module} = {module}\n")

    def load(self) -> dict[str, plugins.Plugin]:
        found = metadata.distributions(path=[str(self.folder)])
        return load_plugins(e for d in found for e in d.entry_points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("first", "second"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return Site(tmp_path)


def refusal(site: Site) -> str:
    with pytest.raises(PluginError) as caught:
        site.load()
    return str(caught.value)


def test_plugins_are_found_by_model_name_and_know_their_package(site: Site) -> None:
    site.install("acme-video", "first", PLUGIN.format(name="acme"))
    site.install("other-video", "second", PLUGIN.format(name="other"))
    found = site.load()
    assert sorted(found) == ["acme", "other"]
    acme = found["acme"]
    assert (acme.name, acme.package, acme.module) == (
        "first",
        "acme-video 1.5",
        "first",
    )
    assert acme.model.name == "acme"


def test_two_plugins_of_one_model_name_are_refused(site: Site) -> None:
    site.install("acme-video", "first", PLUGIN.format(name="acme"))
    site.install("other-video", "second", PLUGIN.format(name="acme"))
    message = refusal(site)
    assert message == (
        "two plugins are called 'acme': first of acme-video 1.5 and second of"
        " other-video 1.5; uninstall one"
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import no_such_thing", "failed to import: ModuleNotFoundError: No module"),
        ("1 / 0", "failed to import: ZeroDivisionError"),
        (
            PLUGIN.format(name="x").replace("tpuport_model", "tpuport_modle"),
            "unknown hook 'tpuport_modle'",
        ),
        (
            PLUGIN.format(name="x").replace("tpuport_model()", "tpuport_model(device)"),
            "does not fit the hooks of this tpuport",
        ),
        (PLUGIN.format(name="x").replace("@hookimpl", ""), "handed over nothing"),
        (
            "x = 1",
            "handed over nothing from tpuport_model; one ModelPlugin is expected",
        ),
        (RETURN.format("return 'a port'"), "handed over ['str'] from tpuport_model"),
        (RETURN.format("return None"), "handed over nothing from tpuport_model"),
        (RETURN.format("1 / 0"), "failed in tpuport_model: ZeroDivisionError"),
        (
            PLUGIN.format(name="x")
            .replace("import ", "import Published, ")
            .replace("claims", "variants={'a': Published('', 'no.json')}, claims"),
            "variants['a']: there is no file ",
        ),
    ],
)
def test_a_broken_plugin_is_named_with_its_package(
    site: Site, code: str, expected: str
) -> None:
    site.install("acme-video", "first", code)
    message = refusal(site)
    assert message.startswith("plugin 'first' of acme-video 1.5 ")
    assert expected in message


def test_an_unknown_hook_is_answered_with_the_known_ones(site: Site) -> None:
    code = PLUGIN.format(name="x").replace("tpuport_model", "tpuport_modle")
    site.install("acme-video", "first", code)
    assert refusal(site).endswith("known hooks: tpuport_model")


def test_the_built_in_models_come_through_the_entry_points() -> None:
    entries = {
        e.name: e
        for e in metadata.entry_points(group=hookspecs.GROUP)
        if e.value.startswith("tpuport.")
    }
    assert sorted(entries) == [
        "cogvideox",
        "hunyuanvideo",
        "hunyuanvideo-13b",
        "wan",
    ]
    for name, entry in entries.items():
        assert entry.dist is not None
        assert entry.dist.name == "tpuport"
        found = installed_plugins()[name]
        assert found.module == entry.value
        assert found.package == f"tpuport {metadata.version('tpuport')}"
        assert get_model(name) is found.model
        # The rule of what a plugin may import is for other packages.
        assert found.sources == []


@pytest.mark.parametrize(
    ("setuptools", "place"),
    [
        *(("", "toy"), ("", "src/toy"), ('package-dir = { "" = "lib" }', "lib/toy")),
        ('package-dir = { toy = "." }', "."),
    ],
)
def test_a_package_need_not_be_installed(
    tmp_path: Path, setuptools: str, place: str
) -> None:
    """And takes the place of an installed one; nothing is left afterwards."""
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / place / "__init__.py").write_text("TOLD = True\n")
    code = "from toy import TOLD\n" + PLUGIN.format(name="wan")
    (tmp_path / place / "plugin.py").write_text(code)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "toys"\nversion = "1.5"\n[project.entry-points.tpuport]\n'
        f'wan = "toy.plugin"\n[tool.setuptools]\n{setuptools}\n'
    )
    before = installed_plugins()["wan"], [*sys.path]
    with plugin_of_folder(tmp_path) as found:
        assert found.package == "toys 1.5"
        assert found.file == tmp_path / place / "plugin.py"
        assert get_model("wan") is found.model
    assert (installed_plugins()["wan"], sys.path) == before
    assert "toy" not in sys.modules


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[project", "cannot be read: TOMLDecodeError"),
        ("[tool]", "cannot be read: KeyError: 'project'"),
        ("[project]", "names no plugin; add"),
        ("[project.entry-points.tpuport]\na = 'x'\nb = 'y'", "several plugins: a, b"),
        ("[project.entry-points.tpuport]\na = 'x.y'", "there is no x in"),
    ],
)
def test_a_folder_without_a_plugin_is_told_what_it_lacks(
    tmp_path: Path, text: str, told: str
) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(PluginError, match=told), plugin_of_folder(tmp_path):
        pass


def test_an_unknown_model_is_answered_with_the_installed_ones() -> None:
    with pytest.raises(UnknownModelError, match=r"'sora'; installed: .*cogvideox"):
        get_model("sora")


def test_loading_the_plugins_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tpuport.plugins import installed_plugins;"
        "installed_plugins();"
        "print(sorted({'torch','jax','diffusers','transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# --- the documents


def test_every_hook_is_described() -> None:
    text = (ROOT / "docs/plugin-hooks.md").read_text()
    hooks = [name for name in vars(hookspecs) if name.startswith("tpuport_")]
    assert hooks
    for hook in hooks:
        assert f"## `{hook}()" in text
    headings = [line for line in text.splitlines() if line.startswith("## `")]
    assert len(headings) == len(hooks)


def test_the_example_is_short_and_comes_in_by_the_one_door() -> None:
    with plugin_of_folder(EXAMPLE) as toy:
        text, sources = toy.file.read_text(), toy.sources
    assert len(text.splitlines()) <= 60
    assert set(re.findall(r"import .*|from .*", text)) == {
        "from tpuport import plugin",
        "import torch",
    }
    assert sources
    assert behind_the_door(sources) == []
