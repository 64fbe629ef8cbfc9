"""Functions can be read at one look: neither long nor with many parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

MOST_LINES, MOST_PARAMETERS = 80, 9

#: Signatures that are what a user types.
DOORS = {"cli/commands/serve.py:serve", "cli/commands/tune.py:tune"}

#: Bodies of Pallas kernels: what runs on the chip is written out in one piece.
KERNELS = {
    "tpuport/kernels/attention/splash_kernel.py:_kernel",
    "tpuport/kernels/attention/splash_kernel.py:_round",
    "tpuport/kernels/convolution/conv_kernel.py:_accumulate",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """(qualified name, function), nested ones too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
        named = isinstance(node, Function | ast.ClassDef)
        yield from functions(node, f"{prefix}{node.name}." if named else prefix)


def lines(function: Function) -> int:
    """All lines of the function, from ``def`` to the end."""
    return (function.end_lineno or 0) - function.lineno + 1


def parameters(function: Function) -> int:
    """All but ``self``; ``*args`` and ``**kwargs`` count as one each."""
    names = [node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def found() -> Iterator[tuple[str, Function]]:
    """(file:name, function) of the product."""
    for folder in ("cli", "tpuport"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for name, function in functions(tree):
                yield f"{path.relative_to(ROOT)}:{name}", function


def test_no_function_is_long() -> None:
    long = {name for name, function in found() if lines(function) > MOST_LINES}
    assert long <= KERNELS


def test_no_function_has_many_parameters() -> None:
    wide = {name for name, f in found() if parameters(f) > MOST_PARAMETERS}
    assert wide <= DOORS


def test_what_is_excepted_is_there() -> None:
    assert {name for name, _ in found()} >= DOORS | KERNELS


def test_the_walk_sees_what_is_large() -> None:
    body = "\n".join(["        pass"] * MOST_LINES)
    names = ", ".join(f"p{n}" for n in range(MOST_PARAMETERS))
    tree = ast.parse(
        f"class A:\n    def m(self, {names}, **more):\n{body}\n"
        f"def f(*, {names}):\n    def g():\n        pass\n"
    )
    sizes = {name: (lines(f), parameters(f)) for name, f in functions(tree)}
    assert sizes == {
        "A.m": (MOST_LINES + 1, MOST_PARAMETERS + 1),
        "f": (3, MOST_PARAMETERS),
        "f.g": (2, 0),
    }
