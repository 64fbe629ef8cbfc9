"""``patches``: every change to upstream code is listed, and none is made by listing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import diffusers
import pytest

from tests.cli.tools import Cli
from tpuport.cli.commands import patches as command
from tpuport.core.enums import Blocks
from tpuport.core.spec.component import NativeForm
from tpuport.core.tracing.context import OpContext
from tpuport.core.tracing.op_overrides import OpOverride
from tpuport.core.tracing.patching import Patch
from tpuport.models.cogvideox.plugin import PLUGIN
from tpuport.patches.standard import OVERRIDES, PATCHES
from tpuport.plugin import ModelPlugin, Module
from tpuport.plugins import model_plugins

#: What is listed of each: with upstream's blocks or with native ones.
LISTED = {
    plugin.name: dict.fromkeys(
        (*PATCHES, *(patch for b in Blocks for patch in plugin.patches_with(b)))
    )
    for plugin in model_plugins()
}
#: The op overrides of each.
OVERRIDDEN = {
    plugin.name: (*OVERRIDES, *plugin.overrides) for plugin in model_plugins()
}
DEDENT = "textwrap:dedent"

Install = Callable[..., None]


def patch(name: str, target: str = DEDENT, **more: Any) -> Patch:
    given = {"replacement": str.strip, "reason": f"why {name}", "upstream": "", **more}
    return Patch(name=name, target=target, **given)


def override(*targets: str, reason: str = "why so") -> OpOverride:
    return OpOverride(targets=targets, make=_make, owner="acme", reason=reason)


def _make(context: OpContext) -> Callable[..., Any]:
    raise AssertionError("made by listing it")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """These plugins in place of the installed ones, and of what every model has."""

    def install(*plugins: ModelPlugin) -> None:
        monkeypatch.setattr(command, "model_plugins", lambda: list(plugins))
        for name in ("PATCHES", "OVERRIDES"):
            monkeypatch.setattr(f"tpuport.patches.standard.{name}", ())

    return install


def toy(
    *patches: Patch,
    overrides: tuple[OpOverride, ...] = (),
    native: tuple[Patch, ...] = (),
    name: str = "toy",
) -> ModelPlugin:
    form = NativeForm(patches=native) if native else None
    modules = {"transformer": Module(native=form)}
    claims = f"diffusers:{name}"
    return ModelPlugin(name, claims, modules, patches=patches, overrides=overrides)


def block(cli: Cli, name: str) -> str:
    """All that is told of one entry, with its heading."""
    return cli("patches", name).out


# --- what is installed


def test_every_patch_and_override_of_every_model_is_listed_once(cli: Cli) -> None:
    ran = cli.good("patches", "--json")
    entries = ran.json["patches"]
    found = [(e["kind"], e["name"], *e["targets"]) for e in entries]
    patches = {("patch", p.name, p.target) for some in LISTED.values() for p in some}
    overrides = {
        ("override", o.name, *o.targets) for some in OVERRIDDEN.values() for o in some
    }
    assert len(found) == len(set(found))
    assert set(found) == patches | overrides
    assert {e["state"] for e in entries} == {"applicable"}
    for entry in entries:
        declared = [
            user
            for user, listed in LISTED.items()
            for p in (*listed, *OVERRIDDEN[user])
            if p.name == entry["name"]
        ]
        assert entry["models"] == declared


def test_an_entry_says_what_why_which_versions_who_and_where(cli: Cli) -> None:
    ran = cli("patches", "--model", PLUGIN.name, "--json")
    entries = {e["name"]: e for e in ran.json["patches"]}
    (declared,) = (p for p in PATCHES if p.name == "torchax-slice-assignment-tensor")
    assert entries[declared.name] == {
        "name": declared.name,
        "kind": "patch",
        "targets": ["torchax.tensor:Tensor.__setitem__"],
        "reason": declared.reason,
        "upstream": declared.upstream,
        "installed": metadata.version("torchax"),
        "models": ["cogvideox"],
        "blocks": "",
        "module": "tpuport.patches.torchax_slices",
        "link": declared.link,
        "state": "applicable",
        "detail": declared.reason,
    }
    assert entries.keys() == {
        one.name for one in (*LISTED[PLUGIN.name], *OVERRIDDEN[PLUGIN.name])
    }
    assert entries["layer_norm"]["upstream"] == "torchax"
    assert entries["layer_norm"]["module"] == "tpuport.patches.norms"
    assert command._names([PLUGIN]) == sorted(entries)
    attention = entries["scaled_dot_product_attention"]
    assert attention["module"] == "tpuport.core.layers.exchanged_attention"


def test_a_row_each_and_of_one_all_of_it_in_a_hundred_columns(cli: Cli) -> None:
    _head, *rows, last = cli("patches").out.splitlines()
    entries = cli("patches", "--json").json["patches"]
    assert [row.split()[:3] for row in rows] == [
        [entry["name"], entry["kind"], "applies"] for entry in entries
    ]
    assert "patches NAME" in last
    text = ""
    for entry in (entries[0], entries[-1]):
        text += block(cli, entry["name"])
        said = " ".join(block(cli, entry["name"]).split())
        assert said.startswith(f"{entry['name']}: applies {entry['kind']} ")
        for part in (
            *entry["targets"],
            f"why {' '.join(entry['reason'].split())} for",
            f"{entry['upstream']}; found {entry['installed']}",
            f"in {entry['module']}",
            entry["link"],
        ):
            assert part in said
    for line in text.splitlines():
        # A name or a link is not broken.
        assert len(line) <= 100 or len(line[12:].split()) == 1, line


def test_a_name_that_there_is_not_is_refused(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "examine", None)  # which imports diffusers
    ran = cli("patches", "layernorm")
    assert (ran.code, ran.out) == (2, "")
    assert ran.last == (
        "error: no patch is called 'layernorm'; did you mean layer_norm?"
    )
    refused = cli("patches", "--model", "sora")
    assert (refused.code, refused.out) == (2, "")
    assert "no model is called 'sora'" in refused.last


def test_patches_of_native_blocks_say_when_they_are_in_force(
    cli: Cli, install: Install
) -> None:
    both, plain, native = (
        patch(name, f"textwrap:{target}")
        for name, target in (("both", "fill"), ("plain", "wrap"), ("chip", "dedent"))
    )
    # What one form always has is no patch of native blocks.
    install(toy(plain, native=(native, both)), toy(both, name="other"))
    ran = cli.good("patches")
    assert ran.out.startswith("3 patches and ")
    assert "  in force  with --blocks native" in block(cli, "chip")
    for name in ("plain", "both"):
        assert "in force" not in block(cli, name)
    entries = {e["name"]: e for e in cli("patches", "--json").json["patches"]}
    found = {name: entries[name]["blocks"] for name in ("both", "plain", "chip")}
    assert found == {"both": "", "plain": "", "chip": "native"}
    # It takes the place of what the port does to its target otherwise.
    install(toy(patch("mine"), native=(native,)))
    ran = cli.good("patches")
    assert "  in force  with --blocks upstream" in block(cli, "mine")
    assert "  in force  with --blocks native" in block(cli, "chip")
    # Native ones are in force together, so two of one target cannot be.
    install(toy(native=(patch("one"), patch("two"))))
    assert "patches 'one' and 'two' both replace textwrap:dedent" in cli("patches").last


# --- what is wrong


def test_a_target_that_is_gone_is_named_after_the_list_and_fails(
    cli: Cli, install: Install
) -> None:
    install(toy(patch("fine"), patch("lost", "textwrap:dedennt")))
    ran = cli("patches")
    assert ran.code == 1
    assert "fine: applies\n" in block(cli, "fine")
    said = block(cli, "lost")
    assert said.startswith("lost: target is gone\n  patch     textwrap:dedennt\n")
    assert "has no attribute 'dedennt'" in said
    assert ran.out.startswith(
        "2 patches and 0 op overrides: 1 apply, 1 without a target\n"
    )
    assert ran.last.startswith(
        "error: patch 'lost': target textwrap:dedennt does not exist, AttributeError: "
        "module 'textwrap' has no attribute 'dedennt'"
    )
    again = cli("patches", "--json")
    assert again.code == 1
    assert again.last == ran.last
    states = {e["name"]: e["state"] for e in again.json["patches"]}
    assert (states["fine"], states["lost"]) == ("applicable", "gone")


def test_two_changes_of_one_target_and_a_lost_operator_are_told(
    cli: Cli, install: Install
) -> None:
    lost = "torch.ops.aten.rellu"
    twice = (override("torch.relu"), override("torch.relu", reason="as well"))
    overrides = (*twice, override(lost))
    install(toy(patch("one"), patch("two"), overrides=overrides))
    ran = cli("patches", "--json")
    assert ran.code == 1
    states = [(e["name"], e["state"]) for e in ran.json["patches"][:5]]
    names = ("one", "two", "relu", "relu", "rellu")
    assert states == [*zip(names, ["broken"] * 4 + ["gone"], strict=True)]
    assert "patches 'one' and 'two' both replace textwrap:dedent" in ran.last
    assert "torch.relu is claimed by 'acme'" in ran.last
    assert f"op override target '{lost}' does not exist" in ran.last
    # In two models they never meet.
    install(toy(patch("one")), toy(patch("two"), name="other"))
    assert cli("patches").code == 0
    install()
    assert cli("patches").out.startswith("0 patches and 0 op overrides: all apply\n")


def test_a_patch_for_another_version_is_told_and_is_no_failure(
    cli: Cli, install: Install
) -> None:
    # Its target may well be gone.
    old = patch("old", "textwrap:dedennt", upstream="packaging<1")
    install(toy(old, patch("none", "textwrap:fill", upstream="no-such-thing")))
    assert cli("patches").code == 0
    version = metadata.version("packaging")
    said = block(cli, "old")
    assert said.startswith(f"old: not for this version (found {version}")
    assert "(found no no-such-thing" in block(cli, "none")
    entries = {e["name"]: e for e in cli("patches", "--json").json["patches"]}
    assert entries["old"]["state"] == entries["none"]["state"] == "skipped"


# --- who, and where


def test_the_module_is_that_of_the_replacement() -> None:
    assert command._module("textwrap:fill") == "textwrap"
    for wrapped in (
        block,
        functools.partial(block),
        staticmethod(block),
        property(block),
        functools.cached_property(block),
    ):
        assert command._module(wrapped) == __name__


def test_scan_says_what_does_not_port_and_what_covers_it(
    cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "model.py"
    file.write_text("import torch\n\n\ndef place(x):\n    return x.cuda()\n")
    ran = cli.good("scan", file)
    first, remedy, last = ran.out.splitlines()
    assert first == f"{file}:5: .cuda(): return x.cuda()"
    assert remedy == "    leave it out: tpuport places tensors"
    assert last == "1 file: 1 finding, 0 covered by a patch"
    models = Path(diffusers.__file__).parent / "models"
    upstream = models / "transformers/transformer_hunyuan_video15.py"
    found = cli("scan", upstream, "--json").json
    assert found["covered"] == len(found["findings"]) > 0
    assert {one["patch"][:14] for one in found["findings"]} == {"hunyuanvideo15"}
    ran = cli("scan", tmp_path / "none")
    assert (ran.code, "does not exist" in ran.last) == (2, True)
