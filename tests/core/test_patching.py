"""Patches: all resolved before one is applied, all undone, errors name the patch."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tpuport.core.patching import (
    Patch,
    PatchReport,
    applied,
    inspect_patches,
)
from tpuport.errors import PatchError

UPSTREAM = """
from functools import cached_property

ready = True

def double(x):
    return 2 * x

def triple(x):
    return 3 * x

class Base:
    def inherited(self):
        return "base"

class Block(Base):
    LIMIT = 3

    def method(self, x):
        return ("method", x)

    @staticmethod
    def static(x):
        return ("static", x)

    @classmethod
    def named(cls, x):
        return (cls.__name__, x)

    @property
    def size(self):
        return 1

    @cached_property
    def table(self):
        return 1

    class Inner:
        def deep(self):
            return "deep"

Alias = Block

def __getattr__(name):
    if name == "late":
        return len
    if name == "late_and_broken":
        raise RuntimeError("no such backend")
    raise AttributeError(f"module 'up' has no attribute {name!r}")
"""


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fresh upstream module ``up``, and a check that every test leaves it whole."""
    module = types.ModuleType("up")
    exec(UPSTREAM, vars(module))
    module.Block.__module__ = module.Base.__module__ = "up"
    monkeypatch.setitem(sys.modules, "up", module)
    owners = (module, module.Base, module.Block, module.Block.Inner)
    before = [dict(vars(owner)) for owner in owners]
    yield module
    assert [dict(vars(owner)) for owner in owners] == before


def patch(target: str, replacement: Any = lambda *a: "new", **more: Any) -> Patch:
    given = {"name": "p", "reason": "why", "upstream": "", **more}
    return Patch(target=target, replacement=replacement, **given)


def refused(*patches: Patch) -> str:
    """The message of the error on entering; the block must not run."""
    with pytest.raises(PatchError) as caught, applied(patches):
        raise AssertionError("the block ran")
    return str(caught.value)


def test_importing_the_module_imports_neither_jax_nor_torch() -> None:
    code = (
        "import sys, tpuport.core.patching; "
        "sys.exit('jax' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestPatch:
    @pytest.mark.parametrize(
        "target", ["", "up", "up.double", "up:", ":double", "up:a:b", "up:a..b", "1:a"]
    )
    def test_a_target_of_another_form_is_refused(self, target: str) -> None:
        with pytest.raises(PatchError) as caught:
            patch(target)
        assert str(caught.value) == (
            f"patch 'p': target {target!r} is not of the form "
            '"package.module:Class.attr" or "package.module:function"'
        )

    def test_a_replacement_path_of_another_form_is_refused(self) -> None:
        with pytest.raises(PatchError, match=r"patch 'p': replacement 'up\.double' is"):
            patch("up:double", "up.double")

    @pytest.mark.parametrize("missing", ["name", "reason"])
    def test_name_and_reason_are_needed(self, missing: str) -> None:
        with pytest.raises(PatchError, match="of 'up:double' needs a name and a reaso"):
            patch("up:double", **{missing: ""})

    def test_upstream_must_be_a_requirement(self) -> None:
        with pytest.raises(PatchError) as caught:
            patch("up:double", upstream="diffusers 0.42")
        assert str(caught.value).startswith(
            "patch 'p': upstream 'diffusers 0.42' is not a requirement such as "
            '"diffusers>=0.42,<0.43": '
        )

    @pytest.mark.parametrize(
        "upstream", ["a[b]>=1", "a>=1; python_version>'3'", "a @ https://example.org/a"]
    )
    def test_upstream_may_only_have_name_and_versions(self, upstream: str) -> None:
        with pytest.raises(PatchError, match="may only have a package name and versio"):
            patch("up:double", upstream=upstream)


class TestApplied:
    def test_a_function_is_replaced_within_the_block_only(self, up: Any) -> None:
        original = up.double
        with applied([patch("up:double", lambda x: x + 100)]) as report:
            assert up.double(1) == 101
            (entry,) = report.entries
            assert (entry.name, entry.target) == ("p", "up:double")
            assert (entry.state, entry.detail) == ("applied", "why")
        assert up.double is original

    def test_a_method_of_a_class_and_of_a_class_in_it(self, up: Any) -> None:
        patches = [
            patch("up:Block.method", lambda self, x: ("new", x)),
            patch("up:Block.Inner.deep", lambda self: "new deep"),
        ]
        with applied(patches):
            assert up.Block().method(1) == ("new", 1)
            assert up.Block.Inner().deep() == "new deep"
        assert up.Block().method(1) == ("method", 1)

    def test_no_patches_is_no_change(self, up: Any) -> None:
        with applied([]) as report:
            assert report == PatchReport(entries=())

    def test_a_replacement_may_be_a_path(self, up: Any) -> None:
        with applied([patch("up:double", "up:triple")]):
            assert up.double(1) == 3

    def test_contexts_nest(self, up: Any) -> None:
        with applied([patch("up:double", lambda x: "outer")]):
            with applied([patch("up:double", lambda x: "inner")]):
                assert up.double(1) == "inner"
            assert up.double(1) == "outer"

    def test_patches_are_undone_after_an_error(self, up: Any) -> None:
        original = up.double
        with (
            pytest.raises(ZeroDivisionError),
            applied([patch("up:double"), patch("up:Block.method")]),
        ):
            raise ZeroDivisionError
        assert up.double is original

    def test_patches_are_undone_in_reverse_order(self, up: Any) -> None:
        undone: list[str] = []

        class Watch(type):
            def __setattr__(cls, name: str, value: Any) -> None:
                undone.append(name)
                super().__setattr__(name, value)

        up.Watched = Watch("Watched", (), {"a": len, "b": len})
        try:
            with applied([patch("up:Watched.a"), patch("up:Watched.b")]):
                assert undone == ["a", "b"]
            assert undone == ["a", "b", "b", "a"]
        finally:
            del up.Watched

    def test_an_attribute_of_a_lazy_module_is_not_left_behind(self, up: Any) -> None:
        with applied([patch("up:late")]):
            assert up.late() == "new"
        assert up.late is len


class TestDescriptors:
    def test_static_and_class_methods_stay_what_they_are(self, up: Any) -> None:
        static, named = (vars(up.Block)[name] for name in ("static", "named"))
        patches = [
            patch("up:Block.static", lambda x: ("new", x)),
            patch("up:Block.named", lambda cls, x: ("new", cls.__name__, x)),
        ]
        with applied(patches):
            for block in (up.Block, up.Block()):
                assert block.static(1) == ("new", 1)
                assert block.named(1) == ("new", "Block", 1)
        assert vars(up.Block)["static"] is static
        assert vars(up.Block)["named"] is named

    def test_a_replacement_that_is_a_descriptor_is_set_as_it_is(self, up: Any) -> None:
        with applied([patch("up:Block.named", staticmethod(lambda x: ("new", x)))]):
            assert up.Block.named(1) == ("new", 1)

    @pytest.mark.parametrize(
        ("name", "kind"),
        [("size", property), ("table", functools.cached_property)],
    )
    def test_a_property_is_replaced_by_a_property_only(
        self, up: Any, name: str, kind: Callable[..., Any]
    ) -> None:
        assert refused(patch(f"up:Block.{name}")) == (
            f"patch 'p': up:Block.{name} is a {kind.__name__}, the replacement is a "
            f"function; replace it with a {kind.__name__}"
        )
        new = kind(lambda self: 7)
        if name == "table":
            new.__set_name__(up.Block, name)
        with applied([patch(f"up:Block.{name}", new)]):
            assert getattr(up.Block(), name) == 7

    def test_an_inherited_attribute_is_not_left_behind(self, up: Any) -> None:
        with applied([patch("up:Block.inherited")]):
            assert up.Block().inherited() == "new"
            assert up.Base().inherited() == "base"
        assert "inherited" not in vars(up.Block)

    def test_an_attribute_of_the_metaclass_is_not_one_of_the_class(
        self, up: Any
    ) -> None:
        assert "class up.Block has no 'mro'" in refused(patch("up:Block.mro"))


class TestWraps:
    def test_the_replacement_is_made_from_the_original(self, up: Any) -> None:
        def plus_one(original: Any) -> Any:
            return lambda x: original(x) + 1

        with applied([patch("up:double", plus_one, wraps=True)]):
            assert up.double(5) == 11

    @pytest.mark.parametrize(
        ("name", "old"),
        [("static", ("static", 1)), ("named", ("Block", 1)), ("method", ("method", 1))],
    )
    def test_methods_of_every_kind(self, up: Any, name: str, old: Any) -> None:
        def wrap(original: Any) -> Any:
            return lambda *args: ("wrapped", original(*args))

        with applied([patch(f"up:Block.{name}", wrap, wraps=True)]):
            assert getattr(up.Block(), name)(1) == ("wrapped", old)

    def test_an_inherited_method(self, up: Any) -> None:
        def wrap(original: Any) -> Any:
            return lambda self: original(self) + "!"

        with applied([patch("up:Block.inherited", wrap, wraps=True)]):
            assert up.Block().inherited() == "base!"

    def test_a_factory_that_fails_is_named_and_nothing_changes(self, up: Any) -> None:
        def wrap(original: Any) -> Any:
            raise KeyError("no")

        text = refused(patch("up:triple"), patch("up:double", wrap, wraps=True))
        assert text == (
            "patch 'p': its replacement, called with the original of up:double, "
            "raised KeyError: 'no'"
        )

    def test_a_factory_that_makes_no_callable_is_refused(self, up: Any) -> None:
        assert refused(patch("up:double", lambda original: None, wraps=True)) == (
            "patch 'p': the replacement of up:double is None, which cannot be called"
        )


class TestNothingChangesUnlessAllFit:
    @pytest.mark.parametrize(
        ("target", "found"),
        [
            ("up:halve", "module up has no 'halve'"),
            ("up:Bloc.method", "module up has no 'Bloc'"),
            ("up:Block.metod", "class up.Block has no 'metod'"),
            (
                "up:late_and_broken",
                "'late_and_broken' of module up raises RuntimeError: no such backend",
            ),
            (
                "tpuport_no_such:f",
                "module tpuport_no_such does not import: ModuleNotFoundError: "
                "No module named 'tpuport_no_such'",
            ),
        ],
    )
    def test_a_target_that_is_gone(self, up: Any, target: str, found: str) -> None:
        original = up.double
        text = refused(patch("up:double"), patch(target, name="q"))
        assert text == (
            f"patch 'q': target {target} does not exist, {found}; the patch must be "
            "adapted to the installed version or removed"
        )
        assert up.double is original

    def test_the_message_has_the_versions_the_patch_was_for(self, up: Any) -> None:
        text = refused(patch("up:halve", upstream="packaging>=1"))
        assert text.endswith("installed version (written for packaging>=1) or removed")

    def test_a_target_in_something_else_than_a_module_or_class(self, up: Any) -> None:
        assert refused(patch("up:ready.real")) == (
            "patch 'p': target up:ready.real is an attribute of a bool, "
            "not of a module or class"
        )

    def test_a_replacement_that_is_gone(self, up: Any) -> None:
        assert refused(patch("up:double", "up:quadruple")) == (
            "patch 'p': replacement up:quadruple cannot be imported: AttributeError: "
            "module 'up' has no attribute 'quadruple'"
        )

    def test_two_patches_of_one_target(self, up: Any) -> None:
        text = refused(
            patch("up:double", name="one"),
            patch("up:triple", name="two"),
            patch("up:double", name="three"),
        )
        assert text == (
            "patches 'one' and 'three' both replace up:double; keep one of them, or "
            "give them upstream versions that do not overlap"
        )

    def test_two_paths_to_one_target(self, up: Any) -> None:
        text = refused(
            patch("up:Block.method", name="one"), patch("up:Alias.method", name="two")
        )
        assert "patches 'one' and 'two' both replace up:Block.method" in text

    def test_a_failure_half_way_undoes_the_first_half(self, up: Any) -> None:
        original = up.double
        # Built-in classes refuse setattr, which shows only when it is tried.
        text = refused(patch("up:double"), patch("builtins:int.bit_length", name="q"))
        assert text.startswith(
            "patch 'q': builtins:int.bit_length cannot be set: TypeError: "
        )
        assert up.double is original


class TestVersions:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from importlib import metadata

        versions = {"upkg": "0.42.1", "prepkg": "0.42.0.dev3"}

        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)

    @pytest.mark.parametrize(
        "upstream", ["upkg", "upkg>=0.42,<0.43", "prepkg>=0.41", ""]
    )
    def test_a_version_in_the_range_is_patched(self, up: Any, upstream: str) -> None:
        with applied([patch("up:double", upstream=upstream)]) as report:
            assert up.double(1) == "new"
            assert report.entries[0].state == "applied"

    @pytest.mark.parametrize(
        ("upstream", "detail"),
        [
            ("upkg>=0.43", "for upkg>=0.43; upkg 0.42.1 is installed"),
            ("gonepkg>=1", "for gonepkg>=1; gonepkg is not installed"),
        ],
    )
    def test_another_version_is_skipped_and_said_so(
        self, up: Any, upstream: str, detail: str
    ) -> None:
        with applied([patch("up:double", upstream=upstream)]) as report:
            assert up.double(1) == 2
            assert report.as_dict() == {
                "patches": [
                    {
                        "name": "p",
                        "target": "up:double",
                        "state": "skipped",
                        "detail": detail,
                    }
                ]
            }

    def test_a_skipped_patch_may_have_a_target_that_is_gone(self, up: Any) -> None:
        with applied([patch("up:halve", upstream="upkg<0.40")]) as report:
            assert report.entries[0].state == "skipped"

    def test_one_target_may_have_a_patch_per_range(self, up: Any) -> None:
        old = patch("up:double", lambda x: "old", upstream="upkg<0.42", name="old")
        new = patch("up:double", lambda x: "new", upstream="upkg>=0.42", name="new")
        with applied([old, new]) as report:
            assert up.double(1) == "new"
            assert [e.state for e in report.entries] == ["skipped", "applied"]


class TestSomeoneElse:
    def test_a_foreign_replacement_is_kept_and_named(self, up: Any) -> None:
        double, triple = up.double, up.triple

        def foreign(x: Any) -> Any:
            return x

        try:
            with (
                pytest.raises(PatchError) as caught,
                applied([patch("up:double", name="one"), patch("up:triple")]),
            ):
                up.triple = foreign
            assert str(caught.value) == (
                "patch 'p': up:triple was changed by someone else while patched, it "
                f"is now {foreign!r}; it was left so, and the original is not restored"
            )
            assert up.triple is foreign
            assert up.double is double
        finally:
            up.triple = triple

    def test_a_removed_attribute_is_named(self, up: Any) -> None:
        double = up.double
        try:
            with (
                pytest.raises(PatchError, match="it is now nothing; it was left so"),
                applied([patch("up:double")]),
            ):
                del up.double
        finally:
            up.double = double

    def test_the_error_of_the_block_is_kept_as_context(self, up: Any) -> None:
        double = up.double
        try:
            with (  # noqa: PT012 - both statements are the block under test
                pytest.raises(PatchError) as caught,
                applied([patch("up:double")]),
            ):
                up.double = None
                raise ZeroDivisionError
            assert isinstance(caught.value.__context__, ZeroDivisionError)
        finally:
            up.double = double


class TestInspect:
    def test_every_state_and_nothing_changes(self, up: Any) -> None:
        before = dict(vars(up))
        report = inspect_patches(
            [
                patch("up:double", name="fine"),
                patch("up:triple", name="old", upstream="packaging<1"),
                patch("up:halve", name="gone"),
                patch("up:Block.method", name="one"),
                patch("up:Block.method", name="two"),
            ]
        )
        assert dict(vars(up)) == before
        assert [(e.name, e.state) for e in report.entries] == [
            ("fine", "applicable"),
            ("old", "skipped"),
            ("gone", "gone"),
            ("one", "broken"),
            ("two", "broken"),
        ]
        details = [e.detail for e in report.entries]
        assert details[0] == "why"
        assert details[1].startswith("for packaging<1; packaging ")
        assert "target up:halve does not exist" in details[2]
        assert details[3] == details[4]
        assert "patches 'one' and 'two' both replace up:Block.method" in details[3]
        assert json.loads(json.dumps(report.as_dict())) == report.as_dict()

    def test_what_is_applicable_applies(self, up: Any) -> None:
        patches = [patch("up:double"), patch("up:Block.static")]
        assert {e.state for e in inspect_patches(patches).entries} == {"applicable"}
        with applied(patches) as report:
            assert {e.state for e in report.entries} == {"applied"}
