"""The map names what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()

#: ``path/file.py:function`` or ``path/file.py:Class.method``.
NAMED = re.findall(r"`((?:tpuport|cli)/[\w/]+\.py):([\w.]+)`", TEXT)
PATHS = re.findall(r"`((?:tpuport|cli|tests|docs)/[\w/.]*[\w/])`", TEXT)


def defined(tree: ast.AST) -> dict[str, ast.AST]:
    """The names that a module or a class defines."""
    found: dict[str, ast.AST] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {t.id: node for t in targets if isinstance(t, ast.Name)}
    return found


def test_the_map_names_functions_and_files() -> None:
    assert len(NAMED) >= 20
    assert len(PATHS) >= 8
    assert len(TEXT.splitlines()) <= 130


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_function_of_the_map_is_there(path: str, name: str) -> None:
    tree: ast.AST = ast.parse((ROOT / path).read_text())
    for part in name.split("."):
        assert part in defined(tree), f"{path} has no {name}"
        tree = defined(tree)[part]


@pytest.mark.parametrize("path", PATHS)
def test_a_file_of_the_map_is_there(path: str) -> None:
    assert (ROOT / path.replace("NAME", "cogvideox")).exists()
