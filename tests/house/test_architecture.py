"""The map and the pages of the docs name what there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()

#: ``path/file.py:function`` or ``path/file.py:Class.method``.
NAMED = re.findall(r"`((?:tpuport|cli)/[\w/]+\.py):([\w.]+)`", TEXT)
PATH = re.compile(r"`((?:tpuport|cli|tests|docs)/[\w/.-]*[\w/])(?::[\w.]+)?`")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


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
    assert len(TEXT.splitlines()) <= 130


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_function_of_the_map_is_there(path: str, name: str) -> None:
    tree: ast.AST = ast.parse((ROOT / path).read_text())
    for part in name.split("."):
        assert part in defined(tree), f"{path} has no {name}"
        tree = defined(tree)[part]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_and_links_files_that_are_there(page: Path) -> None:
    text = page.read_text()
    named = PATH.findall(text)
    assert len(named) >= {"ARCHITECTURE.md": 40, "port-a-model.md": 5}.get(page.name, 0)
    for path in named:
        assert (ROOT / path.replace("NAME", "cogvideox")).exists(), path
    for target in re.findall(r"\]\((?!http)([^)#\s]+)\)", text):
        assert (page.parent / target).exists(), target
