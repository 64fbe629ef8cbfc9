"""Patches: what one may be, and what it does to functions, methods and descriptors."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.core.tracing.upstream import patch, refused
from tpuport.core.tracing.patching import applied
from tpuport.errors import PatchError


def test_importing_the_module_imports_neither_jax_nor_torch() -> None:
    code = (
        "import sys, tpuport.core.tracing.patching; "
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
            (entry,) = report
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
            assert report == ()

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
