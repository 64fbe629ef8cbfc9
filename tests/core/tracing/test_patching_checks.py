"""Patches: all resolved before one is applied, all undone, errors name the patch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.tracing.upstream import patch, refused
from tpuport.core.tracing.patching import PatchStatus, applied, inspect_patches
from tpuport.errors import PatchError


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
            assert report[0].state == "applied"

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
            assert report == (PatchStatus("p", "up:double", "skipped", detail),)

    def test_a_skipped_patch_may_have_a_target_that_is_gone(self, up: Any) -> None:
        with applied([patch("up:halve", upstream="upkg<0.40")]) as report:
            assert report[0].state == "skipped"

    def test_one_target_may_have_a_patch_per_range(self, up: Any) -> None:
        old = patch("up:double", lambda x: "old", upstream="upkg<0.42", name="old")
        new = patch("up:double", lambda x: "new", upstream="upkg>=0.42", name="new")
        with applied([old, new]) as report:
            assert up.double(1) == "new"
            assert [e.state for e in report] == ["skipped", "applied"]


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
        assert [(e.name, e.state) for e in report] == [
            ("fine", "applicable"),
            ("old", "skipped"),
            ("gone", "gone"),
            ("one", "broken"),
            ("two", "broken"),
        ]
        details = [e.detail for e in report]
        assert details[0] == "why"
        assert details[1].startswith("for packaging<1; packaging ")
        assert "target up:halve does not exist" in details[2]
        assert details[3] == details[4]
        assert "patches 'one' and 'two' both replace up:Block.method" in details[3]

    def test_what_is_applicable_applies(self, up: Any) -> None:
        patches = [patch("up:double"), patch("up:Block.static")]
        assert {e.state for e in inspect_patches(patches)} == {"applicable"}
        with applied(patches) as report:
            assert {e.state for e in report} == {"applied"}
