"""Patches: all resolved before one is applied, all undone, errors name the patch."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest

from tests.core.tracing.upstream import patch, refused
from tpuport.core.tracing.patching import Status, applied, inspect_patches
from tpuport.errors import PatchError


def test_importing_the_module_imports_neither_jax_nor_torch() -> None:
    code = (
        "import sys, tpuport.core.tracing.patching; "
        "sys.exit('jax' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FORM = 'is not of the form "package.module:Class.attr" or "package.module:function"'


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            ({"target": target}, f"patch 'p': target {target!r} {FORM}")
            for target in ("", "up", "up.double", "up:", ":double", "up:a:b", "up:a..b")
        ),
        ({"target": "1:a"}, f"patch 'p': target '1:a' {FORM}"),
        ({"replacement": "up.double"}, f"patch 'p': replacement 'up.double' {FORM}"),
        ({"name": ""}, "of 'up:double' needs a name and a reason"),
        ({"reason": ""}, "of 'up:double' needs a name and a reason"),
        (
            {"upstream": "diffusers 0.42"},
            "patch 'p': upstream 'diffusers 0.42' is not a requirement such as "
            '"diffusers>=0.42,<0.43": ',
        ),
        *(
            ({"upstream": upstream}, "may only have a package name and versions")
            for upstream in ("a[b]>=1", "a>=1; python_version>'3'", "a @ https://a.org")
        ),
    ],
)
def test_a_malformed_patch_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(PatchError) as caught:
        patch(**{"target": "up:double", **given})
    assert message in str(caught.value)


Call = Callable[[Any], Any]


def of_class_and_instance(name: str) -> Call:
    return lambda up: [getattr(b, name)(1) for b in (up.Block, up.Block())]


def table() -> Any:
    made = functools.cached_property(lambda self: 7)
    made.__set_name__(object, "table")
    return made


@pytest.mark.parametrize(
    ("target", "replacement", "call", "during"),
    [
        ("double", lambda x: x + 100, lambda up: up.double(1), 101),
        ("double", "up:triple", lambda up: up.double(1), 3),
        ("late", lambda x: "new", lambda up: up.late([1]), "new"),
        ("Block.method", lambda self, x: x, lambda up: up.Block().method(1), 1),
        ("Block.Inner.deep", lambda self: 1, lambda up: up.Block.Inner().deep(), 1),
        ("Block.static", lambda x: x, of_class_and_instance("static"), [1, 1]),
        (
            "Block.named",
            lambda cls, x: (cls.__name__, "new"),
            of_class_and_instance("named"),
            [("Block", "new")] * 2,
        ),
        (
            "Block.named",
            staticmethod(lambda x: x),
            of_class_and_instance("named"),
            [1, 1],
        ),
        ("Block.size", property(lambda self: 7), lambda up: up.Block().size, 7),
        ("Block.table", table(), lambda up: up.Block().table, 7),
        (
            "Block.inherited",
            lambda self: "new",
            lambda up: (up.Block().inherited(), up.Base().inherited()),
            ("new", "base"),
        ),
    ],
)
def test_an_attribute_is_replaced_within_the_block_only(
    up: Any, target: str, replacement: Any, call: Call, during: Any
) -> None:
    """``up`` itself checks that every attribute comes back as it was."""
    before = call(up)
    with applied([patch(f"up:{target}", replacement)]) as report:
        assert call(up) == during != before
        assert report == (Status("p", f"up:{target}", "applied", "why"),)
    assert call(up) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda up: up.double(1),
        lambda up: up.Block.static(1),
        lambda up: up.Block.named(1),
        lambda up: up.Block().method(1),
        lambda up: up.Block().inherited(),
    ],
)
def test_a_wrapper_is_made_from_the_original(up: Any, call: Call) -> None:
    targets = ("double", *(f"Block.{n}" for n in ("static", "named", "method")))
    wraps = [
        patch(f"up:{name}", lambda old: lambda *a: ("wrapped", old(*a)), wraps=True)
        for name in (*targets, "Block.inherited")
    ]
    before = call(up)
    with applied(wraps):
        assert call(up) == ("wrapped", before)


def test_contexts_nest_and_no_patch_is_no_change(up: Any) -> None:
    with applied([patch("up:double", lambda x: "outer")]), applied([]) as report:
        assert report == ()
        with applied([patch("up:double", lambda x: "inner")]):
            assert up.double(1) == "inner"
        assert up.double(1) == "outer"


def test_patches_are_undone_in_reverse_order_also_after_an_error(up: Any) -> None:
    undone: list[str] = []

    class Watch(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            undone.append(name)
            super().__setattr__(name, value)

    up.Watched = Watch("Watched", (), {"a": len, "b": len})
    try:
        with (
            pytest.raises(ZeroDivisionError),
            applied([patch("up:Watched.a"), patch("up:Watched.b")]),
        ):
            raise ZeroDivisionError
        assert undone == ["a", "b", "b", "a"]
    finally:
        del up.Watched


def fails(original: Any) -> Any:
    raise KeyError("no")


GONE = "the patch must be adapted to the installed version"


@pytest.mark.parametrize(
    ("patches", "message"),
    [
        *(
            (
                [patch(target, name="q")],
                f"target {target} does not exist, {found}; {GONE}",
            )
            for target, found in (
                ("up:halve", "AttributeError: module 'up' has no attribute 'halve'"),
                ("up:Bloc.f", "AttributeError: module 'up' has no attribute 'Bloc'"),
                ("up:Block.f", "AttributeError: type object 'Block' has no 'f'"),
                # Of the metaclass.
                ("up:Block.mro", "AttributeError: type object 'Block' has no 'mro'"),
                ("up:late_and_broken", "RuntimeError: no such backend"),
                (
                    "tpuport_no_such:f",
                    "ModuleNotFoundError: No module named 'tpuport_no_such'",
                ),
            )
        ),
        (
            [patch("up:halve", upstream="packaging>=1")],
            f"{GONE} (written for packaging>=1) or removed",
        ),
        (
            [patch("up:ready.real")],
            "patch 'p': target up:ready.real is an attribute of a bool, not of a "
            "module or class",
        ),
        (
            [patch("up:double", "up:quadruple")],
            "patch 'p': replacement up:quadruple cannot be imported: AttributeError: "
            "module 'up' has no attribute 'quadruple'",
        ),
        *(
            (
                [patch(f"up:Block.{name}")],
                f"patch 'p': up:Block.{name} is a {kind}, the replacement is a "
                f"function; replace it with a {kind}",
            )
            for name, kind in (("size", "property"), ("table", "cached_property"))
        ),
        (
            [patch("up:double", fails, wraps=True)],
            "patch 'p': its replacement, called with the original of up:double, "
            "raised KeyError: 'no'",
        ),
        (
            [patch("up:double", lambda original: None, wraps=True)],
            "patch 'p': the replacement of up:double is None, which cannot be called",
        ),
        (
            [patch("up:double", name=name) for name in ("one", "three")],
            "patches 'one' and 'three' both replace up:double; keep one of them, or "
            "give them upstream versions that do not overlap",
        ),
        (
            [
                patch("up:Block.method", name="one"),
                patch("up:Alias.method", name="two"),
            ],
            "patches 'one' and 'two' both replace up:Block.method",
        ),
        # Built-in classes refuse setattr, which shows only when it is tried.
        (
            [patch("builtins:int.bit_length", name="q")],
            "patch 'q': builtins:int.bit_length cannot be set: TypeError: ",
        ),
    ],
)
def test_nothing_changes_unless_all_fit(
    up: Any, patches: list[Any], message: str
) -> None:
    """``up`` itself checks that the first patch is undone."""
    assert message in refused(patch("up:triple", name="first"), *patches)


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"upkg": "0.42.1", "prepkg": "0.42.0.dev3"}

    def version(name: str) -> str:
        if name not in known:
            raise metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize(
    ("upstream", "skipped"),
    [
        ("upkg", ""),
        ("upkg>=0.42,<0.43", ""),
        ("prepkg>=0.41", ""),
        ("upkg>=0.43", "for upkg>=0.43; upkg 0.42.1 is installed"),
        ("gonepkg>=1", "for gonepkg>=1; gonepkg is not installed"),
    ],
)
def test_a_patch_for_another_version_is_skipped_and_said_so(
    up: Any, upstream: str, skipped: str
) -> None:
    # A skipped patch may have a target that is gone, and another patch for it.
    target = "up:halve" if skipped else "up:double"
    old = patch("up:double", lambda x: "old", upstream="upkg<0.42")
    with applied([patch(target, upstream=upstream), old]) as report:
        assert up.double(1) == (2 if skipped else "new")
        assert [one.state for one in report][1] == "skipped"
        assert report[0].detail == (skipped or "why")


@pytest.mark.parametrize("foreign", [None, fails])
def test_what_someone_else_replaced_is_kept_and_named(up: Any, foreign: Any) -> None:
    """All others are undone; the error of the block is the context."""
    triple = up.triple
    try:
        with (  # noqa: PT012 - all statements are the block under test
            pytest.raises(PatchError) as caught,
            applied([patch("up:double", name="one"), patch("up:triple")]),
        ):
            del up.triple
            if foreign is not None:
                up.triple = foreign
            raise ZeroDivisionError
        assert str(caught.value) == (
            "patch 'p': up:triple was changed by someone else while patched, it is now "
            f"{foreign or 'nothing'}; it was left so, and the original is not restored"
        )
        assert isinstance(caught.value.__context__, ZeroDivisionError)
        assert vars(up).get("triple") is foreign
        assert up.double(1) == 2
    finally:
        up.triple = triple


def test_every_state_is_told_and_nothing_changes(up: Any) -> None:
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
