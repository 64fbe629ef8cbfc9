"""What holds for every patch and op override of every installed plugin."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from tests.patches.tools import model_runtime
from tpuport.cli.commands.patches import Entry, examine
from tpuport.core import compat
from tpuport.core.enums import Blocks
from tpuport.core.layers.exchanged_attention import EXCHANGED_ATTENTION
from tpuport.core.tracing.op_overrides import OpOverride
from tpuport.core.tracing.patching import Patch, applied
from tpuport.patches import standard
from tpuport.plugins import model_plugins

TESTS = Path(__file__).parents[1]

PLUGINS = model_plugins()
#: What is in force with upstream's blocks, and with native ones.
SETS = {
    f"{plugin.name} {blocks}": (*standard.PATCHES, *plugin.patches_with(blocks))
    for plugin in PLUGINS
    for blocks in Blocks
}
PATCHES = tuple(dict.fromkeys(p for patches in SETS.values() for p in patches))
OVERRIDES = tuple(
    dict.fromkeys((*standard.OVERRIDES, *(o for p in PLUGINS for o in p.overrides)))
)

each_patch = pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)
each_override = pytest.mark.parametrize("override", OVERRIDES, ids=lambda o: o.name)
each_set = pytest.mark.parametrize("patches", SETS.values(), ids=SETS)


@functools.cache
def sources() -> dict[str, str]:
    """The text of every test but this one."""
    files = (p for p in TESTS.rglob("test_*.py") if p != Path(__file__))
    return {str(p.relative_to(TESTS)): p.read_text() for p in files}


def mentioned(word: str) -> list[str]:
    """The test files that have a word, which may have dashes inside."""
    pattern = re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])")
    return [name for name, text in sources().items() if pattern.search(text)]


def place(patch: Patch) -> tuple[Any, str]:
    """The module or class of a target, and the attribute on it."""
    module, _, path = patch.target.partition(":")
    *parents, attr = path.split(".")
    if module.startswith("torchax"):
        compat.import_torchax()  # whichever test is the first of its process
    return functools.reduce(getattr, parents, importlib.import_module(module)), attr


def own(patch: Patch) -> Any:
    """What the owner of a target itself has there; ``None`` where it inherits."""
    owner, attr = place(patch)
    return vars(owner).get(attr)


def constants(override: OpOverride) -> Iterator[str]:
    """The names under which the module that defines an override has it."""
    module = inspect.getmodule(override.make)
    for name, value in vars(module).items():
        if value is override or (isinstance(value, tuple) and override in value):
            yield name


# --- declared well


def test_there_is_something_to_look_at() -> None:
    assert PATCHES
    assert OVERRIDES
    assert len(sources()) > 20


def test_no_two_patches_have_one_name() -> None:
    names = [patch.name for patch in PATCHES]
    assert sorted(set(names)) == sorted(names)


@each_patch
def test_a_patch_says_why_where_from_and_for_which_versions(patch: Patch) -> None:
    assert len(patch.reason.split()) >= 5
    assert re.fullmatch(r"https://\S+\.\S+/\S+", patch.link)
    assert patch.upstream
    entry = entry_of(patch)
    assert entry["installed"] is not None
    assert entry["state"] == "applicable", entry["detail"]


@each_patch
def test_a_patch_is_named_by_a_test(patch: Patch) -> None:
    assert mentioned(patch.name), f"no test under tests/ mentions {patch.name!r}"


@each_override
def test_an_override_is_used_by_a_test(override: OpOverride) -> None:
    names = list(constants(override))
    assert names, f"{override.name} is no constant of the module of its make"
    assert any(mentioned(name) for name in names), f"no test mentions {names}"
    assert len(override.reason.split()) >= 5


def test_a_word_is_found_whole() -> None:
    """The search itself."""
    assert "patches/test_torchax_slices.py" in mentioned("SLICE_ASSIGNMENT")
    assert mentioned("SLICE_ASSIGN") == []
    assert mentioned("torchax-slice-assignment") == []


# --- patches


@each_set
def test_the_patches_of_a_plugin_apply_together_and_are_undone(
    patches: tuple[Patch, ...],
) -> None:
    before = [own(patch) for patch in patches]
    with applied(patches):
        now = [own(patch) for patch in patches]
    again = [own(patch) for patch in patches]
    for was, patched, left in zip(before, now, again, strict=True):
        assert patched is not was
        assert left is was


# --- overrides


def test_overrides_are_installed_while_tracing_and_no_longer() -> None:
    others = [one for one in OVERRIDES if one is not EXCHANGED_ATTENTION]
    made: dict[str, list[Any]] = {}

    def spied(override: OpOverride) -> OpOverride:
        def make(context: Any) -> Any:
            made.setdefault(override.name, []).append(override.make(context))
            return made[override.name][-1]

        return dataclasses.replace(override, make=make)

    runtime = model_runtime(
        mesh=None, platform="cpu", overrides=[spied(o) for o in others]
    )
    before = dict(runtime.env._ops)
    with runtime.tracing() as env:
        during = dict(env._ops)
    with pytest.raises(ZeroDivisionError), runtime.tracing():
        raise ZeroDivisionError
    after = runtime.env._ops
    assert after.keys() == before.keys()
    assert all(after[operator] is before[operator] for operator in before)
    for override in others:
        for target in override.targets:
            entry = during[resolve_name(target)]
            # The first: the second block has made its own.
            assert entry.func is made[override.name][0]
            assert entry is not before.get(resolve_name(target))


@functools.cache
def entries() -> list[Entry]:
    """What the command lists, looked up once."""
    return examine(PLUGINS)


def entry_of(patch: Patch) -> Entry:
    name = ("patch", patch.name)
    (found,) = (e for e in entries() if (e["kind"], e["name"]) == name)
    return found
